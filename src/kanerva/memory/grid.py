"""Cells: a grid over the memory. Cells have equal prior mass, and no two share a pixel.

2 Phi(y) - 1 maps a key from N(0, 1) to a uniform one on [-1, 1], so cells of equal size there are
equally likely. Reads and writes of cells copy whole pixels: no interpolation, no rounding.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.config import rows_and_columns
from kanerva.errors import UserError
from kanerva.seeding import Noise, uniform
from kanerva.shapes import Blocks, Cells, MemoryMap


class Grid:
    """`capacity` cells, numbered row by row, over a memory with side `size`, or with `size` =
    (height, width)."""

    def __init__(self, capacity: int, size: int | tuple[int, int]) -> None:
        self.rows, self.columns = rows_and_columns(capacity)
        self.height, self.width = (size, size) if isinstance(size, int) else size
        if self.rows > self.height or self.columns > self.width:
            raise UserError(
                f"memory.capacity={capacity} is a grid of {self.rows} x {self.columns} cells, too "
                f"fine for a memory of side {size}"
            )
        self.capacity = capacity
        self.block = (self.height // self.rows, self.width // self.columns)  # h, w of one cell

    def centres(self, device: torch.device | str = "cpu") -> Float[Tensor, "cells 2"]:
        """The centre (x, y) of every cell, on [-1, 1]."""
        x = (2 * torch.arange(self.columns, device=device) + 1) / self.columns - 1
        y = (2 * torch.arange(self.rows, device=device) + 1) / self.rows - 1
        down, across = torch.meshgrid(y, x, indexing="ij")
        return torch.stack([across, down], dim=-1).flatten(0, 1)

    def cell_of(self, points: Float[Tensor, "*n 2"]) -> Int[Tensor, "*n"]:
        """The cell that contains a point (x, y) on [-1, 1]."""
        x, y = ((points + 1) / 2).unbind(-1)
        column = (x * self.columns).long().clamp(0, self.columns - 1)
        row = (y * self.rows).long().clamp(0, self.rows - 1)
        return row * self.columns + column

    def pixels(self, device: torch.device | str = "cpu") -> Int[Tensor, "cells hw"]:
        """Each cell's pixels, as positions in the flattened map. If the side is no multiple of the
        number of cells, each cell gets the first `block` pixels that begin inside it: equally many
        for all, and none shared."""
        rows, columns = (
            torch.arange(self.rows, device=device),
            torch.arange(self.columns, device=device),
        )
        top = (rows * self.height + self.rows - 1) // self.rows  # rounded up
        left = (columns * self.width + self.columns - 1) // self.columns
        down = top[:, None] + torch.arange(self.block[0], device=device)  # (rows, h)
        across = left[:, None] + torch.arange(self.block[1], device=device)  # (columns, w)
        places = down[:, None, :, None] * self.width + across[None, :, None, :]
        return places.flatten(2).flatten(0, 1)

    def read(self, memory: MemoryMap, cells: Cells) -> Blocks:
        """Read some cells of each episode's memory."""
        places = self.pixels(memory.device)[cells].flatten(1)  # (B, T h w)
        flat = memory.flatten(2)
        found = flat.gather(2, places[:, None].expand(-1, flat.shape[1], -1))
        return found.unflatten(2, (cells.shape[1], *self.block)).transpose(1, 2)

    def paste(self, blocks: Blocks, cells: Cells) -> MemoryMap:
        """Make a memory with each block in its cell and zeros elsewhere. Cells must be distinct."""
        places = self.pixels(blocks.device)[cells].flatten(1)
        values = blocks.transpose(1, 2).flatten(2)  # (B, Cm, T h w)
        empty = values.new_zeros(*values.shape[:2], self.height * self.width)
        filled = empty.scatter(2, places[:, None].expand_as(values), values)
        return filled.unflatten(2, (self.height, self.width))


def deal(
    batch: int,
    length: int,
    grid: Grid,
    generator: Noise = None,
    device: torch.device | str = "cpu",
) -> Cells:
    """Give each sample of an episode its own random cell."""
    return uniform((batch, grid.capacity), generator, device).argsort(dim=1)[:, :length]


def check_owners(owners: Int[Tensor, "*B cells"], issued: int) -> None:
    """Refuse handles that are in two cells of one memory, or that were never issued."""
    rows = owners.reshape(-1, owners.shape[-1]).sort(dim=-1).values
    if bool(((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)).any()):
        raise UserError("a handle lies in two cells")
    if not -1 <= int(owners.min()) <= int(owners.max()) < max(issued, 1):
        raise UserError("a handle was never issued")


def lies_in_cells(
    map: Float[Tensor, "B Cm Hm Wm"], owners: Int[Tensor, "B cells"], tensors: dict[str, Tensor]
) -> bool:
    """Whether the slots in a file of kanerva 0.1, whose blocks could overlap, are exactly cells."""
    grid = Grid(owners.shape[-1], (map.shape[-2], map.shape[-1]))
    off = (tensors["points"] - grid.centres()).abs().amax(dim=-1).reshape(owners.shape)
    fits = "blocks" not in tensors or tuple(tensors["blocks"].shape[-2:]) == grid.block
    pixels = map.flatten(2)[:, :, grid.pixels()]  # (B, Cm, cells, hw)
    blank = bool((pixels.movedim(2, 1)[owners < 0] == 0).all())  # no block overlaps a free cell
    return fits and blank and bool((off[owners >= 0] < 1e-4).all())
