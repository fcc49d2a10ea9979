"""An image's lowest cosines: the few numbers that tell most of a picture.

    numbers = ToCosines(384, image)(images)     # (N, 384), each about `_SPREAD` large
    outline = FromCosines(384, image)(numbers)  # (N, C, H, W): the pictures without fine detail

Cosines along each side (DCT-II), times brightness or one of two colours, taken in the order of how
much they vary in pictures. Of those only this is supposed: power falls with the square of the
frequency, and colours have a tenth of the power of brightness. It is where both layers start, one
the inverse of the other; each may then learn better numbers, slowly, because thousands of pixels
move each of them. All in full precision: bf16 has eight bits, as many as the pixels.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.layers.neighbours import Pixels

Numbers = Float[Tensor, "N K"]
Basis = Float[Tensor, "K CHW"]

_CONTRAST = 0.25  # of pictures: root mean square of pixels on [0, 1] about the middle
_COLOUR = 0.1  # power of a colour, against that of brightness
_SPREAD = 0.4  # root mean square of a number, so that a tanh keeps it
_PACE = 0.01  # of learning, against that of other weights


def cosines(side: int) -> Float[Tensor, "side side"]:
    """The orthonormal cosines along one side, lowest frequency first."""
    numbers = torch.arange(side, dtype=torch.float64)
    waves = torch.cos(math.pi / side * numbers[:, None] * (numbers + 0.5))
    waves[0] /= math.sqrt(2)
    return waves * math.sqrt(2 / side)


def lowest_cosines(count: int, image: tuple[int, int, int]) -> tuple[Basis, Float[Tensor, " K"]]:
    """The `count` that vary most, orthonormal, and by how much each does. A picture has no more of
    them than pixels: the rest are zeros."""
    channels, height, width = image
    colours = torch.eye(channels, dtype=torch.float64)
    if channels == 3:
        colours = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]], dtype=torch.float64)
        colours /= colours.norm(dim=1, keepdim=True)
    down, across = torch.arange(height)[:, None], torch.arange(width)
    power = torch.ones(channels, 1, 1, dtype=torch.float64) / (1 + down**2 + across**2)
    if channels == 3:
        power[1:] *= _COLOUR
    power *= _CONTRAST**2 * power.numel() / power.sum()
    order = power.flatten().argsort(descending=True, stable=True)[:count]
    c, h, w = torch.unravel_index(order, image)
    waves = (colours[c], cosines(height)[h], cosines(width)[w])
    basis, spread = torch.zeros(count, power.numel()), torch.ones(count)
    basis[: len(order)] = torch.einsum("kc,kh,kw->kchw", *waves).flatten(1).float()
    spread[: len(order)] = power.flatten()[order].sqrt().float()
    return basis, spread


class _Linear(nn.Module):
    """A matrix that starts at `start` and moves from there at its own pace."""

    start: Basis

    def __init__(self, start: Basis, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.image = image
        self.register_buffer("start", start, persistent=False)
        self.change = nn.Parameter(torch.zeros_like(start))

    @property
    def matrix(self) -> Basis:
        return self.start + _PACE * self.change


class ToCosines(_Linear):
    """Pixels on [0, 1] to their lowest cosines, all about equally large."""

    def __init__(self, count: int, image: tuple[int, int, int]) -> None:
        basis, spread = lowest_cosines(count, image)
        super().__init__(_SPREAD * basis / spread[:, None], image)

    def forward(self, images: Pixels) -> Numbers:
        with torch.autocast(images.device.type, enabled=False):
            return (images.to(self.start.dtype) - 0.5).flatten(1) @ self.matrix.T


class FromCosines(_Linear):
    """And back: a picture of what they tell."""

    def __init__(self, count: int, image: tuple[int, int, int]) -> None:
        basis, spread = lowest_cosines(count, image)
        super().__init__(basis * spread[:, None] / _SPREAD, image)

    def forward(self, numbers: Numbers) -> Pixels:
        with torch.autocast(numbers.device.type, enabled=False):
            pixels = numbers.to(self.start.dtype) @ self.matrix
            return 0.5 + pixels.unflatten(-1, self.image)
