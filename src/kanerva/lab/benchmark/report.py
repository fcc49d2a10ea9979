"""Measurements as text and as a picture.

python -m kanerva.lab.benchmark.report docs/speed.png results/bench/*.json
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.lab.benchmark.timing import read_measurement
from kanerva.pictures import MODEL_COLOURS

PARTS = ("data", "forward", "backward", "update", "rest", "read")
COLOURS = {"eager": "#999999", "compiled": "#4c9f70", "captured": "#1f4e79"}


def table(record: dict[str, Any]) -> str:
    """A measurement as `kanerva bench` prints it."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    head = [f"{record['command']}", f"{record['device']}; {versions}; {record['date']}", ""]
    return "\n".join(head + TABLES[record["kind"]](record))


def _throughput(record: dict[str, Any]) -> list[str]:
    on_gpu = record["rows"][0]["peak_gib"] is not None
    lines = [
        f"{'model':<10}{'preset':<14}{'T':>4}{'batch':>6}{'K':>3}{'memory':>10} {'form':<9}"
        + (f"{'images/s':>9} {'(range)':<15}" if on_gpu else "")
        + f"{'vs first':>9}{'ms/step':>9}"
        + "".join(f"{part:>9}" for part in PARTS)
        + f"{'MFLOP/im':>9}"
        + (f"{'TFLOP/s':>8}{'share':>7}{'GiB':>6}{'first s':>8}" if on_gpu else "")
    ]
    for row in record["rows"]:
        low, high = row["images_per_s_range"]
        speed = f"{row['images_per_s']:9.0f} {f'({low:.0f}-{high:.0f})':<15}"
        mflop = row["flop_per_image"] / 1e6
        chip = (
            f"{row['flop_per_s'] / 1e12:8.1f}{row['matrix_share']:7.1%}{row['peak_gib']:6.1f}"
            f"{row['first_step_s']:8.1f}"
            if on_gpu
            else ""
        )
        lines.append(
            f"{row['model']:<10}{row['preset']:<14}{row['T']:4d}{row['batch']:6d}{row['K']:3d}"
            f"{_memory(row):>10} {row['form']:<9}"
            + (speed if on_gpu else "")
            + f"{row['times_first']:8.2f}x{row['ms_per_step']:9.2f}"
            + "".join(_part(row["ms_by_part"].get(part)) for part in PARTS)
            + f"{mflop:9.0f}{chip}"
        )
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


def _part(ms: float | None) -> str:
    return f"{'-' if ms is None else f'{ms:.3f}':>9}"


def _memory(row: dict[str, Any]) -> str:
    """Its shape; of older records its side."""
    return "x".join(map(str, row["memory"])) if "memory" in row else str(row["side"])


def _agreement(record: dict[str, Any]) -> list[str]:
    lines = [
        f"{'':<28}{'first':>10}{'last':>10}{'in lockstep':>36}{'left alone':>30}",
        f"{'precision':<12}{'form':<10}{'steps':>6}{'loss':>10}{'loss':>10}{'loss':>12}"
        f"{'gradient':>12}{'update':>12}{'largest':>10}{'mean':>10}{'weights':>10}",
    ]
    for row in record["rows"]:
        lines.append(
            f"{row['precision']:<12}{row['form']:<10}{row['steps']:6d}{row['first_loss']:10.4f}"
            f"{row['last_loss']:10.4f}{row['lockstep_loss']:12.1e}{row['lockstep_gradient']:12.1e}"
            f"{row['lockstep_update']:12.1e}"
            f"{row['alone_loss']:10.1e}{row['alone_loss_mean']:10.1e}{row['alone_weights']:10.1e}"
        )
    return [
        *lines,
        "",
        f"{record['preset']}, {record['model']}: relative distance from the first form. In "
        "lockstep each step begins with its weights: largest of",
        "loss and gradient norm; mean of how far an update ends from its, as a share of it;",
        "left alone differences grow, as they do between two runs of one form (the first row); "
        "weights as a share of how far they moved",
    ]


def _quality(record: dict[str, Any]) -> list[str]:
    lines = []
    for row in record["rows"]:
        lines.append(
            f"{row['preset']}, {row['model']}: below {row['target_nats']} nats "
            f"{'after' if row['reached'] else 'NOT reached in'} {row['seconds']:.1f} s "
            f"(step {row['steps']} of {row['of_steps']}); validation {row['validation_nats']:.2f}, "
            f"test {row['test_nats']:.2f} on {row['test_images']} images; {row['note']}"
        )
    return lines


def _evaluation(record: dict[str, Any]) -> list[str]:
    return [
        f"{row['score']:<10}{row['seconds']:8.2f} s  {row['nats']:8.3f} nats, {row['images']} "
        f"images of {record['preset']} test"
        for row in record["rows"]
    ]


