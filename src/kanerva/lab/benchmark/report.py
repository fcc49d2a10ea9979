"""Format measurements as text and as a picture.

python -m kanerva.lab.benchmark.report docs/speed.png results/bench/*.json
"""

import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.evaluation.report import columns
from kanerva.lab.benchmark.timing import read_measurement
from kanerva.pictures import MODEL_COLOURS, write_picture

PARTS = ("data", "forward", "backward", "update", "rest", "read")
COLOURS = {"eager": "#999999", "compiled": "#4c9f70", "captured": "#1f4e79"}


def table(record: dict[str, Any]) -> str:
    """Format a measurement as `kanerva bench` prints it."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    head = [f"{record['command']}", f"{record['device']}; {versions}; {record['date']}", ""]
    return "\n".join(head + TABLES[record["kind"]](record))


def _throughput(record: dict[str, Any]) -> list[str]:
    on_gpu = record["rows"][0]["peak_gib"] is not None
    cells = [_throughput_cells(row, on_gpu) for row in record["rows"]]
    lines = columns([list(cells[0]), *(list(row.values()) for row in cells)], left=2).splitlines()
    if not on_gpu:
        return [*lines, "", "on a CPU only the ratios of one run mean anything"]
    rates = {row["precision"]: row["matrix_rate"] for row in record["rows"]}
    said = ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {name}" for name, rate in rates.items())
    return [
        *lines,
        "",
        f"share: of a large matrix product's rate, measured here: {said}",
        "rest: of a step, beside its parts, each timed alone; read: part of forward; GiB: the most "
        "that was taken;",
        "first s: the first step, with what is compiled or comes from a cache of earlier ones",
    ]


def _throughput_cells(row: dict[str, Any], on_gpu: bool) -> dict[str, str]:
    """Map column titles to the cells of a row. Some, such as images/s, are for GPUs only."""
    memory = "x".join(map(str, row["memory"])) if "memory" in row else str(row["side"])
    found = {"model": row["model"], "preset": row["preset"], "T": str(row["T"])}
    found |= {"batch": str(row["batch"]), "K": str(row["K"]), "memory": memory, "form": row["form"]}
    if on_gpu:
        low, high = row["images_per_s_range"]
        found |= {"images/s": f"{row['images_per_s']:.0f}", "(range)": f"({low:.0f}-{high:.0f})"}
    found |= {"vs first": f"{row['times_first']:.2f}x", "ms/step": f"{row['ms_per_step']:.2f}"}
    for part in PARTS:  # some are missing in older records
        ms = row["ms_by_part"].get(part)
        found[part] = "-" if ms is None else f"{ms:.3f}"
    found["MFLOP/im"] = f"{row['flop_per_image'] / 1e6:.0f}"
    if on_gpu:
        found["TFLOP/s"] = f"{row['flop_per_s'] / 1e12:.1f}"
        found |= {"share": f"{row['matrix_share']:.1%}", "GiB": f"{row['peak_gib']:.1f}"}
        found["first s"] = f"{row['first_step_s']:.1f}"
    return found


DISTANCES = {  # column titles of distances from the first form, and their fields
    "loss": "lockstep_loss",
    "gradient": "lockstep_gradient",
    "update": "lockstep_update",
    "alone, largest": "alone_loss",
    "mean": "alone_loss_mean",
    "weights": "alone_weights",
}


def _agreement(record: dict[str, Any]) -> list[str]:
    rows = [["precision", "form", "steps", "first loss", "last loss", *DISTANCES]]
    for row in record["rows"]:
        losses = [f"{row[key]:.4f}" for key in ("first_loss", "last_loss")]
        apart = [f"{row[key]:.1e}" for key in DISTANCES.values()]
        rows.append([row["precision"], row["form"], str(row["steps"]), *losses, *apart])
    return [
        *columns(rows, left=2).splitlines(),
        "",
        f"{record['preset']}, {record['model']}: relative distance from the first form. In "
        "lockstep, where each step begins with its weights: largest of",
        "loss and gradient norm; mean of how far an update ends from its, as a share of it;",
        "left alone differences grow, as they do between two runs of one form (the first row): "
        "largest and mean of losses; weights as a share of how far they moved",
    ]


def _quality(record: dict[str, Any]) -> list[str]:
    lines = [
        f"{row['preset']}, {row['model']}: below {row['target_nats']} nats "
        f"{'after' if row['reached'] else 'NOT reached in'} {row['seconds']:.1f} s "
        f"(step {row['steps']} of {row['of_steps']}); validation {row['validation_nats']:.2f}, "
        f"test {row['test_nats']:.2f} on {row['test_images']} images; {row['note']}"
        for row in record["rows"]
    ]
    several = len(lines) > 1
    return [*lines, "the first time includes the start of the process"] if several else lines


def _latency(record: dict[str, Any]) -> list[str]:
    several = "," in record["preset"]
    rows = [
        [*(["preset", "model"] if several else []), "verb", "held", "first ms", "ms", "(range)"]
    ]
    for row in record["rows"]:
        low, high = row["least_ms"], row["most_ms"]
        times = [f"{row['first_ms']:.1f}", f"{row['ms']:.2f}", f"({low:.2f}-{high:.2f})"]
        whose = [row["preset"], row["model"]] if several else []
        rows.append([*whose, row["verb"], str(row["held"]), *times])
    return [
        *columns(rows, left=3 if several else 1).splitlines(),
        "",
        f"{record['preset']}, {record['rows'][0]['threads']} threads; one image or cue a call, "
        "cues show their upper half. first: in a memory not read before, which decodes its blocks",
    ]


TABLES = {
    "throughput": _throughput,
    "agreement": _agreement,
    "quality": _quality,
    "latency": _latency,
}


# The picture: speed of the forms, and cost of T and of the memory's size

PANELS = {
    "T": ("a step, by T", "images in an episode, T"),
    "side": ("reads alone, by side of the memory", "side of the memory"),
    "floats": ("a step, by size of the memory", "floats in an episode's memory"),
}
Lines = dict[tuple[Any, ...], dict[int, float]]


def draw(records: list[dict[str, Any]]) -> Figure:
    """Plot speed: images per second of each form, then microseconds per image.

    A step's time is plotted against T and against the memory's floats, a read's time against the
    memory's side. A panel is left out if no line has at least three values.
    """
    speeds = [record["rows"] for record in records if record["kind"] == "throughput"]
    rows = [row for found in speeds for row in found]
    several = [row for found in speeds if len({r["form"] for r in found}) > 1 for row in found]
    mixed = [row for found in speeds if len({r["model"] for r in found}) > 1 for row in found]
    alone = [row for row in rows if row not in mixed]
    shown = {"T": rows, "side": alone or rows, "floats": mixed}
    lines = {what: found for what in PANELS if (found := _lines(shown[what], what))}
    figure = Figure(figsize=(4.3 * (1 + len(lines)), 4.2), layout="constrained")
    forms, *rest = figure.subplots(1, 1 + len(lines), squeeze=False)[0]
    _bars(forms, several or rows)
    for axes, (what, found) in zip(rest, lines.items(), strict=True):
        _curves(axes, found, what)
    return figure


def _bars(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw a bar for each preset, model and form, from the first row that has them."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        name = f"{row['preset']}\n{row['model']}"
        found.setdefault(name, {}).setdefault(row["form"], row["images_per_s"] / 1e3)
    for number, forms in enumerate(found.values()):
        for place, (form, rate) in enumerate(forms.items()):
            look: Any = {"color": COLOURS[form], "label": "" if number else form}
            bar = axes.bar(number + 0.27 * (place - 1), rate, 0.25, **look)
            axes.bar_label(bar, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(found)), list(found))
    axes.margins(y=0.12)
    axes.set_ylabel("thousand training images per second")
    axes.set_title("a step in its forms", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _lines(rows: list[dict[str, Any]], what: str) -> Lines:
    """Microseconds per image against `what`: a line for each group of rows that differ only in
    `what`, if it has at least three values."""
    lines: Lines = {}
    for row in rows:
        others = [row[k] for k in ("preset", "model", "form", "variant", "capacity", "K")]
        fixed = row["side"] if what == "T" else row["T"]
        x = math.prod(row["memory"]) if what == "floats" else row[what]
        ms = row["ms_by_part"]["read"] if what == "side" else row["ms_per_step"]
        if x is not None:
            lines.setdefault((*others, fixed), {})[x] = 1e3 * ms / (row["T"] * row["batch"])
    return {name: points for name, points in lines.items() if len(points) > 2}


def _curves(axes: Axes, lines: Lines, what: str) -> None:
    for name, points in lines.items():
        xs = sorted(points)
        style = {"markersize": 4, "label": ", ".join(name[:3]), "color": MODEL_COLOURS.get(name[1])}
        axes.plot(xs, [points[x] for x in xs], "o-", **style)
    axes.set_xscale("log", base=2)
    ticks: list[int] = []
    for x in sorted({x for points in lines.values() for x in points}):
        if not ticks or x > 1.2 * ticks[-1]:  # skip ticks that would overlap
            ticks.append(x)
    axes.set_xticks(ticks, [f"{x / 1e3:.3g}k" if x > 2000 else str(x) for x in ticks])
    axes.minorticks_off()
    if what == "floats":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.25 * max(max(points.values()) for points in lines.values()))
    title, across = PANELS[what]
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel(across)
    axes.set_ylabel("microseconds per image")
    axes.set_title(title, fontsize=10)
    axes.grid(True, color="#eeeeee")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m kanerva.lab.benchmark.report PICTURE RECORD...")
    write_picture(draw([read_measurement(Path(p)) for p in sys.argv[2:]]), Path(sys.argv[1]))
