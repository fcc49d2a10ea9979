"""The bound against what it may keep: records of one model drawn over floats and bits per image.

python -m kanerva.lab.capacity docs/capacity.png results/mnist/kpp-store*-s0.json
"""

import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.evaluation.records import read_record
from kanerva.lab.paper_figures import BITS_PER_DIM, KANERVA_PP
from kanerva.pictures import write_picture

FLOOR, QUIET = "#999999", "#666666"
COLOURS = {"float32": "#1f4e79", "bfloat16": "#4c9f70", "int8": "#d98e04", "int4": "#b03a2e"}
PIXELS = 784.0  # bits of an image kept as it is


def draw(records: list[dict[str, Any]]) -> Figure:
    """Two panels: floats for each image, and bits. A dash below each point is its floor ln T."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
    preset = records[0]["preset"]
    for axes, unit in zip(panels, ("floats", "bits"), strict=True):
        _draw_points(axes, records, unit)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.margins(x=0.12)
        axes.set_xlabel(f"{unit} of memory for each image")
        axes.grid(True, which="both", color="#eeeeee")
        axes.set_axisbelow(True)
        if preset in KANERVA_PP and preset not in BITS_PER_DIM:  # how it was scored is unpublished
            nats, at = KANERVA_PP[preset], ("axes fraction", "data")
            axes.axhline(nats, color=QUIET, linestyle=":", linewidth=1)
            _note(axes, f"the paper, {nats}", (0.98, nats), (0, 3), xycoords=at, ha="right")
    panels[0].set_ylabel("bound on −ln p(x | memory), nats per image")
    panels[1].axvline(PIXELS, color=QUIET, linestyle="--", linewidth=1)
    at = ("data", "axes fraction")
    _note(panels[1], "raw pixels", (PIXELS, 0.97), (4, 0), xycoords=at, va="top")
    for dtype in sorted({r["memory"]["dtype"] for r in records}, key=list(COLOURS).index):
        panels[0].plot([], [], "o", color=COLOURS[dtype], label=dtype)
    panels[0].plot([], [], "o", color="#555555", label="3×64×64, T varies")
    panels[0].plot([], [], "s", color="#555555", label="T = 32, side varies")
    panels[0].plot([], [], "_", color=FLOOR, markersize=12, label="floor, ln T")
    panels[0].legend(fontsize=8, loc="lower left")
    return figure


def _draw_points(axes: Axes, records: list[dict[str, Any]], unit: str) -> None:
    """A point and its floor for each record; names at those in float32."""
    named: set[str] = set()
    for record in records:
        memory = record["memory"]
        x, y, dtype = memory[f"{unit}_per_image"], record["bound"]["nll_nats"], memory["dtype"]
        side, length = memory["shape"][-1], record["T"]
        axes.plot(x, math.log(length), "_", color=FLOOR, markersize=12)
        axes.plot(x, y, "o" if side == 64 else "s", color=COLOURS[dtype], markersize=6)
        label = f"T={length}" if side == 64 else f"side {side}"
        if dtype == "float32" and label not in named:  # the same size may be trained twice
            named.add(label)
            aside, ha = ((6, 6), "left") if side == 64 else ((-4, -13), "right")
            _note(axes, label, (x, y), aside, ha=ha, color="black")


def _note(
    axes: Axes, text: str, at: tuple[float, float], aside: tuple[int, int], **how: Any
) -> None:
    """A few words beside a point."""
    look = {"textcoords": "offset points", "xytext": aside, "fontsize": 8, "color": QUIET}
    axes.annotate(text, at, **look | how)


def main(words: list[str]) -> None:
    """Draw the records named into the file named first."""
    records = [read_record(Path(word)) for word in words[1:]]
    write_picture(draw(records), Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
