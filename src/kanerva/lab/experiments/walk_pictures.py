"""Pictures of a walk over keys: the exact density, the chains over the map, and a film."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from kanerva.distributions import as_normal, as_uniform
from kanerva.lab.experiments.key_density import Target, grid_points
from kanerva.pictures import tile

COLUMNS = 12  # pictures along a chain
MOSAIC = 16  # pictures along the side of the map
BOX = (-1, 1, 1, -1)  # the map's edges
AMBER, DARK_AMBER = (255, 176, 0), (150, 110, 30)
Path = Float[Tensor, "S 2"]  # keys along a chain
OneImage = Float[Tensor, "C H W"]


@dataclass(frozen=True)
class WalkPictures:
    """One cue, the density of its key, and what chains saw on their way."""

    target: Target
    image: OneImage
    place: Float[Tensor, "2"]
    exact: Float[Tensor, " n"]

    def mosaic(self, width: int) -> Image.Image:
        """What the memory shows at every place: pictures of a grid of keys."""
        made = self.target.pictures(as_normal(grid_points(MOSAIC, self.exact.device)))
        rows = [torch.cat(list(row), dim=-1) for row in made.unflatten(0, (MOSAIC, MOSAIC))]
        whole = torch.cat(rows, dim=-2).cpu().clamp(0, 1)
        pixels = (whole.expand(3, -1, -1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        resized = Image.fromarray(pixels.numpy()).resize((width, width), Image.Resampling.BOX)
        black = Image.new("RGB", resized.size)
        return Image.blend(resized, black, 0.4)  # dimmed: paths lie over it

    def cue(self) -> OneImage:
        """The image, its lower half grey."""
        hidden = self.image.clone()
        hidden[:, hidden.shape[1] // 2 :] = 0.4
        return hidden

    # The sheet

    def sheet(self, paths: dict[str, Path]) -> Figure:
        """The exact density, chains over the memory's map, and pictures along them."""
        figure = Figure(figsize=(11.5, 7.2), layout="constrained")
        halves = figure.add_gridspec(2, 1, height_ratios=(3.6, 1.9))
        top, bottom = (figure.add_subfigure(half) for half in (halves[0], halves[1]))
        density, *maps = top.subplots(1, 1 + len(paths))
        self._draw_density(density)
        back = self.mosaic(640)
        for axes, (name, keys) in zip(maps, paths.items(), strict=True):
            axes.imshow(back, extent=BOX)
            draw_path(axes, keys)
            axes.set_title(f"{name}: {len(keys)} steps over\nwhat the memory shows", fontsize=10)
        for axes in (density, *maps):
            hide_ticks(axes)
        self._draw_strips(bottom, paths)
        return figure

    def _draw_density(self, axes: Axes) -> None:
        side = math.isqrt(len(self.exact))
        axes.imshow(self.exact.view(side, side).cpu().numpy(), extent=BOX, cmap="magma")
        axes.set_title("exact density of the key, tempered;\nx: where the image lies", fontsize=10)
        axes.plot(*self.place.cpu().tolist(), "x", color="#7fd4ff", ms=9, mew=2)

    def _draw_strips(self, figure: SubFigure, paths: dict[str, Path]) -> None:
        """A row for each chain: the cue or the image, the chain's name, and pictures along it."""
        grid = figure.add_gridspec(2, COLUMNS + 2)
        leads = [("cue", self.cue()), ("image", self.image)]
        for row, ((name, keys), lead) in enumerate(zip(paths.items(), leads, strict=True)):
            draw_image(figure.add_subplot(grid[row, 0]), *lead)
            gap = figure.add_subplot(grid[row, 1])
            gap.axis("off")
            gap.text(0.5, 0.5, name.replace(", ", ",\n"), ha="center", va="center", fontsize=9)
            pictures = self.target.pictures(keys[spread_evenly(len(keys), COLUMNS)])
            for number, picture in enumerate(pictures, 1):
                draw_image(figure.add_subplot(grid[row, number + 1]), str(number), picture)

    # The film

    def film(self, keys: Path, frames: int) -> list[Image.Image]:
        """The chain's place on the map, and its picture, step by step."""
        width = 512
        back = self.mosaic(width)
        marks = spread_evenly(len(keys), min(frames, len(keys)))
        pictures = self.target.pictures(keys[marks])
        spots = ((as_uniform(keys) + 1) / 2 * width).cpu().tolist()
        return [
            self._frame(back, spots[: mark + 1], picture)
            for mark, picture in zip(marks.tolist(), pictures, strict=True)
        ]

    def _frame(self, back: Image.Image, spots: list[list[float]], picture: OneImage) -> Image.Image:
        """The map with the chain up to its last spot; beside it the cue, the picture, the image."""
        margin, line, font = 10, 20, ImageFont.load_default(size=13)
        scale = max(1, 140 // (self.image.shape[-2] + 4))  # three, one above the other, fit
        parts = {
            "cue: its upper half": self.cue(),
            f"read at step {len(spots)}": picture,
            "the image": self.image,
        }
        tiles = {label: tile(one[None], 1, scale) for label, one in parts.items()}
        right = back.width + 2 * margin
        wide = max(one.width for one in tiles.values())
        size = (right + wide + margin, back.height + 2 * margin)
        frame = Image.new("RGB", size, (255, 255, 255))
        draw = ImageDraw.Draw(frame)
        frame.paste(back, (margin, margin))
        trail = [(x + margin, y + margin) for x, y in spots]
        if len(trail) > 1:
            draw.line(trail, fill=DARK_AMBER, width=1)
            draw.line(trail[-10:], fill=AMBER, width=2)
        x, y = trail[-1]
        draw.ellipse((x - 6, y - 6, x + 6, y + 6), outline=AMBER, width=3)
        down = margin
        for label, one in tiles.items():
            draw.text((right, down), label, fill=(40, 40, 40), font=font)
            frame.paste(one, (right, down + line))
            down += one.height + line + margin
        return frame


def spread_evenly(length: int, count: int) -> Tensor:
    """Positions of `count` steps of a chain, from its first to its last."""
    return torch.linspace(0, length - 1, count).round().long()


def draw_path(axes: Axes, keys: Path) -> None:
    """A chain as a line, with the steps whose pictures are shown marked and numbered."""
    spots = as_uniform(keys).cpu().numpy()
    axes.plot(spots[:, 0], spots[:, 1], "-", color="#ffb000", lw=0.8, alpha=0.6)
    at = spots[spread_evenly(len(keys), COLUMNS).numpy()]
    axes.plot(at[:, 0], at[:, 1], "o", color="#ffb000", ms=4)
    for number, (x, y) in enumerate(at, 1):
        aside = (-12 if x > 0.9 else 3, -10 if y < -0.9 else 3)  # within the frame
        axes.annotate(
            str(number),
            (x, y),
            aside,
            textcoords="offset points",
            fontsize=8,
            color="#ffffff",
            fontweight="bold",
        )


def draw_image(axes: Axes, title: str, picture: OneImage) -> None:
    """One picture, grey or in colour."""
    pixels = picture.detach().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
    grey = pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels
    axes.imshow(grey, cmap="gray", vmin=0, vmax=1)
    axes.set_title(title, fontsize=9)
    hide_ticks(axes)


def hide_ticks(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
