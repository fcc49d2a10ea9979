"""Fig. 9 (§4.2): is block allocated memory useful? Models with one against one without."""

from matplotlib.figure import Figure

from kanerva.lab.experiments.sweep import (
    Setting,
    bars,
    equal_runs,
    filed,
    gap,
    images_seen,
    in_episodes_of,
    measured,
    rows,
    seeds,
)
from kanerva.lab.harness import Experiment, Finding, Lab

LENGTH = 32  # T, of all: kpp's own, and that of our records
UNSHIFTED = "kpp-paper, no shift"  # as no-memory, which sees one image at a time
FILED = [  # the full version is drawn from records, where three seeds of each are there
    Setting("no-memory", "no-memory"),
    Setting("kpp-paper", "kpp-paper", "3M"),
    Setting(UNSHIFTED, "kpp-paper", "unshifted"),
    Setting("kpp", "kpp", "store"),
]
PAPER = 20.6  # nats that Kanerva++ is better by, on Omniglot (§4.2)


def verdict_of(gaps: dict[str, dict], where: str) -> str:
    """Who beats the model without a memory, and by how much."""
    told = []
    for model, found in gaps.items():
        side = "better" if found["nats"] > 0 else "worse"
        what = f"{abs(found['nats']):.1f} ± {found['margin']:.1f} nats {side} than no-memory"
        told.append(f"{model} is {what if found['clear'] else 'no different: ' + what}")
    printed = [gaps["kpp-paper"], gaps[UNSHIFTED]]
    holds = any(found["clear"] and found["nats"] > 0 for found in printed)
    claim = "The memory as printed is useful" if holds else "The claim does NOT hold as printed"
    return (
        f"{claim} (the paper: {PAPER} nats, Omniglot): {where}, {'; '.join(told)} "
        f"({printed[0]['over']}). no-memory has no temporal shift, the paper's baseline had it."
    )


def run(lab: Lab) -> Finding:
    entries = None if lab.quick else filed(FILED, lab.preset)
    from_records = entries is not None
    if entries is None:
        if not lab.quick:
            lab.say(f"no three seeds of each in results/{lab.preset}: they are trained here")
        equal, parts = equal_runs(lab, 500), in_episodes_of(LENGTH, lab)
        still = parts | {"encoder": {"shift": 0.0}}
        entries = [
            measured(equal, Setting(one.label, one.model, parts=each), seeds(lab))
            for one, each in zip(FILED, (parts, parts, still, parts), strict=True)
        ]
    without, paper = entries[:2]
    gaps = {one["label"]: gap(without["bound"], one["bound"]) for one in entries[1:]}
    style = without["paper_style"]["nll_nats"]["mean"] - paper["paper_style"]["nll_nats"]["mean"]
    figures = {"paper_nats": PAPER, "entries": entries, "gaps": gaps, "paper_style_gap": style}
    figures |= {"from_records": from_records, "images_seen": images_seen(without)}
    lines = rows(entries)
    for model, found in gaps.items():
        lines.append(
            f"no-memory less {model}: {found['nats']:.2f} ± {found['margin']:.2f} nats of bound "
            f"({found['over']})"
        )
    lines.append(f"no-memory less kpp-paper in paper_style: {style:.2f}; the paper: {PAPER}")
    where = f"on {lab.preset} after {images_seen(without):,} images"
    if from_records:
        lines.append(f"from the records in results/{lab.preset}: equal images, each its own steps")
    figure = Figure(figsize=(11.6, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    count = len(without["seeds"])
    many = f"mean ± std, {count} seeds" if count > 1 else "one seed"
    bars(left, entries, "bound", f"test bound, {many}")
    bars(right, entries, "paper_style", f"paper_style (no bound), {many}")
    figure.suptitle(
        f"{lab.preset}, T={LENGTH}, {images_seen(without):,} images each; "
        f"the paper's gap on Omniglot: {PAPER} nats",
        fontsize=10,
    )
    return Finding(figures, lines, verdict_of(gaps, where), {"": figure})


EXPERIMENT = Experiment(
    name="memory-useful",
    paper="Fig. 9, right",
    shows="models with a memory against one without, equal runs",
    claim="Kanerva++ is 20.6 nats per image better than a model of the same size whose readout "
    "prior comes from the pooled embedding, without a memory.",
    run=run,
    full="seconds from records, else 1 h on a GPU",
    presets=("omniglot",),
)
