"""`kpp-empty`: the networks of `kpp`, nothing ever written. The baseline of every memory claim.

    samples = model.generate(None, 64)
    terms = model.elbo(images)                  # a bound on -ln p(x), each image by itself

p(z) is what `kpp` makes of an empty cell, so the two differ in nothing but what is written; but
for outlines, with which `kpp` starts on small 8-bit images: without blocks there are none.
"""

import torch
from torch import Tensor

from kanerva.config import KppEmptyConfig
from kanerva.memory.grid import Grid
from kanerva.models.kpp_networks import KppNetworks
from kanerva.models.latent import MemorylessModel
from kanerva.shapes import Blocks


class KppEmpty(MemorylessModel, KppNetworks):
    """`kpp` without a memory."""

    reconstructed = "reconstructed: q(z|x)"
    config: KppEmptyConfig

    def __init__(self, config: KppEmptyConfig) -> None:
        super().__init__(config)
        grid = Grid(config.memory.capacity, config.memory.size)
        self.block = (config.memory.channels, *grid.block)
        self.add_readout_and_decoder(self.block, outline=False)

    def traces(self, maps: Tensor, keys: Tensor) -> Blocks:  # the map has no channels
        """An empty cell."""
        return torch.zeros(*keys.shape[:2], *self.block, device=keys.device)
