"""`kpp-empty`: the networks of `kpp` without a memory. The baseline of every claim about memory.

    samples = model.generate(None, 64)
    terms = model.elbo(images)                  # a bound on -ln p(x), image by image

p(z) is the p(z | M, y) of `kpp` at a free cell, so the two models differ only in what is written.
There is one exception: on small 8-bit images `kpp` initialises blocks as outlines, and without
blocks there are none.
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
        """A free cell for each key."""
        return torch.zeros(*keys.shape[:2], *self.block, device=keys.device)
