"""The heart: a latent memory map, how it is written, where keys point, and what a user holds."""

from kanerva.memory.blocks import paste_blocks, read_blocks
from kanerva.memory.grid import Grid
from kanerva.memory.heap import Memory, Slots
from kanerva.memory.keys import KeyNetwork, window
from kanerva.memory.placement import Placer
from kanerva.memory.writers import BlockAllocator, PooledWriter

__all__ = [
    "BlockAllocator",
    "Grid",
    "KeyNetwork",
    "Memory",
    "Placer",
    "PooledWriter",
    "Slots",
    "paste_blocks",
    "read_blocks",
    "window",
]
