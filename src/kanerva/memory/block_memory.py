"""BlockMemory: the memory alone, as a layer of a network of yours.

    layer = kanerva.BlockMemory(features=256, blocks=64)
    memory = layer.write(features)              # (B, T, 256): a block each, handles 0 to T - 1
    memory = layer.append(memory, more)         # malloc: free cells, the next handles
    found = layer.read(memory, queries)         # (B, Q, 256) -> found.value, .handle, .score
    memory = layer.free(memory, found.handle)   # gone, bit for bit; all others untouched

A block is the features themselves, pasted into a cell of the map (`Memory`); a read compares a
projection of the query with one of every block held and mixes the blocks by how well they fit.
Gradients reach what was written, the queries and every parameter; freed blocks get none.

What this adds to attention over a list: the state has one size from the first step to the last,
so it batches, compiles and saves as one tensor; malloc and free are calls of yours, not a window
that slides or a gate that fades; forgetting is exact; and every block has an address, a handle
that is never given out twice. It does not find better than attention whose queries and keys are
normalised, as they are here; where every item may stay, that is enough.
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from kanerva.config import rows_and_columns
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.shapes import Blocks, Cells

Features = Float[Tensor, "B T *features"]  # vectors (D) or maps (C, H, W)
Queries = Float[Tensor, "B Q *features"]
_KEY = 64  # ours: numbers of a block's key


@dataclass(frozen=True, eq=False)
class Read:
    """What queries found.

    `value` is the mix of the blocks held, zeros where nothing is. `handle` names the block that
    fits best, -1 where nothing is held. `score` tells how well each cell's block fits: minus a
    squared distance between keys, so near 0 only for what was written; -inf where a cell is free.
    Softmax over cells makes it the weights of the mix; `memory.owners` says whose cells they are.
    """

    value: Queries
    handle: Int[Tensor, "B Q"]
    score: Float[Tensor, "B Q slots"]


class BlockMemory(nn.Module):
    """A heap of `blocks` blocks for features: vectors of so many numbers, or maps (C, H, W).

    A vector is a map of one pixel. Its block is the features themselves, or a learned projection
    to another number of `channels`, which starts as a rotation and its inverse. Keys tell
    directions apart, not lengths. The order of cells changes no read, so blocks take the first that
    are free: nothing here is random but the initial weights.
    """

    def __init__(
        self, features: int | tuple[int, int, int], blocks: int, *, channels: int | None = None
    ) -> None:
        super().__init__()
        self.features = (features,) if isinstance(features, int) else tuple(features)
        depth, *side = self.features if len(self.features) == 3 else (*self.features, 1, 1)
        if len(side) != 2 or min(*self.features, blocks, 1 if channels is None else channels) < 1:
            raise UserError(
                f"features are a number or (channels, height, width), blocks and channels at least "
                f"1; got features={features}, blocks={blocks}, channels={channels}"
            )
        height, width = side
        rows, columns = rows_and_columns(blocks)
        self.capacity, self.block = blocks, (channels or depth, height, width)
        self.shape = (channels or depth, rows * height, columns * width)

        numbers = prod(self.block)
        self.query = _rotation(numbers, min(numbers, _KEY))
        self.key = _rotation(numbers, min(numbers, _KEY))
        self.narrow, self.widen = nn.Identity(), nn.Identity()
        with torch.no_grad():
            self.key.weight.copy_(self.query.weight)  # like finds like before training
            if channels is not None:
                self.narrow, self.widen = _rotation(depth, channels), _rotation(channels, depth)
                self.widen.weight.copy_(self.narrow.weight.T)

    def extra_repr(self) -> str:
        return f"features={self.features}, capacity={self.capacity}, block={self.block}"

    def forward(self, features: Features, queries: Queries) -> Read:
        """Write, then read."""
        return self.read(self.write(features), queries)

    # malloc and free

    def empty(self, batch: int) -> Memory:
        """Memories that hold nothing."""
        like = self.key.weight
        return Memory.empty(self.shape, self.capacity, batch, like.device, like.dtype)

    def write(self, features: Features) -> Memory:
        """New memories that hold these, handles 0 to T - 1."""
        return self.append(self.empty(len(features)), features)

    def append(self, memory: Memory, features: Features) -> Memory:
        """Some more: handles `memory.issued` and on, the same in every memory of the batch. An
        error that gives the capacity where one of them is full."""
        self._check(memory, features)
        return memory.malloc(self._blocks(features), memory.free_cells(features.shape[1]))

    def free(self, memory: Memory, handles: Int[Tensor, "B T"]) -> Memory:
        """The memories without these; -1 names none, so that what a read found may be given."""
        return memory.free(handles)

    # Read

    def read(self, memory: Memory, queries: Queries) -> Read:
        """By content: what is held, each block as much as it fits the query."""
        self._check(memory, queries)
        owners = memory.require_slots()
        held = (owners >= 0)[:, None]  # (B, 1, slots)
        asked = self._blocks(queries)
        with torch.autocast(owners.device.type, enabled=False):  # distances need their digits
            blocks = memory.grid.read(memory.map, _every_cell(owners))
            query = self.query(_unit(asked.to(blocks.dtype).flatten(2)))
            key = self.key(_unit(blocks.flatten(2)))
            overlap = query @ key.mT
            apart = query.square().sum(-1)[..., None] + key.square().sum(-1)[:, None] - 2 * overlap
            score = -apart / (2 * query.shape[-1] ** 0.5)
            fit = score.masked_fill(~held, torch.finfo(score.dtype).min).softmax(dim=-1) * held
            mix = (fit @ blocks.flatten(2)).unflatten(-1, self.block)
        score = score.masked_fill(~held, -torch.inf)
        best = owners.gather(1, score.argmax(dim=-1))  # -1 where nothing is held
        return Read(self._values(mix), best, score)

    def get(self, memory: Memory, handles: Int[Tensor, "B T"]) -> Features:
        """By address: what lies under these handles, alone and as it was written."""
        return self._values(memory.grid.read(memory.map, memory.slots_of(handles)))

    # Features and blocks

    def _blocks(self, features: Features) -> Blocks:
        maps = features[..., None, None] if len(self.features) == 1 else features
        return self.narrow(maps.movedim(-3, -1)).movedim(-1, -3)

    def _values(self, blocks: Blocks) -> Features:
        maps = self.widen(blocks.movedim(-3, -1)).movedim(-1, -3)
        return maps.flatten(2) if len(self.features) == 1 else maps

    def _check(self, memory: Memory, features: Features) -> None:
        if features.ndim < 2 or tuple(features.shape[2:]) != self.features:
            raise UserError(
                f"this memory takes (batch, number, {', '.join(map(str, self.features))}), "
                f"got {tuple(features.shape)}"
            )
        expected = (len(features), *self.shape)
        if tuple(memory.map.shape) != expected or memory.capacity != self.capacity:
            raise UserError(
                f"a batch of {len(features)} needs a memory of {expected} for {self.capacity} "
                f"blocks, got {tuple(memory.map.shape)} for {memory.capacity}"
            )


def _every_cell(owners: Int[Tensor, "B slots"]) -> Cells:
    return torch.arange(owners.shape[1], device=owners.device).expand_as(owners)


def _unit(numbers: Float[Tensor, "*n numbers"]) -> Float[Tensor, "*n numbers"]:
    """Of mean square one, so that scores do not depend on the scale a network's features have."""
    return F.rms_norm(numbers, numbers.shape[-1:], eps=1e-6)


def _rotation(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.orthogonal_(linear.weight)
    return linear
