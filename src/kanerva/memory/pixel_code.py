"""Detail: pixels one after another, each given the gist and the pixels before it.

p(x | block) = prod_i p(x_i | gist, pixels before i near it), in whole numbers (`fixed_point`), so
that it is also a code: a block may store the first pixels of its image, as many as its bits allow,
and every machine reads the same ones back.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from kanerva.config.groups import PixelCodeConfig
from kanerva.encoder import quarter
from kanerva.memory.fixed_point import (
    ONE,
    TOTAL,
    FixedLinear,
    Integers,
    activate,
    clear_of,
    cost_table,
    is_exact,
    round_through,
)
from kanerva.seeding import Noise, as_generator

LEVELS = 16  # logits are rounded to sixteenths
_FARTHEST = 12 * LEVELS  # a logit of 12: one pixel in 160,000
_AT_ONCE = {"cpu": 64, "cuda": 512}  # images whose every pixel is looked at together

Traces = Float[Tensor, "N D"]  # whole numbers
Beside = Float[Tensor, "N maps h w"]  # what else is known of an image, place by place
Binary = Float[Tensor, "N H W"]
Counts = Int[Tensor, "N n"]  # of TOTAL, that a pixel is 1


class PixelCode(nn.Module):
    """Probabilities of binary pixels from a block and the pixels before them."""

    counts: Tensor

    def __init__(
        self, numbers: int, side: tuple[int, int], *, radius: int, width: int, maps: int, depth: int
    ) -> None:
        super().__init__()
        self.height, self.width = side
        assert is_exact(9 * maps) and is_exact(width), "sums might pass 2^24"
        self.coarse = (quarter(side[0]), quarter(side[1]))
        self.radius, self.maps = radius, maps
        places = self.coarse[0] * self.coarse[1]
        self.lift = FixedLinear(numbers, maps * places)
        self.mix = FixedLinear(9 * maps, 2 * maps)
        self.spread = FixedLinear(2 * maps, 16 * maps // 2)
        self.known = FixedLinear(maps // 2, width)
        self.taps = (radius + 1) * (2 * radius + 1) - radius - 1  # of a window, the ones before
        self.seen = FixedLinear(self.taps, width, gain=2.0)
        self.place = nn.Parameter(torch.zeros(width, *side))
        layers = [FixedLinear(width, width) for _ in range(depth)]
        self.layers = nn.ModuleList([*layers, FixedLinear(width, 1, gain=0.1)])
        levels = torch.arange(-_FARTHEST, _FARTHEST + 1, dtype=torch.float64) / LEVELS
        counts = (TOTAL * levels.sigmoid()).round().clamp(1, TOTAL - 1)
        self.register_buffer("counts", counts.float())  # kept with the weights: no libm decides

    @classmethod
    def of(cls, code: PixelCodeConfig, numbers: int, image: tuple[int, int, int]) -> "PixelCode":
        """As its options say, for blocks of so many numbers."""
        sizes = {"radius": code.radius, "width": code.width, "maps": code.maps, "depth": code.depth}
        return cls(numbers, image[1:], **sizes)

    def look(self, pixels: Binary) -> Float[Tensor, "N HW width"]:
        """Sums of what the pixels before it tell each pixel."""
        with clear_of(pixels):
            window = (self.radius + 1, 2 * self.radius + 1)
            seen = F.unfold(self._framed(pixels.float())[:, None], window)[:, : self.taps]
            return self.seen(ONE * seen.mT)

    def levels(
        self, traces: Traces, looked: Float[Tensor, "N HW width"], beside: Beside | None = None
    ) -> Float[Tensor, "N HW"]:
        """Of every pixel, given those before it (`look`), a logit in sixteenths."""
        with clear_of(looked):
            sums = self._prepare(traces.float(), beside) + looked
            return self._finish(sums, self._whole_layers())

    def nats(
        self,
        traces: Traces,
        pixels: Binary,
        beside: Beside | None = None,
        looked: Float[Tensor, "N HW width"] | None = None,
    ) -> Float[Tensor, " N"]:
        """-ln p(x | block) of every image, with gradients. `looked` saves time where several blocks
        are tried for the same images."""
        looked = self.look(pixels) if looked is None else looked
        levels = self.levels(traces, looked, beside)
        with clear_of(pixels):
            each = F.binary_cross_entropy_with_logits(
                levels / LEVELS, pixels.flatten(1), reduction="none"
            )
        return each.sum(dim=1)

    @torch.no_grad()
    def table(self, traces: Traces, pixels: Binary, beside: Beside | None = None) -> Counts:
        """Of every pixel the count, of `TOTAL`, with which it is 1."""
        parts = [traces, pixels] if beside is None else [traces, pixels, beside]
        chunks = zip(*[part.split(_AT_ONCE[traces.device.type]) for part in parts], strict=True)
        levels = [self.levels(blocks, self.look(x), *more) for blocks, x, *more in chunks]
        return torch.cat([self._counts(each) for each in levels])

    @torch.no_grad()
    def follow(
        self,
        traces: Traces,
        choose: Callable[[int, Int[Tensor, " N"]], Tensor | None],
        beside: Beside | None = None,
    ) -> Float[Tensor, "N H W"]:
        """Pixel after pixel in the order of reading: `choose` says what pixel i of each image is,
        given the counts with which it is 1; or None, and that is the end."""
        known = self._prepare(traces, beside)
        framed = self._framed(traces.new_zeros(len(traces), self.height, self.width))
        weight, bias = self.seen.whole()
        weight, radius = (ONE * weight).mT.contiguous(), self.radius
        layers = self._whole_layers()
        for i in range(self.height * self.width):
            row, column = divmod(i, self.width)
            window = framed[:, row : row + radius + 1, column : column + 2 * radius + 1]
            sums = known[:, i] + window.flatten(1)[:, : self.taps] @ weight + bias
            pixel = choose(i, self._counts(self._finish(sums, layers)))
            if pixel is None:
                break
            framed[:, radius + row, radius + column] = pixel.to(framed)
        return framed[:, radius:, radius : radius + self.width]

    def log_probs(
        self, traces: Traces, pixels: Binary, beside: Beside | None = None
    ) -> Float64[Tensor, "N n"]:
        """ln p of every pixel, from the very tables that code it."""
        counts = self.table(traces, pixels, beside)
        share = torch.where(pixels.flatten(1) > 0.5, counts, TOTAL - counts).double() / TOTAL
        return share.log()

    def sample(self, traces: Traces, generator: Noise, beside: Beside | None = None) -> Binary:
        """Images, every pixel in turn."""
        noise = as_generator(generator)

        def draw(_: int, counts: Int[Tensor, " N"]) -> Tensor:
            chance = torch.rand(counts.shape, generator=noise, device=counts.device)
            return chance < counts / TOTAL

        return self.follow(traces, draw, beside)

    def _prepare(self, traces: Traces, beside: Beside | None) -> Float[Tensor, "N HW width"]:
        """Sums of what a block tells each pixel. What is `beside` need not be whole numbers: only
        images that no block holds have it, and those are never coded."""
        x = self.lift(ONE * traces).unflatten(-1, (self.maps, *self.coarse))
        x = activate(x if beside is None else x + 64 * ONE * beside.float())
        x = activate(self.mix(F.unfold(x, 3, padding=1).mT))
        x = activate(self.spread(x)).mT.unflatten(-1, self.coarse)
        x = F.pixel_shuffle(x, 4)[..., : self.height, : self.width]
        place = round_through(64 * ONE * self.place.float(), -(2**20), 2**20)
        return self.known(x.flatten(2).mT) + place.flatten(1).T

    def _whole_layers(self) -> list[tuple[Integers, Integers]]:
        return [layer.whole() for layer in self.layers if isinstance(layer, FixedLinear)]

    def _finish(self, sums: Integers, layers: list[tuple[Integers, Integers]]) -> Integers:
        """From each pixel's sums to its logit in sixteenths."""
        for weight, bias in layers:
            sums = activate(sums) @ weight.T + bias
        return round_through(sums[..., 0] / (64 * ONE / LEVELS), -_FARTHEST, _FARTHEST)

    def _framed(self, pixels: Binary) -> Tensor:
        return F.pad(pixels, (self.radius, self.radius, self.radius, 0))

    def _counts(self, levels: Integers) -> Int[Tensor, "..."]:
        return self.counts.long()[levels.long() + _FARTHEST]

    def cost(self, counts: Int[Tensor, "..."], pixels: Tensor) -> Int[Tensor, "..."]:
        """Of pixels that are 1 with these counts, in 256ths of a bit."""
        return cost_table().to(counts.device)[torch.where(pixels > 0.5, counts, TOTAL - counts)]
