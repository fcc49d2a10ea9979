"""The picture of a walk over keys: the exact density, chains over the map, pictures along them."""

import math

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kanerva.distributions import as_normal, as_uniform
from kanerva.lab.experiments.key_density import Target, grid_points
from kanerva.lab.experiments.plots import canvas, gallery
from kanerva.pictures import tile

COLUMNS = 12  # pictures along a chain
MOSAIC = 16  # pictures along the side of the map
BOX = (-1, 1, 1, -1)  # the map's edges
Path = Float[Tensor, "S 2"]  # keys along a chain


def draw_walk(
    target: Target,
    image: Float[Tensor, "C H W"],
    place: Float[Tensor, "2"],
    exact: Float[Tensor, " n"],
    paths: dict[str, Path],
) -> Figure:
    """The density of one cue's key, given as masses on a grid; chains over what the memory shows at
    every place; below, the cue, its image, and pictures along each chain."""
    figure = canvas(11.5, 7.2)
    layout = [["density", *paths], ["along"] * (1 + len(paths))]
    panels = figure.subplot_mosaic(layout, height_ratios=(3.6, 1.9))
    side = math.isqrt(len(exact))
    panels["density"].imshow(exact.view(side, side).cpu().numpy(), extent=BOX, cmap="magma")
    panels["density"].plot(*place.cpu().tolist(), "x", color="#7fd4ff", ms=9, mew=2)
    title = "exact density of the key, tempered;\nx: where the image lies"
    panels["density"].set_title(title, fontsize=10)
    shown = target.pictures(as_normal(grid_points(MOSAIC, exact.device)))
    cue, rows = image.clone(), []
    cue[:, cue.shape[1] // 2 :] = 0.4  # hidden: grey
    for name, keys in paths.items():
        marks = torch.linspace(0, len(keys) - 1, COLUMNS).round().long()
        panels[name].imshow(tile(shown, MOSAIC, scale=1), extent=BOX, alpha=0.6)
        panels[name].set_facecolor("black")  # dimmed: paths lie over it
        draw_path(panels[name], keys, marks)
        title = f"{name}: {len(keys)} steps over\nwhat the memory shows"
        panels[name].set_title(title, fontsize=10)
        rows.append(torch.cat([cue[None], image[None], target.pictures(keys[marks])]))
    for name in ("density", *paths):
        panels[name].set(xticks=[], yticks=[])
    numbers = [str(number) for number in range(1, COLUMNS + 1)]
    gallery(panels["along"], torch.stack(rows), list(paths), ["cue", "image", *numbers])
    return figure


def draw_path(axes: Axes, keys: Path, marks: Tensor) -> None:
    """A chain as a line, with the steps whose pictures are shown marked and numbered."""
    spots = as_uniform(keys).cpu().numpy()
    axes.plot(*spots.T, "-", color="#ffb000", lw=0.8, alpha=0.6)
    look = {"textcoords": "offset points", "fontsize": 8, "color": "white", "fontweight": "bold"}
    for number, (x, y) in enumerate(spots[marks.numpy()], 1):
        axes.plot(x, y, "o", color="#ffb000", ms=4)
        aside = (-12 if x > 0.9 else 3, -10 if y < -0.9 else 3)  # within the frame
        axes.annotate(str(number), (x, y), aside, **look)