TABLES = {
    "throughput": _throughput,
    "agreement": _agreement,
    "quality": _quality,
    "evaluation-time": _evaluation,
}


# The picture: what the forms give, and what T and a memory's size cost


def draw(records: list[dict[str, Any]]) -> Figure:
    """Images per second by form; microseconds per image against T and a memory's floats, and of a
    read against its side: as far as each was measured at several values."""
    speeds = [record["rows"] for record in records if record["kind"] == "throughput"]
    rows = [row for found in speeds for row in found]
    several = [row for found in speeds if len({r["form"] for r in found}) > 1 for row in found]
    mixed = [row for found in speeds if len({r["model"] for r in found}) > 1 for row in found]
    alone = [row for row in rows if row not in mixed]
    panels = {
        "T": ("a step, by T", _lines(rows, "T", _step)),
        "side": ("reads alone, by side of the memory", _lines(alone or rows, "side", _read)),
        "floats": ("a step, by size of the memory", _lines(mixed, "floats", _step)),
    }
    drawn = {what: panel for what, panel in panels.items() if panel[1]}
    figure = Figure(figsize=(4.3 * (1 + len(drawn)), 4.2), layout="constrained")
    forms, *rest = figure.subplots(1, 1 + len(drawn), squeeze=False)[0]
    _bars(forms, several or rows)
    for axes, (what, (title, lines)) in zip(rest, drawn.items(), strict=True):
        _curves(axes, lines, what, title)
    return figure


XLABELS = {
    "T": "images in an episode, T",
    "side": "side of the memory",
    "floats": "floats in an episode's memory",
}


def _bars(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The first row of each model, preset and form."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        name = f"{row['preset']}\n{row['model']}"
        found.setdefault(name, {}).setdefault(row["form"], row["images_per_s"])
    for number, forms in enumerate(found.values()):
        for place, (form, rate) in enumerate(forms.items()):
            x = number + 0.27 * (place - 1)
            axes.bar(x, rate / 1e3, 0.25, color=COLOURS[form], label="" if number else form)
            axes.text(x, rate / 1e3, f"{rate / 1e3:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(found)), list(found))
    axes.margins(y=0.12)
    axes.set_ylabel("thousand training images per second")
    axes.set_title("a step in its forms", fontsize=10)
    if found:
        axes.legend(frameon=False, fontsize=8)


Lines = dict[tuple[Any, ...], dict[int, float]]


def _step(row: dict[str, Any]) -> float:
    return row["ms_per_step"]


def _read(row: dict[str, Any]) -> float:
    return row["ms_by_part"]["read"]


def _lines(rows: list[dict[str, Any]], what: str, cost: Callable[[dict[str, Any]], float]) -> Lines:
    """One for each model and preset that was measured at three values of `what`, or more."""
    lines: Lines = {}
    for row in rows:
        others = [row[k] for k in ("preset", "model", "form", "variant", "capacity", "K")]
        fixed = row["side"] if what == "T" else row["T"]
        x = math.prod(row["memory"]) if what == "floats" else row[what]
        if x is not None:
            per_image = 1e3 * cost(row) / (row["T"] * row["batch"])
            lines.setdefault((*others, fixed), {})[x] = per_image
    return {name: points for name, points in lines.items() if len(points) > 2}


def _curves(axes: Axes, lines: Lines, what: str, title: str) -> None:
    for name, points in lines.items():
        xs = sorted(points)
        style = {"markersize": 4, "label": ", ".join(name[:3]), "color": MODEL_COLOURS.get(name[1])}
        axes.plot(xs, [points[x] for x in xs], "o-", **style)
    axes.set_xscale("log", base=2)
    ticks: list[int] = []
    for x in sorted({x for points in lines.values() for x in points}):
        if not ticks or x > 1.2 * ticks[-1]:  # of two that nearly fall together, one
            ticks.append(x)
    axes.set_xticks(ticks, [f"{x / 1e3:.3g}k" if x > 2000 else str(x) for x in ticks])
    axes.minorticks_off()
    if what == "floats":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.set_ylim(0, 1.25 * max(max(points.values()) for points in lines.values()))
        axes.legend(frameon=False, fontsize=8, loc="lower left" if what == "T" else "upper left")
    axes.set_xlabel(XLABELS[what])
    axes.set_ylabel("microseconds per image")
    axes.set_title(title, fontsize=10)
    axes.grid(True, color="#eeeeee")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m kanerva.lab.benchmark.report PICTURE RECORD...")
    draw([read_measurement(Path(path)) for path in sys.argv[2:]]).savefig(sys.argv[1], dpi=110)
