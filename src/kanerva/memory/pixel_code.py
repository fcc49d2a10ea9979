"""An autoregressive code of binary pixels, each given the gist and its causal neighbours.

p(x | block) = prod_i p(x_i | gist, pixels before i within a radius), in integer arithmetic
(`fixed_point`), so that it can be used as a code: a block stores the first pixels of its image, as
many as its bits allow, and every machine decodes the same ones.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from kanerva.config.groups import PixelCodeConfig
from kanerva.encoder import quarter
from kanerva.layers.in_parts import sum_in_parts
from kanerva.layers.kernels.fixed_layers import fixed_layers, supported
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
_FARTHEST = 12 * LEVELS  # the largest logit, 12: a probability of 1 in 160,000
# images per batch; few on a CPU, where a large tensor is returned to the system when it is freed,
# and the pages of the next one are faulted in and zeroed again
_AT_ONCE = {"cpu": 8, "cuda": 512}
_TRAINED_AT_ONCE = 32  # on a CPU; fewer take less memory, and a little longer
_EVERY = slice(None)  # all rows of an image

Traces = Float[Tensor, "N D"]  # integers, as floats: a flattened block, with its flags
Beside = Float[Tensor, "N maps h w"]  # a prediction of an image that is not stored (`kin`)
Binary = Float[Tensor, "N H W"]
Counts = Int[Tensor, "N n"]  # TOTAL * p(pixel = 1)
Rows = Int[Tensor, " R"]


class PixelCode(nn.Module):
    """Predicts binary pixels from a block and from the pixels before each."""

    counts: Tensor

    def __init__(
        self, numbers: int, side: tuple[int, int], *, radius: int, width: int, maps: int, depth: int
    ) -> None:
        super().__init__()
        self.height, self.width = side
        assert is_exact(9 * maps) and is_exact(width), "sums might exceed 2^24"
        self.coarse = (quarter(side[0]), quarter(side[1]))
        self.radius, self.maps = radius, maps
        places = self.coarse[0] * self.coarse[1]
        self.lift = FixedLinear(numbers, maps * places)
        self.mix = FixedLinear(9 * maps, 2 * maps)
        self.spread = FixedLinear(2 * maps, 16 * maps // 2)
        # Zero at first: what an untrained block predicts is noise, and a network that learns to
        # suppress it seldom learns to use it again.
        self.known = FixedLinear(maps // 2, width, gain=0.0)
        self.taps = (radius + 1) * (2 * radius + 1) - radius - 1  # causal pixels of a window
        self.seen = FixedLinear(self.taps, width, gain=2.0)
        self.place = nn.Parameter(torch.zeros(width, *side))
        layers = [FixedLinear(width, width) for _ in range(depth)]
        self.layers = nn.ModuleList([*layers, FixedLinear(width, 1, gain=0.1)])
        levels = torch.arange(-_FARTHEST, _FARTHEST + 1, dtype=torch.float64) / LEVELS
        counts = (TOTAL * levels.sigmoid()).round().clamp(1, TOTAL - 1)
        self.register_buffer("counts", counts.float())  # saved: exp differs among machines

    @classmethod
    def of(cls, code: PixelCodeConfig, numbers: int, image: tuple[int, int, int]) -> "PixelCode":
        """Build one from its options, for blocks of `numbers` numbers."""
        sizes = {"radius": code.radius, "width": code.width, "maps": code.maps, "depth": code.depth}
        return cls(numbers, image[1:], **sizes)

    def look(self, pixels: Binary, rows: slice = _EVERY) -> Float[Tensor, "N n width"]:
        """For each pixel of these rows, the sums in the first layer over its causal neighbours."""
        with clear_of(pixels):
            window = (self.radius + 1, 2 * self.radius + 1)
            padded = self._padded(ONE * pixels.float())[:, None, rows.start or 0 :]
            before = F.unfold(padded, window, stride=(rows.step or 1, 1))
            return self.seen(before[:, : self.taps].mT)

    def levels(
        self,
        traces: Traces,
        looked: Float[Tensor, "N n width"],
        beside: Beside | None = None,
        rows: slice = _EVERY,
    ) -> Float[Tensor, "N n"]:
        """The logit of every pixel of these rows, in sixteenths. `looked`: what `look` returns."""
        # A GPU trains in mixed precision with fused kernels. Codes are made without them.
        mixed = torch.is_grad_enabled() and torch.is_autocast_enabled(looked.device.type)
        with clear_of(looked):
            known = self._known(traces.float(), beside, rows)
            places, layers = self._places(rows), self._whole_layers()
            fused = mixed and torch.compiler.is_compiling() and supported(looked, len(layers) - 1)
            if not fused:
                return self._finish(known + places + looked, layers)
            *inner, (last, last_bias) = layers
            weights, biases = (torch.stack(part) for part in zip(*inner, strict=True))
            sums = fixed_layers(known, looked, places, weights, biases, last[0])
            return self._round(sums + last_bias)

    def levels_at(
        self, traces: Traces, looked: Float[Tensor, "R width"], image: Rows, pixel: Rows
    ) -> Float[Tensor, " R"]:
        """The same of some pixels: `pixel` of `image`, in pairs. `looked` has one row for each."""
        with clear_of(looked):
            known = self.known(self._spread(traces.float(), None)[image, pixel])
            return self._finish(known + self._places()[pixel] + looked, self._whole_layers())

    def nats(
        self,
        traces: Traces,
        pixels: Binary,
        beside: Beside | None = None,
        rows: slice = _EVERY,
    ) -> Float[Tensor, " N"]:
        """-ln p(x | block) of these rows of every image, with gradients."""
        levels = self.levels(traces, self.look(pixels, rows), beside, rows)
        return nats_of(levels, pixels[:, rows].flatten(1)).sum(dim=1)

    def mean_nats(
        self,
        traces: Float[Tensor, "B T D"],
        pixels: Float[Tensor, "B T H W"],
        beside: Float[Tensor, "B T maps h w"] | None = None,
    ) -> Float[Tensor, ""]:
        """An estimate of the mean of `nats`, for training: twice the cost of the even rows of every
        second image, and of the odd rows of the others. This takes half the time, and an image has
        hundreds of pixels to learn from. On a CPU, a few images go forward and back at a time."""
        inputs = [traces, pixels] if beside is None else [traces, pixels, beside]
        trained = [p for p in self.parameters() if p.requires_grad]
        at_once = traces.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled()
        total = torch.zeros((), device=traces.device)
        for first, part in enumerate(zip(*map(_halves, inputs), strict=True)):
            nats = partial(self.nats, rows=slice(first, None, 2))
            if not len(part[0]):  # of a single image there is no other half
                continue
            if at_once:
                total = total + nats(*part).sum()
            else:
                total = total + sum_in_parts(nats, part, trained, _TRAINED_AT_ONCE)
        return 2 * total / pixels.shape[:2].numel()

    @torch.no_grad()
    def table(self, traces: Traces, pixels: Binary, beside: Beside | None = None) -> Counts:
        """The probability that each pixel is 1, as a count of `TOTAL`."""
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
        """Go through the pixels in raster order: `choose(i, counts)` returns pixel i of each image,
        given the counts of p(pixel = 1); or None, to stop. Used to decode and to sample."""
        with clear_of(traces):
            return self._follow(traces, choose, beside)

    def _follow(
        self,
        traces: Traces,
        choose: Callable[[int, Int[Tensor, " N"]], Tensor | None],
        beside: Beside | None,
    ) -> Float[Tensor, "N H W"]:
        from_block = self._known(traces, beside) + self._places()
        padded = self._padded(traces.new_zeros(len(traces), self.height, self.width))
        weight, bias = self.seen.whole()
        weight, radius = (ONE * weight).mT.contiguous(), self.radius
        layers = self._whole_layers()
        for i in range(self.height * self.width):
            row, column = divmod(i, self.width)
            window = padded[:, row : row + radius + 1, column : column + 2 * radius + 1]
            sums = from_block[:, i] + window.flatten(1)[:, : self.taps] @ weight + bias
            pixel = choose(i, self._counts(self._finish(sums, layers)))
            if pixel is None:
                break
            padded[:, radius + row, radius + column] = pixel.to(padded)
        return padded[:, radius:, radius : radius + self.width]

    def log_probs(
        self, traces: Traces, pixels: Binary, beside: Beside | None = None
    ) -> Float64[Tensor, "N n"]:
        """ln p of every pixel, from the same tables that code it."""
        counts = self.table(traces, pixels, beside)
        share = torch.where(pixels.flatten(1) > 0.5, counts, TOTAL - counts).double() / TOTAL
        return share.log()

    def sample(self, traces: Traces, generator: Noise, beside: Beside | None = None) -> Binary:
        """Sample images, pixel by pixel."""
        noise = as_generator(generator)

        def draw(_: int, counts: Int[Tensor, " N"]) -> Tensor:
            random = torch.rand(counts.shape, generator=noise, device=counts.device)
            return random < counts / TOTAL

        return self.follow(traces, draw, beside)

    def _known(
        self, traces: Traces, beside: Beside | None, rows: slice = _EVERY
    ) -> Float[Tensor, "N n width"]:
        """For each pixel, the sums in the first layer over what the block predicts there."""
        return self.known(self._spread(traces, beside, rows))

    def _spread(
        self, traces: Traces, beside: Beside | None, rows: slice = _EVERY
    ) -> Float[Tensor, "N n _"]:
        """For each pixel of these rows, what the block predicts there. `beside` need not be
        integers: only images that are not stored have it, and those are never coded."""
        x = self.lift(ONE * traces).unflatten(-1, (self.maps, *self.coarse))
        x = activate(x if beside is None else x + 64 * ONE * beside.float())
        x = activate(self.mix(around(x).mT))
        x = activate(self.spread(x)).mT.unflatten(-1, self.coarse)
        x = F.pixel_shuffle(x, 4)[..., : self.height, : self.width]
        return x[..., rows, :].flatten(2).mT

    def _places(self, rows: slice = _EVERY) -> Float[Tensor, "n width"]:
        """For each pixel, what the first layer adds whatever the image."""
        places = round_through(64 * ONE * self.place.float(), -(2**20), 2**20)
        return places[:, rows].flatten(1).T

    def _whole_layers(self) -> list[tuple[Integers, Integers]]:
        return [layer.whole() for layer in self.layers if isinstance(layer, FixedLinear)]

    def _finish(self, sums: Integers, layers: list[tuple[Integers, Integers]]) -> Integers:
        """The remaining layers: from each pixel's sums to its logit in sixteenths."""
        for weight, bias in layers:
            sums = F.linear(activate(sums), weight, bias)
        return self._round(sums[..., 0])

    def _round(self, sums: Integers) -> Integers:
        """From the sums of the last layer to logits in sixteenths."""
        return round_through(sums / (64 * ONE / LEVELS), -_FARTHEST, _FARTHEST)

    def _padded(self, pixels: Binary) -> Tensor:
        """Pixels with zeros above and to both sides, so that every window is complete."""
        return F.pad(pixels, (self.radius, self.radius, self.radius, 0))

    def _counts(self, levels: Integers) -> Int[Tensor, "..."]:
        return self.counts.long()[levels.long() + _FARTHEST]

    def cost(self, counts: Int[Tensor, "..."], pixels: Tensor) -> Int[Tensor, "..."]:
        """The cost of pixels whose p(1) is given as counts, in 256ths of a bit."""
        return cost_table().to(counts.device)[torch.where(pixels > 0.5, counts, TOTAL - counts)]


def _halves(x: Float[Tensor, "B T ..."]) -> tuple[Tensor, Tensor]:
    """Every second image, alternating along and across episodes, and the others. So a half does not
    tell an image's place in its episode, and processes that share a batch make the same halves."""
    parts = [x[i::2, j::2].flatten(0, 1) for i, j in ((0, 0), (1, 1), (0, 1), (1, 0))]
    return torch.cat(parts[:2]), torch.cat(parts[2:])


def nats_of(levels: Float[Tensor, "..."], pixels: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """-ln p of pixels, given their logits in sixteenths."""
    with clear_of(levels):
        return F.binary_cross_entropy_with_logits(levels / LEVELS, pixels, reduction="none")


def around(x: Float[Tensor, "N maps h w"]) -> Float[Tensor, "N _ hw"]:
    """The 3x3 neighbourhood of every position: `F.unfold(x, 3, padding=1)` from slices, whose
    gradient is a few sums. That of `unfold` scatters, one number at a time."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    shifted = [padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return torch.stack(shifted, dim=2).flatten(3).flatten(1, 2)
