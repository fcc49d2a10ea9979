"""The heart: a latent memory map, how it is written, where keys point, and what a user holds."""

from kanerva.memory.blocks import read_blocks
from kanerva.memory.heap import Memory
from kanerva.memory.keys import KeyNetwork, window
from kanerva.memory.writers import PooledWriter

__all__ = ["KeyNetwork", "Memory", "PooledWriter", "read_blocks", "window"]
