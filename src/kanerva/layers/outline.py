"""An image's outline: a few local averages that hold most of the picture.

    numbers = ToCosines(384, image)(images)     # (N, 384), each about `_SPREAD` large
    outline = FromCosines(384, image)(numbers)  # (N, C, H, W): the pictures without fine detail

An outline holds the means of small boxes of pixels. Two thirds of the numbers are for brightness;
two colour axes, in larger boxes, get a sixth each. With 384 numbers for a 32x32 colour image the
boxes are 2x2 and 4x4. Boxes are disjoint, so the mean of a box and its other pixels determine a
pixel. The lowest cosines of the whole image would be closer to the picture, but would say less
about a single pixel.

What is stored are the cosines (DCT-II along each side) of these means, lowest frequency first. Each
is divided by its standard deviation over images, so that rounding costs as little as possible.

Both layers are initialised this way, as each other's inverse. Each can then learn better numbers,
at a lower rate, because thousands of pixels contribute to each gradient. Nothing here runs in bf16:
it has eight bits of precision, no more than the pixels.
"""

import math
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.layers.pixel_context import Pixels

Numbers = Float[Tensor, "N K"]
Basis = Float[Tensor, "K CHW"]
Each = Float[Tensor, " K"]

_COLOURS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))  # brightness, two colour axes
_SPREAD = 0.4  # root mean square of a number: small enough for a tanh not to saturate
_LEAST = 1 / 255  # smallest standard deviation assumed of a number: one grey level
_PACE = 0.01  # learning rate relative to that of other weights


def cosines(side: int) -> Float[Tensor, "side side"]:
    """The orthonormal cosines along one side, lowest frequency first."""
    numbers = torch.arange(side, dtype=torch.float64)
    waves = torch.cos(math.pi / side * numbers[:, None] * (numbers + 0.5))
    waves[0] /= math.sqrt(2)
    return waves * math.sqrt(2 / side)


def shares(count: int, image: tuple[int, int, int]) -> list[int]:
    """How many of `count` numbers go to brightness and to each colour; at most one per pixel."""
    channels, height, width = image
    if channels != 3:
        return [min(ceil(count / channels), height * width)] * channels
    brightness = min(ceil(count * 2 / 3), height * width)
    first = min(ceil((count - brightness) / 2), height * width)
    return [brightness, first, min(count - brightness - first, height * width)]


def box(count: int, height: int, width: int) -> tuple[int, int]:
    """The largest box (1x1, 2x1, 2x2, 4x2, ...) with at least `count` of them in a picture."""
    down = across = 1
    while True:
        wide = down > across
        taller, wider = (down, 2 * across) if wide else (2 * down, across)
        if taller > height or wider > width or ceil(height / taller) * ceil(width / wider) < count:
            return down, across
        down, across = taller, wider


def means(side: int, length: int) -> Float[Tensor, "boxes side"]:
    """Orthonormal rows that average boxes of `length` along a side; the last may be shorter."""
    places = torch.arange(side)
    rows = (places // length == torch.arange(ceil(side / length))[:, None]).double()
    return rows / rows.norm(dim=1, keepdim=True)


def lowest_cosines(count: int, image: tuple[int, int, int]) -> Basis:
    """The `count` orthonormal directions of an outline, lowest frequency first within each colour.

    There are at most as many as pixels; further rows are zeros.
    """
    channels, height, width = image
    colours = torch.eye(channels, dtype=torch.float64)
    if channels == 3:
        colours = torch.tensor(_COLOURS, dtype=torch.float64)
        colours /= colours.norm(dim=1, keepdim=True)
    rows = []
    for colour, some in zip(colours, shares(count, image), strict=True):
        if some:
            down, across = box(some, height, width)
            tall, wide = means(height, down), means(width, across)
            frequency = torch.arange(len(tall))[:, None] ** 2 + torch.arange(len(wide)) ** 2
            order = frequency.flatten().argsort(stable=True)[:some]
            i, j = torch.unravel_index(order, (len(tall), len(wide)))
            waves = ((cosines(len(tall)) @ tall)[i], (cosines(len(wide)) @ wide)[j])
            rows.append(torch.einsum("c,kh,kw->kchw", colour, *waves).flatten(1))
    basis, found = torch.zeros(count, channels * height * width), torch.cat(rows)[:count].float()
    basis[: len(found)] = found
    return basis


class _Outline(nn.Module):
    """Learned directions, initialised at the cosines of boxes, with the data's mean (`middle`) and
    standard deviation (`spread`) along each."""

    start: Basis
    middle: Each
    spread: Each

    def __init__(self, count: int, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.image = image
        self.register_buffer("start", lowest_cosines(count, image), persistent=False)
        self.change = nn.Parameter(torch.zeros(count, math.prod(image)))
        self.register_buffer("middle", torch.zeros(count))
        self.register_buffer("spread", torch.ones(count))

    @property
    def matrix(self) -> Basis:
        return self.start + _PACE * self.change

    @torch.no_grad()
    def fit_to_data(self, images: Pixels) -> None:
        """Set the mean and standard deviation along each direction from these images."""
        along = (images.to(self.start.dtype) - 0.5).flatten(1) @ self.start.T
        self.middle.copy_(along.mean(dim=0))
        self.spread.copy_(along.std(dim=0).clamp(min=_LEAST))


class ToCosines(_Outline):
    """Pixels on [0, 1] to the numbers of their outline, all of similar size."""

    def forward(self, images: Pixels) -> Numbers:
        with torch.autocast(images.device.type, enabled=False):
            along = (images.to(self.start.dtype) - 0.5).flatten(1) @ self.matrix.T
            return _SPREAD * (along - self.middle) / self.spread


class FromCosines(_Outline):
    """The inverse: the numbers of an outline to a picture."""

    def forward(self, numbers: Numbers) -> Pixels:
        with torch.autocast(numbers.device.type, enabled=False):
            along = self.middle + numbers.to(self.start.dtype) / _SPREAD * self.spread
            return 0.5 + (along @ self.matrix).unflatten(-1, self.image)
