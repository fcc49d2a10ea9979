"""Where a sample's block is placed, and the key posterior that reads it.

Each sample gets a random cell of its own. A key reads the whole cell that contains it, so it only
has to name its cell: ln(capacity) nats. Blocks are placed in cells, never at the key sample that a
read uses: M would then reveal the key at no cost. Places are (x, y) on [-1, 1]; keys are the same
points under the prior N(0, 1).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kanerva.distributions import ConfinedNormal, as_uniform
from kanerva.errors import UserError
from kanerva.memory.grid import Grid, deal
from kanerva.seeding import Noise, as_generator
from kanerva.shapes import Blocks, Cells, MemoryMap, Points

Held = Bool[Tensor, "B slots"]  # whether a cell holds a block


class Placement:
    """A grid of cells, to which samples are assigned at random."""

    def __init__(self, capacity: int, size: int) -> None:
        self.grid = Grid(capacity, size)

    def place(self, batch: int, length: int, noise: Noise, device: torch.device) -> Cells:
        """Assign every sample of whole episodes to a different cell."""
        self.require_room(length)
        return deal(batch, length, self.grid, noise, device)

    def find_free(self, held: Held, length: int, noise: Noise) -> Cells:
        """Find a free cell for each sample; several samples may get the same one."""
        shape = (len(held), length, self.grid.capacity)
        random = torch.rand(shape, generator=as_generator(noise), device=held.device)
        return random.masked_fill(held[:, None], torch.inf).argmin(dim=2)

    def require_room(self, length: int) -> None:
        """Refuse more than `capacity` blocks."""
        if length > self.grid.capacity:
            raise UserError(
                f"the memory is full: its capacity is {self.grid.capacity} blocks, and it would "
                f"have to hold {length}: kanerva.load(NAME, capacity={length}) has room, and its "
                "append accepts this memory"
            )

    def posterior(
        self, cells: Cells, written: Bool[Tensor, "B T"], free: Float[Tensor, " B"]
    ) -> ConfinedNormal:
        """q(y|.) of samples in `cells`. `written`: whether each is in M; `free`: how many cells of
        each memory are free.

        The key of a written sample may be anywhere in its cell. A sample that is not written reads
        a free cell. All `free` cells read as the same zeros, so its key only has to name one of
        them; if none is free, q has no mass and its KL is infinite.
        """
        centres = self.grid.centres(cells.device)[cells]
        one = torch.ones_like(centres[..., :1])
        half = torch.cat([one / self.grid.columns, one / self.grid.rows], dim=-1)
        count = torch.where(written, 1.0, free[:, None])
        return ConfinedNormal(centres, half, count / self.grid.capacity)

    def read(self, memory: MemoryMap, keys: Points) -> Blocks:
        """Read the whole cell that contains each key (Eq. 5)."""
        return self.grid.read(memory, self.grid.cell_of(as_uniform(keys)))
