"""f_mem: from an encoder's output to what is written (§3.3, App. E)."""

from math import ceil, prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Real
from torch import Tensor, nn

from kanerva.config import PaperMemoryConfig
from kanerva.layers.outline import ToCosines
from kanerva.layers.residual import zeroed
from kanerva.memory.gist import LARGEST
from kanerva.shapes import Blocks, Embedding, Episode, FeatureMaps, MemoryMap

_SMALLEST = 4  # ours: side of the writer's first feature maps


class PooledWriter(nn.Module):
    """M = f_mem(mean_t E): pool the episode, then a deep linear conv-transpose stack.

    It starts with 256 maps of 4x4. Each layer halves their number and doubles their side, up to the
    memory's size. App. E calls the stack "deep linear", §3.3 says that it transforms
    "non-linearly"; we follow the appendix.
    """

    def __init__(self, config: PaperMemoryConfig, embedding: int) -> None:
        super().__init__()
        self.size = config.size
        doublings = 0
        while _SMALLEST * 2**doublings < config.size:
            doublings += 1
        self.start = ceil(config.size / 2**doublings)
        self.project = nn.Linear(embedding, config.base * self.start**2)
        maps, layers = config.base, []
        for layer in range(doublings):
            outputs = config.channels if layer == doublings - 1 else max(maps // 2, 1)
            layers.append(nn.ConvTranspose2d(maps, outputs, 4, stride=2, padding=1))
            maps = outputs
        if doublings == 0:
            layers.append(nn.Conv2d(maps, config.channels, 3, padding=1))
        self.stack = nn.Sequential(*layers)

    def forward(self, embedding: Embedding) -> MemoryMap:
        maps = self.project(embedding.mean(dim=1)).unflatten(-1, (-1, self.start, self.start))
        return self.stack(maps)[..., : self.size, : self.size]


_NARROW = 32  # ours: channels of the maps that a block is computed from


class BlockWriter(nn.Module):
    """From a sample's feature maps to its own block, on [-1, 1], which `kpp` pastes into a cell.

    A block does not depend on the rest of the episode, so M is a sum over samples: malloc adds one
    term, free removes it. With an outline, blocks are initialised as the outline of their image:
    from a random start a network finds worse numbers, or saturates the tanh, so that a number
    carries only one bit.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        features: int,
        side: tuple[int, int],
        outline: tuple[int, int, int] | None = None,
    ) -> None:
        """`outline`: the shape of the images, if blocks are initialised as outlines of them."""
        super().__init__()
        self.shape = shape
        self.narrow = nn.Conv2d(features, _NARROW, 1)
        self.mix = nn.Linear(_NARROW * side[0] * side[1], prod(shape))
        self.outline = None
        if outline is not None:
            self.outline, self.mix = ToCosines(prod(shape), outline), zeroed(self.mix)

    def forward(self, maps: FeatureMaps, images: Episode | None = None) -> Blocks:
        """Make blocks. `images` are needed for outlines only."""
        numbers = self.mix(self.narrow(maps.flatten(0, 1)).flatten(1))
        if self.outline is not None:
            assert images is not None
            numbers = self.outline(images.flatten(0, 1)) + numbers
        return numbers.tanh().unflatten(-1, self.shape).unflatten(0, maps.shape[:2])


_HIDDEN = 256  # ours: hidden units of the gist network


class GistWriter(nn.Module):
    """From a sample's feature maps to a gist: numbers, in groups, and one flag for each group.

    `rate`, from -1 to 1, stands for the weight of a gist's cost in the loss, from low to high. A
    higher weight makes smaller numbers.
    """

    def __init__(
        self, shape: tuple[int, int, int], features: int, side: tuple[int, int], groups: int
    ) -> None:
        super().__init__()
        self.shape, self.size, self.groups, self.outline = shape, prod(shape), groups, None
        self.narrow = nn.Conv2d(features, _NARROW, 1)
        self.mix = nn.Linear(_NARROW * side[0] * side[1], _HIDDEN)
        self.rate = nn.Linear(1, _HIDDEN)
        self.gain = nn.Parameter(torch.full((self.size - groups,), -0.5))
        self.last = nn.Linear(_HIDDEN, self.size - groups)

    def numbers(
        self, maps: FeatureMaps, rate: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T numbers"]:
        """The numbers before rounding, within [-7, 7]. By tanh instead of a clamp, because a
        clamped number would get no gradient."""
        mixed = self.mix(self.narrow(maps.flatten(0, 1)).flatten(1))
        hidden = F.silu(mixed + self.rate(rate.flatten()[:, None]))
        numbers = self.last(hidden).unflatten(0, maps.shape[:2]).float()
        numbers = numbers * (self.gain * rate[..., None]).exp()
        return LARGEST * numbers.tanh()

    def blocks(self, gists: Float[Tensor, "B T numbers"], kept: Real[Tensor, "B T"]) -> Blocks:
        """Make blocks: the numbers of the first `kept` groups, zeros for the others, then a flag
        for each group. A free cell is all zeros, so its flags say that it has no group."""
        flags = torch.arange(self.groups, device=gists.device) < kept[..., None]
        each = gists.shape[-1] // self.groups
        gists = gists * flags.repeat_interleave(each, dim=-1)
        return torch.cat([gists, flags], dim=-1).unflatten(-1, self.shape)
