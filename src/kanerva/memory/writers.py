"""f_mem: from what an encoder sees to what is written (§3.3, App. E)."""

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

    256 maps at 4x4, halved per layer while the side doubles, up to the memory's size. App. E calls
    the stack "deep linear" while §3.3 says it transforms "non-linearly"; we follow the appendix.
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


_NARROW = 32  # ours: maps that a block is made from


class BlockWriter(nn.Module):
    """A sample's feature maps to its own block, on [-1, 1]: what `kpp` pastes into a cell.

    Nothing of the rest of the episode enters, so M is a sum over samples: malloc adds one term,
    free takes it away. With an outline a block starts as that of its image: of itself a
    network finds worse numbers, or drives the tanh to its ends and tells one bit a number.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        features: int,
        side: tuple[int, int],
        outline: tuple[int, int, int] | None = None,
    ) -> None:
        """`outline`: the shape of the images, where blocks start as outlines of them."""
        super().__init__()
        self.shape = shape
        self.narrow = nn.Conv2d(features, _NARROW, 1)
        self.mix = nn.Linear(_NARROW * side[0] * side[1], prod(shape))
        self.outline = None
        if outline is not None:
            self.outline, self.mix = ToCosines(prod(shape), outline), zeroed(self.mix)

    def forward(self, maps: FeatureMaps, images: Episode | None = None) -> Blocks:
        """`images` themselves are for an outline."""
        numbers = self.mix(self.narrow(maps.flatten(0, 1)).flatten(1))
        if self.outline is not None:
            assert images is not None
            numbers = self.outline(images.flatten(0, 1)) + numbers
        return numbers.tanh().unflatten(-1, self.shape).unflatten(0, maps.shape[:2])


_HIDDEN = 256  # ours: units that a gist is made from


class GistWriter(nn.Module):
    """A sample's feature maps to whole numbers, in groups, and flags that say which are held.

    `rate` from -1 to 1 stands for a price from low to high: the dearer a number, the smaller.
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
        """Before they are rounded: within [-7, 7], and with a slope to the very ends, where a
        number that ran out of them would be lost."""
        mixed = self.mix(self.narrow(maps.flatten(0, 1)).flatten(1))
        hidden = F.silu(mixed + self.rate(rate.flatten()[:, None]))
        numbers = self.last(hidden).unflatten(0, maps.shape[:2]).float()
        numbers = numbers * (self.gain * rate[..., None]).exp()
        return LARGEST * numbers.tanh()

    def blocks(self, gists: Float[Tensor, "B T numbers"], kept: Real[Tensor, "B T"]) -> Blocks:
        """Numbers of the groups that are held, zeros for the rest, then a flag for each group. An
        empty cell, all zeros, holds none."""
        flags = torch.arange(self.groups, device=gists.device) < kept[..., None]
        each = gists.shape[-1] // self.groups
        gists = gists * flags.repeat_interleave(each, dim=-1)
        return torch.cat([gists, flags], dim=-1).unflatten(-1, self.shape)
