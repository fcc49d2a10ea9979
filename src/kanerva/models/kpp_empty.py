"""`kpp-empty`: the networks of `kpp`, nothing ever written. The baseline of every memory claim.

    samples = model.generate(None, 64)
    terms = model.elbo(images)                  # a bound on -ln p(x), each image by itself

p(z) is what `kpp` makes of an empty cell, so the two differ in nothing but what is written; but
for outlines, with which `kpp` starts on small 8-bit images: without blocks there are none.
"""

import torch
from torch import Tensor

from kanerva.config import KppEmptyConfig
from kanerva.distributions import DiagonalNormal, no_keys
from kanerva.memory.grid import Grid
from kanerva.models.kpp_networks import KppNetworks
from kanerva.seeding import Noise
from kanerva.shapes import Blocks, Episode, FeatureMaps, MemoryMap


class KppEmpty(KppNetworks):
    """`kpp` without a memory."""

    remembers = recalls = has_keys = False
    reconstructed = "reconstructed: q(z|x)"
    config: KppEmptyConfig

    def __init__(self, config: KppEmptyConfig) -> None:
        super().__init__(config)
        grid = Grid(config.memory.capacity, config.memory.size)
        self.block = (config.memory.channels, *grid.block)
        self.add_readout_and_decoder(self.block, outline=False)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (0,)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (0, 0, 0)

    def write_maps(
        self,
        episode: Episode,
        features: FeatureMaps,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> MemoryMap:
        """Nothing."""
        return features.new_zeros(len(features), *self.memory_shape(0))

    def key_posterior(self, features: FeatureMaps, maps: MemoryMap) -> DiagonalNormal:
        return no_keys(features)

    def traces(self, maps: Tensor, keys: Tensor) -> Blocks:  # the map has no channels
        """An empty cell."""
        return torch.zeros(*keys.shape[:2], *self.block, device=keys.device)
