"""Measurements as text and as a picture.

python -m kanerva.benchmark.report docs/speed.png results/bench/*.json
"""

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.benchmark.timing import read_measurement

matplotlib.use("Agg")
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
            + "".join(f"{row['ms_by_part'].get(part, math.nan):9.3f}" for part in PARTS)
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
    read against its side."""
    speeds = [record["rows"] for record in records if record["kind"] == "throughput"]
    rows = [row for found in speeds for row in found]
    figure = Figure(figsize=(16, 4.2), layout="constrained")
    forms, lengths, sides, sizes = figure.subplots(1, 4)
    _bars(forms, [row for found in speeds if len({r["form"] for r in found}) > 1 for row in found])
    _curves(lengths, rows, "T", "a step, by T", lambda r: 1e3 * r["ms_per_step"])
    _curves(
        sides, rows, "side", "reads alone, by side of the memory",
        lambda r: 1e3 * r["ms_by_part"]["read"],
    )  # fmt: skip
    mixed = [row for found in speeds if len({r["model"] for r in found}) > 1 for row in found]
    _curves(
        sizes, [row | {"floats": math.prod(row["memory"])} for row in mixed], "floats",
        "a step, by size of the memory", lambda r: 1e3 * r["ms_per_step"],
    )  # fmt: skip
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


def _curves(axes: Axes, rows: list[dict[str, Any]], what: str, title: str, cost: Any) -> None:
    """One line for each model and preset that was measured at several values of `what`."""
    lines: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        others = [row[k] for k in ("model", "preset", "variant", "form", "capacity", "K")]
        fixed = row["side"] if what == "T" else row["T"]
        if row[what] is None:
            continue
        per_image = cost(row) / (row["T"] * row["batch"])
        lines.setdefault((*others, fixed), {})[row[what]] = per_image
    for name, points in lines.items():
        if len(points) < 3:
            continue
        xs = sorted(points)
        label = f"{name[1]}, {name[0]}, {name[3]}"
        axes.plot(xs, [points[x] for x in xs], "o-", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    if axes.lines:
        ticks: list[int] = []
        for x in sorted({int(x) for line in axes.lines for x in line.get_xdata()}):  # pyright: ignore
            if not ticks or x > 1.2 * ticks[-1]:  # of two that nearly fall together, one
                ticks.append(x)
        axes.set_xticks(ticks, [f"{x / 1e3:.3g}k" if x > 2000 else str(x) for x in ticks])
        axes.minorticks_off()
        if what == "floats":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.legend(frameon=False, fontsize=8)
        else:
            axes.legend(frameon=False, fontsize=8, loc="lower left")
            axes.set_ylim(0, 1.25 * max(max(line.get_ydata()) for line in axes.lines))  # pyright: ignore
    else:
        axes.set_axis_off()
        return
    axes.set_xlabel(XLABELS[what])
    axes.set_ylabel("microseconds per image")
    axes.set_title(title, fontsize=10)
    axes.grid(True, color="#eeeeee")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m kanerva.benchmark.report PICTURE RECORD...")
    draw([read_measurement(Path(path)) for path in sys.argv[2:]]).savefig(sys.argv[1], dpi=110)
