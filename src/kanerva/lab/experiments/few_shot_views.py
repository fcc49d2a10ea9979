"""The table and the plot of `few-shot`."""

from typing import Any

from matplotlib.figure import Figure

from kanerva.evaluation.report import columns
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.measures import Estimate
from kanerva.lab.harness import Figures

OURS, EMPTY, COPIES = "kpp-bits", "kpp-bits-empty", "kpp-bits, no labels"
INDEPENDENT = "independent pixels"  # the bound with pixels independent given z
LOOKS = {  # of kpp-bits: by independent pixels, by no labels
    (False, False): ("-", plots.COLOURS[OURS]),
    (True, False): ("-", "#d98e04"),
    (False, True): ("--", "#6f9fc8"),
    (True, True): ("--", "#e9bd6a"),
}
OFF = 1000  # nats: beyond this a model fails on its input
TITLES = {  # of the scores in a table
    "own": "bound of a drawing that is not written, under drawings of its character",
    "gain": "the same under as many drawings of another character, less that",
    "over_empty": f"the same under an empty memory, less that; for kpp-bits that of {EMPTY}",
    "other_over": "under drawings of another character, less under that empty memory",
}


def table(figures: Figures) -> list[str]:
    """A block for each score, a row for each model and a column for each number of drawings."""
    rows = [["drawings written", "none", *map(str, figures["written"])]]
    for key in TITLES:
        for label, found in figures["models"].items():
            start = f"{found['empty']['mean']:.2f}" if key == "own" else ""
            cells = [nats(row[key]) for row in found["written"]]
            rows.append([f"  {label.removesuffix(' pixels')}", start, *cells])
    head, *body = columns(rows, left=1).splitlines()
    lines, models = [head], len(figures["models"])
    for number, title in enumerate(TITLES.values()):
        lines += [title, *body[number * models : (number + 1) * models]]
    empty = figures["empty"]
    missing, earlier = figures.get("missing", []), figures.get("earlier", {})
    seeds = "one seed" if figures["seeds"] == 1 else f"kpp-bits: {figures['seeds']} seeds; else one"
    return [
        *lines,
        f"{EMPTY} costs {nats(empty[OURS])}, with pixels that are independent given z "
        f"{nats(empty[f'{OURS}, {INDEPENDENT}'])}",
        f"nats per image, key included, ± standard error over {figures['characters']} characters, "
        f"{figures['rounds']} drawings of each left out",
        f"at random; {seeds}. A drawing written takes {figures['bits_per_drawing']:.0f} bits "
        "(kpp-bits). Labels draw and augment",
        "training episodes; no labels: kin are copies of one image. dkm is trained without KL(M)",
        *([f"not trained yet: {', '.join(missing)}"] if missing else []),
        *(say_earlier(name, **source) for name, source in earlier.items()),
    ]


def say_earlier(name: str, commit: str, device: str) -> str:
    return f"{name}: from an earlier record of these drawings ({commit[:7]}, {device})"


def nats(value: Estimate) -> str:
    """Format a value with its error; a huge value in a shorter form."""
    mean, error = value["mean"], value["error"]
    moderate = max(abs(mean), 10 * error) < OFF
    return f"{mean:.2f}±{error:.2f}" if moderate else f"{mean:.0e}±{error:.0e}"


def draw(preset: str, figures: Figures) -> Figure:
    """Plot both gains, and the bound, against the number of drawings written."""
    counts = figures["written"]
    figure = plots.canvas(
        15.2,
        4.6,
        f"{preset}: nats per drawing that is not written; {figures['characters']} unseen "
        "characters, ± standard error over them",
    )
    titles = {
        "gain": "gained against another character's drawings",
        "over_empty": "gained against an empty memory",
        "own": "what it costs",
    }
    for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        drawn = {
            label: [row[key] for row in found["written"]]
            for label, found in figures["models"].items()
            if label != "vae" or key == "own"
        }
        low, high = limits([v for label, each in drawn.items() if OURS in label for v in each])
        for label, values in drawn.items():
            inside = all(low <= value["mean"] <= high for value in values)
            style, colour = LOOKS[INDEPENDENT in label, COPIES in label]
            look: dict[str, Any] = {
                "color": colour if OURS in label else plots.COLOURS[label],
                "label": label if inside else f"{label} (off the plot: see the table)",
                "ls": style,
            }
            plots.draw_line(axes, range(len(counts)), values, **look)
        across = "drawings of its character that are written"
        plots.finish_axes(axes, across, counts, title, range(len(counts)))
        axes.set_ylim(low, high)
    figure.axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def limits(values: list[Estimate]) -> tuple[float, float]:
    """The range of a panel: that of our models, and some room. Others may be far off."""
    means = [value["mean"] for value in values]
    room = 0.2 * (max(means) - min(means)) + 1
    return min(means) - room, max(means) + room
