"""Plot the bound against the bits of a memory, with the lowest bound those bits allow.

    python -m kanerva.lab.capacity docs/capacity.png RECORDS

RECORDS are evaluations on one data set, and records of `reproduce gist` and `reproduce lossless`.
Some of the evaluations must be of models without a memory. The plot compares them with:

    floor      ln T: no distribution shared by T images can average below it
    limit      the best bound without a memory, minus the memory's bits in nats; at least the floor
    lossless   every pixel stored, coded with a table of pixel contexts; its bound is the floor
    prefix     `kpp-bits` without a gist: the first pixels of an image, as many as the bits allow
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kanerva.errors import UserError
from kanerva.evaluation.records import read_record
from kanerva.evaluation.report import columns
from kanerva.lab.tables import named
from kanerva.pictures import write_picture
from kanerva.plain_files import read_json

QUIET = "#666666"
LENGTH = 32  # T of floor, limit and the two codes
LOOKS = {  # family: marker, colour, label
    "kpp": ("o", "#1f4e79", "kpp: blocks of numbers"),
    "kpp-bits": ("D", "#b03a2e", "kpp-bits: gist, then pixels"),
    "prefix": ("v", "#d98e04", "the pixels of kpp-bits, no gist"),
    "lossless": ("*", "#4c9f70", "lossless code"),
}
WITHOUT = ("kpp-empty", "kpp-bits-empty")  # the same networks with nothing written
TWIN = {"kpp": "kpp-empty", "kpp-bits": "kpp-bits-empty", "prefix": "kpp-bits-empty"}


@dataclass(frozen=True)
class Point:
    """The bound with a memory of `bits` per image."""

    name: str
    family: str
    bits: float
    bound: float
    length: int = LENGTH

    @property
    def sum(self) -> float:
        """Memory plus bound in nats: the total code length of an image."""
        return self.bits * math.log(2) + self.bound


def collect(paths: Sequence[Path]) -> list[Point]:
    """Make a point of each record. Records of one model without a memory become one mean point."""
    points, without = [], dict[str, list[float]]()
    records = [read_record(path) for path in paths if path.parent.name != "reproduce"]
    for record in records:
        model, bound = record["model"], record["bound"]["nll_nats"]
        if model in WITHOUT:
            without.setdefault(model, []).append(bound)
        elif model in LOOKS:
            bits = record["memory"]["bits_per_image"]
            points.append(Point(named(record), model, bits, bound, record["T"]))
    points += [Point(model, model, 0.0, statistics.fmean(b)) for model, b in without.items()]
    for path in paths:
        if path.parent.name == "reproduce":
            made = _codes(read_json(path), records)
            points += [point for point in made if point.family not in without]
    return sorted(points, key=lambda point: (-point.bits, point.name))


def _codes(record: dict[str, Any], records: list[dict[str, Any]]) -> list[Point]:
    """Points of the lossless or the prefix-only code, from a record of `reproduce`."""
    figures = record["figures"]
    if record["name"] == "lossless":
        return [Point("lossless code", "lossless", figures["bits_per_image"], math.log(LENGTH))]
    if record["name"] != "gist":
        raise UserError(f"a record of {record['name']} has no code to compare with")
    # When kpp-bits stores every pixel, its bound is the cost of the key alone. The prefix-only code
    # pays the same for keys.
    bits_records = [r for r in records if r["model"] == "kpp-bits" and r["T"] == LENGTH]
    if not bits_records:
        raise UserError("the prefix-only code pays for keys like kpp-bits: add a record of that")
    key = min(r["bound"]["nll_nats"] for r in bits_records)
    rows = [(r["prefix"]["bits"]["mean"], r["prefix"]["nats"]["mean"]) for r in figures["rows"]]
    points = [Point("prefix-only code", "prefix", bits, nats + key) for bits, nats in rows]
    # without a memory, this code pays for every pixel and for no key
    whole_code = statistics.fmean(nats + bits * math.log(2) for bits, nats in rows)
    return [*points, Point("prefix-only code, no memory", "kpp-bits-empty", 0.0, whole_code)]


def limit(points: Sequence[Point], bits: float, length: int = LENGTH) -> float:
    """The lowest bound that a memory of `bits` per image could reach."""
    best = min(point.bound for point in points if point.bits == 0)
    return max(math.log(length), best - bits * math.log(2))


def efficiency(points: Sequence[Point], point: Point) -> float | None:
    """Nats saved per nat of memory, compared with the same networks without a memory."""
    twins = [other.bound for other in points if other.family == TWIN.get(point.family)]
    if not twins or point.bits == 0:
        return None
    return (twins[0] - point.bound) / (point.bits * math.log(2))


def table(points: Sequence[Point]) -> str:
    """A table of all points, the largest memory first."""
    rows = [["", "T", "bits/image", "bound", "limit", "sum", "efficiency"]]
    for point in points:
        share = efficiency(points, point)
        rows.append(
            [point.name, str(point.length), f"{point.bits:,.1f}", f"{point.bound:.2f}"]
            + [f"{limit(points, point.bits, point.length):.2f}", f"{point.sum:,.1f}"]
            + ["-" if share is None else f"{share:.3f}"]
        )
    return columns(rows, left=1)


def draw(points: Sequence[Point]) -> Figure:
    """Two panels over bits: the bound, and the sum of memory and bound."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2))
    held = [point for point in points if point.bits > 0]
    for axes, what in zip(panels, ("bound", "sum"), strict=True):
        for family, (mark, colour, label) in LOOKS.items():
            mine = [(p.bits, getattr(p, what)) for p in held if p.family == family]
            if mine:
                axes.plot(*zip(*mine, strict=True), mark, color=colour, markersize=7, label=label)
        for point in (p for p in points if p.bits == 0):
            axes.axhline(point.bound, color=QUIET, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("bits of memory for each image")
        axes.grid(True, which="both", color="#eeeeee")
        axes.set_axisbelow(True)
    span = [min(p.bits for p in held), max(p.bits for p in held)]
    curve = [span[0] * (span[1] / span[0]) ** (n / 200) for n in range(201)]
    lengths = sorted(p.length for p in held)
    others = f"limit, T = {LENGTH} (dots: T = {lengths[0]} to {lengths[-1]:,})"
    panels[0].plot(curve, [limit(points, b) for b in curve], color=QUIET, label=others)
    panels[0].set_ylabel("bound on −ln p(x | memory), nats per image")
    panels[1].set_ylabel("memory and bound together, nats per image")
    panels[0].plot([], [], "--", color=QUIET, label="the same networks, no memory")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main(words: list[str]) -> None:
    """Plot the records to the file that the first word names."""
    write_picture(draw(collect([Path(word) for word in words[1:]])), Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
