"""Fig. 10, right (§4.3): the divergences against the number K of blocks read for each image."""

from matplotlib.figure import Figure

from kanerva.lab.experiments.sweep import (
    Setting,
    draw_floor,
    equal_runs,
    finish_axes,
    line_over,
    over_values,
    rows,
    seeds,
    seeds_in_words,
    seeds_of,
    train_and_score,
    two_panels,
    within_published,
)
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.lab.paper_figures import READS_KL_STD
from kanerva.pictures import MODEL_COLOURS

READS = (1, 2, 8, 64)


def verdict(figures: Figures) -> str:
    """Does K matter? By the deviation of the means."""
    claim = (
        f"As in the paper, K does not matter (std of the KL at most {READS_KL_STD}, or that of "
        "seeds)"
        if within_published(figures["over_K"]["kl"], READS_KL_STD)
        else f"The KL varies more than the paper's {READS_KL_STD} nats: the claim does NOT hold"
    )
    idle = (
        " So little that what is read hardly depends on the image, whatever K."
        if figures["largest_kl_y"] < 0.5
        else ""
    )
    kl, total = figures["over_K"]["kl"], figures["over_K"]["nll_nats"]
    return (
        f"{claim}: over K the total KL has std {kl['std']:.2f}, the bound {total['std']:.2f} "
        f"({seeds_in_words(kl)}); the keys tell up to {figures['largest_kl_y']:.2f} nats.{idle} "
        "kpp has no K: it reads the one block that an image wrote."
    )


def run(lab: Lab) -> Finding:
    reads = list(lab.pick(READS[:3], READS))
    equal = equal_runs(lab, 400)
    entries = []
    for count in reads:
        setting = Setting(f"kpp-paper K={count}", "kpp-paper", parts={"memory": {"reads": count}})
        entries.append(train_and_score(equal, setting, seeds(lab)))
    figures = {
        "paper_std": READS_KL_STD,
        "K": reads,
        "entries": entries,
        "over_K": {term: over_values(entries, term) for term in ("kl", "nll_nats")},
        "largest_kl_y": max(entry["bound"]["kl_y"]["mean"] for entry in entries),
        "kpp": "not applicable: one block for each image, memory.reads=1",
    }
    return Finding(figures, table(figures), {"": draw(lab, reads, entries)})


def table(figures: Figures) -> list[str]:
    over = figures["over_K"]
    return [
        *rows(figures["entries"]),
        f"over K: std of the total KL {over['kl']['std']:.3f}, of the bound "
        f"{over['nll_nats']['std']:.3f}; the paper's std of the KL {READS_KL_STD}",
        "kpp: not applicable, it reads one block for each image",
    ]


def draw(lab: Lab, reads: list[int], entries: list[dict]) -> Figure:
    first = entries[0]
    figure = two_panels(
        f"{lab.preset}: {seeds_of(first)}, {first['steps']} steps of {first['images_per_step']} "
        "images"
    )
    left, right = figure.axes
    line_over(left, reads, entries, "nll_nats", "kpp-paper", color=MODEL_COLOURS["kpp-paper"])
    for term, name, how in (
        ("kl", "total", {"color": "black", "lw": 4, "alpha": 0.3}),
        ("kl_z", "KL z", {"color": MODEL_COLOURS["kpp-paper"], "ls": "--"}),
        ("kl_y", "KL y", {"color": MODEL_COLOURS["dkm"], "ls": ":"}),
    ):
        line_over(right, reads, entries, term, name, **how)
    draw_floor(left, first["floor"])
    finish_axes(left, "blocks read for each image, K", "test bound")
    finish_axes(right, "blocks read for each image, K", "its divergences")
    return figure


EXPERIMENT = Experiment(
    name="read-steps",
    paper="Fig. 10, right",
    shows="the bound and its divergences against K",
    claim="The number of reads hardly matters: for K from 1 to 64 the total test KL varies by one "
    f"standard deviation of {READS_KL_STD} nats per image.",
    run=run,
    verdict=verdict,
    full="2 h on a GPU",
    presets=("mnist",),
)
