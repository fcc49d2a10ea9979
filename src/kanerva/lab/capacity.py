"""The bound against what it may keep: records of one model drawn over floats and bits per image.

python -m kanerva.lab.capacity docs/capacity.png results/mnist/kpp-store*-s0.json
"""

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.evaluation.record import read_record
from kanerva.lab.paper_figures import BITS_PER_DIM, KANERVA_PP

matplotlib.use("Agg")
COLOURS = {"float32": "#1f4e79", "bfloat16": "#4c9f70", "int8": "#d98e04", "int4": "#b03a2e"}


def draw(records: list[dict[str, Any]]) -> Figure:
    """Two panels: floats for each image, and bits. A dash below each point is its floor ln T."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
    named: dict[str, set[str]] = {"floats": set(), "bits": set()}
    for axes, unit in zip(panels, ("floats", "bits"), strict=True):
        for record in records:
            memory = record["memory"]
            x, y, dtype = memory[f"{unit}_per_image"], record["bound"]["nll_nats"], memory["dtype"]
            side, length = memory["shape"][-1], record["T"]
            axes.plot(x, math.log(length), "_", color="#999999", markersize=12)
            axes.plot(x, y, "o" if side == 64 else "s", color=COLOURS[dtype], markersize=6)
            if dtype == "float32":
                above = side == 64
                label = axes.annotate(
                    f"T={length}" if above else f"side {side}",
                    (x, y),
                    textcoords="offset points",
                    xytext=(6, 6) if above else (-4, -13),
                    horizontalalignment="left" if above else "right",
                    fontsize=8,
                )
                if label.get_text() in named[unit]:  # the same size trained twice
                    label.remove()
                named[unit].add(label.get_text())
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.margins(x=0.12)
        axes.set_xlabel(f"{unit} of memory for each image")
        axes.grid(True, which="both", color="#eeeeee")
        axes.set_axisbelow(True)
        published = KANERVA_PP.get(records[0]["preset"])  # how it was scored is not published
        if published is not None and records[0]["preset"] not in BITS_PER_DIM:
            axes.axhline(published, color="#888888", linestyle=":", linewidth=1)
            axes.annotate(
                f"the paper, {published}",
                (0.98, published),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                xytext=(0, 3),
                horizontalalignment="right",
                fontsize=8,
                color="#666666",
            )
    panels[0].set_ylabel("bound on −ln p(x | memory), nats per image")
    panels[1].axvline(784, color="#888888", linestyle="--", linewidth=1)
    panels[1].annotate(
        "raw pixels",
        (784, 0.97),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        xytext=(4, 0),
        fontsize=8,
        color="#666666",
        va="top",
    )
    for dtype in sorted({r["memory"]["dtype"] for r in records}, key=list(COLOURS).index):
        panels[0].plot([], [], "o", color=COLOURS[dtype], label=dtype)
    panels[0].plot([], [], "o", color="#555555", label="3×64×64, T varies")
    panels[0].plot([], [], "s", color="#555555", label="T = 32, side varies")
    panels[0].plot([], [], "_", color="#999999", markersize=12, label="floor, ln T")
    panels[0].legend(fontsize=8, loc="lower left")
    return figure


def main(words: list[str]) -> None:
    """Draw the records named into the file named first."""
    records = [read_record(Path(word)) for word in words[1:]]
    draw(records).savefig(words[0], dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
