"""Fig. 9 (§4.2): is block allocated memory useful? Models with one against one without."""

from typing import Any

from matplotlib.figure import Figure

from kanerva.lab.experiments.sweep import (
    Setting,
    bars,
    equal_runs,
    gap,
    images_seen,
    in_episodes_of,
    read_entries,
    rows,
    seeds,
    seeds_of,
    train_and_score,
    two_panels,
)
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.lab.paper_figures import MEMORY_GAIN

LENGTH = 32  # T, of all: kpp's own, and that of our records
UNSHIFTED = "kpp-paper, no shift"  # as no-memory, which sees one image at a time
FILED = [  # the full version is drawn from records, where three seeds of each are there
    Setting("no-memory", "no-memory"),
    Setting("kpp-paper", "kpp-paper", "3M"),
    Setting(UNSHIFTED, "kpp-paper", "unshifted"),
    Setting("kpp", "kpp", "store"),
]


def compare_with_none(figures: Figures) -> str:
    """By how much each model is better or worse than the one without a memory."""
    words = []
    for model, found in figures["gaps"].items():
        side = "better" if found["nats"] > 0 else "worse"
        what = f"{abs(found['nats']):.1f} ± {found['margin']:.1f} nats {side} than no-memory"
        words.append(f"{model} is {what if found['clear'] else 'no different: ' + what}")
    over = figures["gaps"]["kpp-paper"]["over"]
    return f"after {figures['images_seen']:,} images {'; '.join(words)} ({over})"


def verdict(figures: Figures) -> str:
    """Who beats the model without a memory, and by how much."""
    printed = [figures["gaps"]["kpp-paper"], figures["gaps"][UNSHIFTED]]
    holds = any(found["clear"] and found["nats"] > 0 for found in printed)
    claim = "The memory as printed is useful" if holds else "The claim does NOT hold as printed"
    return (
        f"{claim} (the paper: {MEMORY_GAIN} nats, Omniglot): {compare_with_none(figures)}. "
        "no-memory has no temporal shift, the paper's baseline had it."
    )


def run(lab: Lab) -> Finding:
    entries = None if lab.quick else read_entries(FILED, lab.preset)
    from_records = entries is not None
    if entries is None:
        if not lab.quick:
            lab.say(f"no three seeds of each in results/{lab.preset}: they are trained here")
        entries = train_all(lab)
    without, paper = entries[:2]
    style = without["paper_style"]["nll_nats"]["mean"] - paper["paper_style"]["nll_nats"]["mean"]
    figures = {
        "paper_nats": MEMORY_GAIN,
        "entries": entries,
        "gaps": {one["label"]: gap(without["bound"], one["bound"]) for one in entries[1:]},
        "paper_style_gap": style,
        "from_records": from_records,
        "images_seen": images_seen(without),
    }
    return Finding(figures, table(lab, figures), {"": draw(lab, figures)})


def train_all(lab: Lab) -> list[dict[str, Any]]:
    """Every model of FILED, equally long and at one T."""
    equal, parts = equal_runs(lab, 500), in_episodes_of(LENGTH, lab)
    unshifted = parts | {"encoder": {"shift": 0.0}}
    return [
        train_and_score(equal, Setting(one.label, one.model, parts=each), seeds(lab))
        for one, each in zip(FILED, (parts, parts, unshifted, parts), strict=True)
    ]


def table(lab: Lab, figures: Figures) -> list[str]:
    lines = rows(figures["entries"])
    for model, found in figures["gaps"].items():
        lines.append(
            f"no-memory less {model}: {found['nats']:.2f} ± {found['margin']:.2f} nats of bound "
            f"({found['over']})"
        )
    lines.append(
        f"no-memory less kpp-paper in paper_style: {figures['paper_style_gap']:.2f}; the paper: "
        f"{MEMORY_GAIN}"
    )
    if figures["from_records"]:
        lines.append(f"from the records in results/{lab.preset}: equal images, each its own steps")
    return lines


def draw(lab: Lab, figures: Figures) -> Figure:
    figure = two_panels(
        f"{lab.preset}, T={LENGTH}, {figures['images_seen']:,} images each; "
        f"the paper's gap on Omniglot: {MEMORY_GAIN} nats"
    )
    left, right = figure.axes
    entries = figures["entries"]
    bars(left, entries, "bound", f"test bound, {seeds_of(entries[0])}")
    bars(right, entries, "paper_style", f"paper_style (no bound), {seeds_of(entries[0])}")
    return figure


EXPERIMENT = Experiment(
    name="memory-useful",
    paper="Fig. 9, right",
    shows="models with a memory against one without, equal runs",
    claim=f"Kanerva++ is {MEMORY_GAIN} nats per image better than a model of the same size whose "
    "readout prior comes from the pooled embedding, without a memory.",
    run=run,
    verdict=verdict,
    full="seconds from records, else 1 h on a GPU",
    presets=("omniglot",),
)
