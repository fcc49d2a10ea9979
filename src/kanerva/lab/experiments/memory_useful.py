"""Fig. 9 (§4.2): is block allocated memory useful? Models with a memory against one without."""

from dataclasses import replace
from typing import Any

from kanerva.config import ShiftedResNetConfig
from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.sweep import Setting
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import MEMORY_GAIN

LENGTH = 32  # T of all models, as in kpp's preset and our records
SHIFT = ShiftedResNetConfig.shift
SETTINGS = [  # the full protocol reads records if each has three seeds
    sweep.of_paper("no-memory", "no-memory", "-shifted", encoder={"shift": SHIFT}),
    sweep.of_paper("kpp-paper", "kpp-paper"),
    Setting("kpp-empty", "kpp-empty"),  # the networks of kpp: what they gain is not the memory's
    Setting("kpp", "kpp", "store"),
]


def verdict(figures: Figures) -> str:
    """Which models beat the one without a memory, and by how much, by each score."""
    gaps, likely = figures["gaps"], figures["likely_gaps"]
    printed = [found for name, found in gaps.items() if name.startswith("kpp-paper")]
    holds = any(found["clear"] and found["nats"] > 0 for found in printed)
    overs = [found["over"] for found in gaps.values()]
    claim = "The memory as printed is useful" if holds else "The claim does NOT hold as printed"
    return (
        f"{claim} (the paper: {MEMORY_GAIN} nats, Omniglot): after {figures['images_seen']:,} "
        f"images {compare_gaps(gaps)} ({'; '.join(dict.fromkeys(overs))}). "
        f"By kl_over_T, which is no bound: {compare_gaps(likely)}."
    )


def compare_gaps(gaps: dict[str, dict[str, Any]]) -> str:
    """Describe each model's gap to the one without a memory."""
    words = []
    for model, found in gaps.items():
        side = "better" if found["nats"] > 0 else "worse"
        what = f"{abs(found['nats']):.1f} ± {found['margin']:.1f} nats {side} than no-memory"
        words.append(f"{model} is {what if found['clear'] else 'no different: ' + what}")
    return "; ".join(words)


def run(lab: Lab) -> Finding:
    entries = None if lab.quick else sweep.read_entries(SETTINGS, lab.preset)
    from_records = entries is not None
    if entries is None:
        if not lab.quick:
            lab.say(f"no three seeds of each in results/{lab.preset}: they are trained here")
        entries = train_all(lab)
    without, others = entries[0], entries[1:]
    figures = {
        "paper_nats": MEMORY_GAIN,
        "entries": entries,
        "gaps": sweep.gaps_to(without, others, "bound"),
        "likely_gaps": sweep.gaps_to(without, others, "kl_over_T"),
        "from_records": from_records,
        "images_seen": sweep.images_seen(without),
    }
    return Finding(figures, table(lab, figures), sweep.draw_bounds(lab, entries))


def train_all(lab: Lab) -> list[dict[str, Any]]:
    """Train every setting for the same number of steps, at one T."""
    equal, parts = sweep.equal_runs(lab, 300), sweep.in_episodes_of(LENGTH, lab)
    return [
        sweep.train_and_score(equal, replace(one, parts=one.parts | parts), sweep.seeds(lab))
        for one in SETTINGS
    ]


def table(lab: Lab, figures: Figures) -> list[str]:
    lines = [
        *sweep.rows(figures["entries"]),
        *sweep.gap_lines(figures["gaps"], "no-memory less"),
        *sweep.gap_lines(figures["likely_gaps"], "by kl_over_T: no-memory less"),
        f"the paper: {MEMORY_GAIN}; the temporal shift is in both",
    ]
    if figures["from_records"]:
        lines.append(f"from the records in results/{lab.preset}; lengths differ")
    return lines


ABOUT = About(
    paper="Fig. 9, right",
    shows="models with a memory against one without, in both ways of counting",
    claim=f"Kanerva++ is {MEMORY_GAIN} nats per image better than a model of the same size whose "
    "readout prior is a dense network on the embedding, without a memory. Here the embedding is "
    "pooled over the episode; the paper does not say so.",
    full="seconds from records, else 1 h on a GPU",
    presets=("omniglot",),
)
