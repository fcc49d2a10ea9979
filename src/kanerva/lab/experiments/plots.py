"""Parts of the experiments' pictures: panels, lines with error bars, a gallery."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from kanerva.lab.experiments.measures import Estimate, error_of
from kanerva.pictures import MODEL_COLOURS, tile

COLOURS = MODEL_COLOURS | {  # of models, and of what they are compared with
    "cue": "#555555",
    "kpp-empty": "#b8c7d9",
    "kpp-small": "#7aa6d6",
    "dkm, 1 step": "#9fd0b0",
    "median 3x3": "#8e5ea2",
    "hopfield": "#d98e04",
    "nearest": "#8e5ea2",
}


def canvas(width: float, height: float, title: str = "") -> Figure:
    """An empty figure with room around its panels."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(title, fontsize=10)
    return figure


def draw_line(
    axes: Axes, at: Sequence[int], values: Sequence[Estimate], scale: float = 1.0, **how: Any
) -> None:
    """Plot means, with error bars if they have errors."""
    means, errors = [scale * one["mean"] for one in values], [error_of(one) for one in values]
    bars = None if None in errors else [scale * (error or 0.0) for error in errors]
    axes.errorbar(at, means, bars, **{"marker": "o", "capsize": 3} | how)


def finish_axes(
    axes: Axes, across: str, ticks: Sequence[int], title: str = "", at: Sequence[int] | None = None
) -> None:
    """Add a faint grid behind the lines, and a tick at every measured value."""
    axes.set_xlabel(across)
    axes.set_xticks(ticks if at is None else at, [str(tick) for tick in ticks])
    axes.set_title(title, fontsize=10)
    axes.grid(True, color="#eeeeee")
    axes.set_axisbelow(True)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Use one panel's legend for all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def gallery(
    axes: Axes, pictures: Float[Tensor, "rows columns C H W"], rows: list[str], columns: list[str]
) -> None:
    """Draw a table of pictures with labelled rows and columns."""
    image = tile(pictures.flatten(0, 1), pictures.shape[1], scale=1)
    axes.imshow(image, interpolation="nearest")
    high, wide = (side + 2 for side in pictures.shape[-2:])  # with its frame
    axes.set_yticks([(row + 0.5) * high + 0.5 for row in range(len(rows))], rows, fontsize=9)
    axes.set_xticks([(n + 0.5) * wide + 0.5 for n in range(len(columns))], columns, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
