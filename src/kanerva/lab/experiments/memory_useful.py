"""Fig. 9 (§4.2): is block allocated memory useful? Models with one against one without."""

from typing import Any

from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.sweep import Setting
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import MEMORY_GAIN

LENGTH = 32  # T, of all: kpp's own, and that of our records
UNSHIFTED = "kpp-paper, no shift"  # as no-memory, which sees one image at a time
FILED = [  # the full version is drawn from records, where three seeds of each are there
    Setting("no-memory", "no-memory"),
    Setting("kpp-paper", "kpp-paper", "3M"),
    Setting(UNSHIFTED, "kpp-paper", "unshifted"),
    Setting("kpp", "kpp", "store"),
]


def verdict(figures: Figures) -> str:
    """Who beats the model without a memory, and by how much."""
    gaps, words = figures["gaps"], []
    for model, found in gaps.items():
        side = "better" if found["nats"] > 0 else "worse"
        what = f"{abs(found['nats']):.1f} ± {found['margin']:.1f} nats {side} than no-memory"
        words.append(f"{model} is {what if found['clear'] else 'no different: ' + what}")
    printed = [gaps["kpp-paper"], gaps[UNSHIFTED]]
    holds = any(found["clear"] and found["nats"] > 0 for found in printed)
    claim = "The memory as printed is useful" if holds else "The claim does NOT hold as printed"
    return (
        f"{claim} (the paper: {MEMORY_GAIN} nats, Omniglot): after {figures['images_seen']:,} "
        f"images {'; '.join(words)} ({gaps['kpp-paper']['over']}). no-memory has no temporal "
        "shift, the paper's baseline had it."
    )


def run(lab: Lab) -> Finding:
    entries = None if lab.quick else sweep.read_entries(FILED, lab.preset)
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
        "gaps": {one["label"]: sweep.gap(without["bound"], one["bound"]) for one in entries[1:]},
        "paper_style_gap": style,
        "from_records": from_records,
        "images_seen": sweep.images_seen(without),
    }
    return Finding(figures, table(lab, figures), sweep.draw_bounds(lab, entries))


def train_all(lab: Lab) -> list[dict[str, Any]]:
    """Every model of FILED, equally long and at one T."""
    equal, parts = sweep.equal_runs(lab, 500), sweep.in_episodes_of(LENGTH, lab)
    unshifted = parts | {"encoder": {"shift": 0.0}}
    return [
        sweep.train_and_score(equal, Setting(one.label, one.model, parts=each), sweep.seeds(lab))
        for one, each in zip(FILED, (parts, parts, unshifted, parts), strict=True)
    ]


def table(lab: Lab, figures: Figures) -> list[str]:
    lines = [
        *sweep.rows(figures["entries"]),
        *sweep.gap_lines(figures["gaps"], "no-memory less"),
        f"no-memory less kpp-paper in paper_style: {figures['paper_style_gap']:.2f}; the paper: "
        f"{MEMORY_GAIN}",
    ]
    if figures["from_records"]:
        lines.append(f"from the records in results/{lab.preset}: equal images, each its own steps")
    return lines


ABOUT = About(
    paper="Fig. 9, right",
    shows="models with a memory against one without, equal runs",
    claim=f"Kanerva++ is {MEMORY_GAIN} nats per image better than a model of the same size whose "
    "readout prior comes from the pooled embedding, without a memory.",
    full="seconds from records, else 1 h on a GPU",
    presets=("omniglot",),
)
