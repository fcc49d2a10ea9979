"""App. A, the worked example: a window of scale 0.5, shifted by 0.3 and 0.5, is read and pasted."""

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from kanerva import data
from kanerva.lab.harness import About, Figures, Finding, Lab, Pixels
from kanerva.lab.paper_figures import WINDOW
from kanerva.memory.blocks import paste_blocks, read_blocks

SCALE, X, Y = WINDOW
SIDE, BLOCK = 64, 32


def region() -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the window in the image's pixels."""
    centre = [(shift + 1) * SIDE / 2 for shift in (X, Y)]
    half = SCALE * SIDE / 2
    return centre[0] - half, centre[1] - half, centre[0] + half, centre[1] + half


def picture_of_letters() -> Pixels:
    """Sixteen characters as one image of 64 by 64, to read from."""
    glyphs = data.load("glyphs", "test").images[::97][:16].float() / 255
    small = F.interpolate(glyphs, size=(SIDE // 4, SIDE // 4), mode="area")
    rows = [torch.cat(list(row), dim=-1) for row in small.unflatten(0, (4, 4))]
    return torch.cat(rows, dim=-2)[None]


def run(lab: Lab) -> Finding:
    image = picture_of_letters()
    window = torch.tensor([SCALE, X, Y]).view(1, 1, 1, 3)
    block = read_blocks(image, window, BLOCK)[0, 0]  # (1, 1, h, w)
    theta = torch.tensor([[[SCALE, 0.0, X], [0.0, SCALE, Y]]])
    grid = F.affine_grid(theta, [1, 1, BLOCK, BLOCK], align_corners=False)
    torchs = F.grid_sample(image, grid, align_corners=False)
    pasted = paste_blocks(block[None, None], window, (SIDE, SIDE))
    left, top, right, bottom = region()
    apart = (pasted - image).abs()[..., int(top) + 1 : SIDE, int(left) + 1 : int(right) - 1]
    figures = {
        "window": {"scale": SCALE, "x": X, "y": Y},
        "region_pixels": [left, top, right, bottom],
        "against_grid_sample": float((block - torchs).abs().max()),
        "pasted_back": float(apart.mean()),
    }
    return Finding(figures, table(figures), draw(image, block, pasted))


def draw(image: Tensor, block: Tensor, pasted: Tensor) -> Figure:
    """Draw the image, the window cut out of it, and the window pasted back."""
    left, top, right, bottom = region()
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    titles = ("the image, and the window inlaid", "cut out: 32x32", "pasted back with the inverse")
    parts = zip(figure.subplots(1, 3), titles, (image, block, pasted), strict=True)
    for axes, title, pixels in parts:
        axes.imshow(pixels.reshape(pixels.shape[-2:]).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=10)
        if pixels is not block:
            corner, look = (left - 0.5, top - 0.5), {"color": "#e07b00", "lw": 2}
            axes.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, **look))
    return figure


def table(figures: Figures) -> list[str]:
    left, top, right, bottom = figures["region_pixels"]
    return [
        f"scale {SCALE}, shift {X}, {Y} on a {SIDE}x{SIDE} image: columns {left:.1f} to "
        f"{right:.1f}, rows {top:.1f} to {bottom:.1f}",
        f"our read against affine_grid and grid_sample, largest difference: "
        f"{figures['against_grid_sample']:.1e}",
        f"pasted back, mean difference inside the window: {figures['pasted_back']:.3f}",
    ]


def verdict(figures: Figures) -> str:
    """Whether our read equals the spatial transformer."""
    same = figures["against_grid_sample"] < 1e-5
    return "The window is the lower right quarter, a little to the left. " + (
        "The read is the spatial transformer." if same else "NOT the spatial transformer."
    )


ABOUT = About(
    paper="App. A",
    shows="the worked example: a window inlaid and extracted",
    claim=f"A key of scale {SCALE} and shift ({X}, {Y}) selects one region of an image, by a "
    "differentiable bilinear read.",
    quick="a second",
    full="a second",
    presets=("glyphs",),
)
