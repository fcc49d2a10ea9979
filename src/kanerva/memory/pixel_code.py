"""Detail: pixels one after another, each given the gist and the pixels before it.

p(x | block) = prod_i p(x_i | gist, pixels before i near it), in whole numbers (`fixed_point`), so
that it is also a code: a block may store the first pixels of its image, as many as its bits allow,
and every machine reads the same ones back.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from kanerva.encoder import quarter
from kanerva.memory.fixed_point import ONE, FixedLinear, Integers, activate, clear_of, round_through
from kanerva.memory.gist import TOTAL

_LEVELS = 16  # logits are rounded to sixteenths
_FARTHEST = 12 * _LEVELS  # a logit of 12: one pixel in 160,000
_AT_ONCE = 64  # images whose every pixel is looked at together
BIT = 256  # what costs are counted in: a bit is 256 of them

Traces = Float[Tensor, "N D"]  # whole numbers
Binary = Float[Tensor, "N H W"]
Counts = Int[Tensor, "N n"]  # of TOTAL, that a pixel is 1


class PixelCode(nn.Module):
    """Probabilities of binary pixels from a block and the pixels before them."""

    counts: Tensor
    costs: Tensor

    def __init__(
        self, numbers: int, side: tuple[int, int], *, reach: int, width: int, maps: int, depth: int
    ) -> None:
        super().__init__()
        self.height, self.width = side
        self.coarse = (quarter(side[0]), quarter(side[1]))
        self.reach, self.maps = reach, maps
        places = self.coarse[0] * self.coarse[1]
        self.lift = FixedLinear(numbers, maps * places)
        self.mix = FixedLinear(9 * maps, 2 * maps)
        self.spread = FixedLinear(2 * maps, 16 * maps // 2)
        self.known = FixedLinear(maps // 2, width)
        self.taps = (reach + 1) * (2 * reach + 1) - reach - 1  # of a window, the ones before
        self.seen = FixedLinear(self.taps, width, gain=2.0)
        self.place = nn.Parameter(torch.zeros(width, *side))
        self.hidden = nn.ModuleList([FixedLinear(width, width) for _ in range(depth)])
        self.last = FixedLinear(width, 1, gain=0.1)
        levels = torch.arange(-_FARTHEST, _FARTHEST + 1, dtype=torch.float64) / _LEVELS
        counts = (TOTAL * levels.sigmoid()).round().clamp(1, TOTAL - 1)
        self.register_buffer("counts", counts.float())  # kept with the weights: no libm decides
        share = torch.arange(1, TOTAL, dtype=torch.float64) / TOTAL
        costs = (-BIT * share.log2()).round()
        self.register_buffer("costs", torch.cat([costs[:1], costs]).float(), persistent=False)

    # From a block to what every pixel knows of it

    def prepare(self, traces: Traces) -> Integers:
        """Sums of what a block tells each pixel, (N, width, H, W)."""
        x = activate(self.lift(ONE * traces)).unflatten(-1, (self.maps, *self.coarse))
        x = activate(_around(self.mix, x))
        x = activate(self.spread(x.movedim(1, -1))).movedim(-1, 1)
        x = F.pixel_shuffle(x, 4)[..., : self.height, : self.width]
        place = round_through(64 * ONE * self.place.float(), -(2**20), 2**20)
        return self.known(x.movedim(1, -1)).movedim(-1, 1) + place.to(x.dtype)

    # From what it knows and sees to its probability

    def logits(self, traces: Traces, pixels: Binary) -> Float[Tensor, "N H W"]:
        """Of every pixel given those before it, all at once, for training."""
        with clear_of(pixels):
            seen = self._see(pixels.float())
            sums = self.prepare(traces.float()).flatten(2).mT + seen
            return (self._levels(sums) / _LEVELS).unflatten(1, pixels.shape[1:])

    def _levels(self, sums: Integers) -> Integers:
        """Of each pixel's sums, a logit in sixteenths."""
        x = activate(sums)
        for layer in self.hidden:
            x = activate(layer(x))
        output = self.last(x)[..., 0]
        return round_through(output / (64 * ONE / _LEVELS), -_FARTHEST, _FARTHEST)

    def _framed(self, pixels: Binary) -> Tensor:
        return F.pad(pixels, (self.reach, self.reach, self.reach, 0))

    # In whole numbers

    @torch.no_grad()
    def table(self, traces: Traces, pixels: Binary) -> Counts:
        """Of every pixel the count, of `TOTAL`, with which it is 1."""
        pairs = zip(traces.split(_AT_ONCE), pixels.split(_AT_ONCE), strict=True)
        return torch.cat([self._table(*pair) for pair in pairs])

    def _table(self, traces: Traces, pixels: Binary) -> Counts:
        seen = self._see(pixels.double())
        return self._counts(self._levels(self.prepare(traces.double()).flatten(2).mT + seen))

    def _see(self, pixels: Binary) -> Float[Tensor, "N HW width"]:
        """Sums of what each pixel sees of those before it."""
        framed = self._framed(pixels)[:, None]
        windows = F.unfold(framed, (self.reach + 1, 2 * self.reach + 1))[:, : self.taps]
        return self.seen(ONE * windows.mT)

    @torch.no_grad()
    def follow(
        self, traces: Traces, choose: Callable[[int, Int[Tensor, " N"]], Tensor | None]
    ) -> Float[Tensor, "N H W"]:
        """Pixel after pixel in the order of reading: `choose` says what pixel i of each image is,
        given the counts with which it is 1; or None, and that is the end."""
        sums = self.prepare(traces.double()).flatten(2)
        framed = self._framed(traces.new_zeros(len(traces), self.height, self.width).double())
        weight, bias = self.seen.whole(torch.float64)
        weight = (ONE * weight).mT.contiguous()
        reach = self.reach
        for i in range(self.height * self.width):
            row, column = divmod(i, self.width)
            window = framed[:, row : row + reach + 1, column : column + 2 * reach + 1]
            seen = window.flatten(1)[:, : self.taps] @ weight + bias
            levels = self._levels(sums[:, :, i] + seen)
            pixel = choose(i, self._counts(levels))
            if pixel is None:
                break
            framed[:, reach + row, reach + column] = pixel.to(framed)
        return framed[:, reach:, reach : reach + self.width].to(traces.dtype)

    def _counts(self, levels: Integers) -> Int[Tensor, "..."]:
        return self.counts.long()[levels.long() + _FARTHEST]

    def cost(self, counts: Int[Tensor, "..."], pixels: Tensor) -> Int[Tensor, "..."]:
        """Of pixels that are 1 with these counts, in 256ths of a bit."""
        return self.costs.long()[torch.where(pixels > 0.5, counts, TOTAL - counts)]


def _around(layer: FixedLinear, x: Integers) -> Integers:
    """A 3x3 convolution. In float64 by products of matrices: a library may choose an algorithm for
    convolutions that divides, and whole numbers would be lost."""
    weight, bias = layer.whole(x.dtype)
    if x.dtype != torch.float64:
        kernel = weight.unflatten(-1, (x.shape[1], 3, 3))
        return F.conv2d(x, kernel, bias, padding=1)
    patches = F.unfold(x, 3, padding=1).mT @ weight.T + bias
    return patches.mT.unflatten(-1, x.shape[-2:])
