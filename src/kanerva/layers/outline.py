"""An image's outline: the few numbers that tell most of a picture, each pixel's near where it is.

    numbers = ToCosines(384, image)(images)     # (N, 384), each about `_SPREAD` large
    outline = FromCosines(384, image)(numbers)  # (N, C, H, W): the pictures without fine detail

An outline holds the means of small boxes of pixels: of brightness two thirds of the numbers, of two
colours, in larger boxes, a sixth each; 384 for 32x32 colour pixels are 2x2 and 4x4 boxes. Boxes are
disjoint, so a pixel that sees the others of its box can tell what it is itself: the lowest cosines
of all pixels lie nearer to the picture, and tell a single pixel less. What is kept are cosines
along each side (DCT-II) of these means, the lowest first, because they can be measured in units of
how much they vary from picture to picture, and rounding then costs each as little as it may.

It is where both layers start, one the inverse of the other; each may then learn better numbers,
slowly, because thousands of pixels move each of them. None of it in bf16, which has eight bits, as
many as the pixels.
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

_COLOURS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))  # brightness and two more
_SPREAD = 0.4  # root mean square of a number, so that a tanh keeps it
_LEAST = 1 / 255  # by which a number is taken to vary: a level
_PACE = 0.01  # of learning, against that of other weights


def cosines(side: int) -> Float[Tensor, "side side"]:
    """The orthonormal cosines along one side, lowest frequency first."""
    numbers = torch.arange(side, dtype=torch.float64)
    waves = torch.cos(math.pi / side * numbers[:, None] * (numbers + 0.5))
    waves[0] /= math.sqrt(2)
    return waves * math.sqrt(2 / side)


def shares(count: int, image: tuple[int, int, int]) -> list[int]:
    """How many of `count` numbers tell of brightness, and of each colour; no more than pixels."""
    channels, height, width = image
    if channels != 3:
        return [min(ceil(count / channels), height * width)] * channels
    brightness = min(ceil(count * 2 / 3), height * width)
    first = min(ceil((count - brightness) / 2), height * width)
    return [brightness, first, min(count - brightness - first, height * width)]


def box(count: int, height: int, width: int) -> tuple[int, int]:
    """The largest box, of 1x1, 2x1, 2x2, 4x2, ..., of which a picture has at least `count`."""
    down = across = 1
    while True:
        wide = down > across
        taller, wider = (down, 2 * across) if wide else (2 * down, across)
        if taller > height or wider > width or ceil(height / taller) * ceil(width / wider) < count:
            return down, across
        down, across = taller, wider


def means(side: int, length: int) -> Float[Tensor, "boxes side"]:
    """Of boxes of that length along a side, the last perhaps shorter: orthonormal rows."""
    places = torch.arange(side)
    rows = (places // length == torch.arange(ceil(side / length))[:, None]).double()
    return rows / rows.norm(dim=1, keepdim=True)


def lowest_cosines(count: int, image: tuple[int, int, int]) -> Basis:
    """An outline's `count` directions, orthonormal, the lowest of each colour first. A picture has
    no more of them than pixels: the rest are zeros."""
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
    """Directions that start at the cosines of boxes and move from there at their own pace, and what
    is usual along each: its middle, and its spread about that."""

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
        """Take what is usual from these images."""
        along = (images.to(self.start.dtype) - 0.5).flatten(1) @ self.start.T
        self.middle.copy_(along.mean(dim=0))
        self.spread.copy_(along.std(dim=0).clamp(min=_LEAST))


class ToCosines(_Outline):
    """Pixels on [0, 1] to their outline's numbers, all about equally large."""

    def forward(self, images: Pixels) -> Numbers:
        with torch.autocast(images.device.type, enabled=False):
            along = (images.to(self.start.dtype) - 0.5).flatten(1) @ self.matrix.T
            return _SPREAD * (along - self.middle) / self.spread


class FromCosines(_Outline):
    """And back: a picture of what they tell."""

    def forward(self, numbers: Numbers) -> Pixels:
        with torch.autocast(numbers.device.type, enabled=False):
            along = self.middle + numbers.to(self.start.dtype) / _SPREAD * self.spread
            return 0.5 + (along @ self.matrix).unflatten(-1, self.image)
