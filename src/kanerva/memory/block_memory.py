"""BlockMemory: the memory alone, as a layer for your own network.

    layer = kanerva.BlockMemory(features=256, blocks=64)
    memory = layer.write(features)              # (B, T, 256): one block each, handles 0 to T - 1
    memory = layer.append(memory, more)         # malloc: free cells, the next handles
    found = layer.read(memory, queries)         # (B, Q, 256) -> found.value, .handle, .score
    memory = layer.free(memory, found.handle)   # zeroed exactly; the others are untouched

A block is the features themselves, pasted into a cell of the map (`Memory`). A read projects the
query and every stored block to keys, and averages the blocks by a softmax over the distances
between these keys. Gradients flow to the written features, the queries and every parameter; freed
blocks get none.

Compared with attention over a list: the state has a fixed size, so it batches, compiles and saves
as one tensor; your code decides when to allocate and free, not a sliding window or a decaying gate;
forgetting is exact; and every block has a handle that is never reused. It does not retrieve better
than attention with normalised queries and keys (both are normalised here). Where nothing has to be
freed, such attention is enough.
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
_KEY = 64  # ours: largest size of a key


@dataclass(frozen=True, eq=False)
class Read:
    """The result of a read.

    `value` is the weighted mean of the stored blocks, zeros if there are none. `handle` is that of
    the block with the largest weight, -1 if there is none. `score` has a number for each cell:
    minus a scaled squared distance between the keys of query and block, so near 0 only for what was
    written, and -inf for a free cell. Its softmax over cells gives the weights; `memory.owners`
    maps cells to handles.
    """

    value: Queries
    handle: Int[Tensor, "B Q"]
    score: Float[Tensor, "B Q slots"]


class BlockMemory(nn.Module):
    """A heap with room for `blocks` blocks of features: vectors (D) or maps (C, H, W).

    A vector is stored as a map of one pixel. A block is the features themselves or, if `channels`
    is given, a learned projection to that many channels. The projection and its inverse are
    initialised as an orthogonal matrix and its transpose. Keys are normalised: a read compares
    directions, not lengths. Reads do not depend on the order of cells, so a block takes the first
    free one, and nothing is random except the initial weights.
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
            self.key.weight.copy_(self.query.weight)  # before training, equal features match
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
        """Make a batch of empty memories."""
        like = self.key.weight
        return Memory.empty(self.shape, self.capacity, batch, like.device, like.dtype)

    def write(self, features: Features) -> Memory:
        """Write features into new memories, under handles 0 to T - 1."""
        return self.append(self.empty(len(features)), features)

    def append(self, memory: Memory, features: Features) -> Memory:
        """Add features under the next handles, from `memory.issued` on, the same in every memory of
        the batch. If one of them is full, the error states the capacity."""
        self._check(memory, features)
        return memory.malloc(self._blocks(features), memory.free_cells(features.shape[1]))

    def free(self, memory: Memory, handles: Int[Tensor, "B T"]) -> Memory:
        """Free blocks by handle. -1 is ignored, so that `Read.handle` can be passed as it is."""
        return memory.free(handles)

    # Read

    def read(self, memory: Memory, queries: Queries) -> Read:
        """Read by content: average the stored blocks, weighted by how well they match the query."""
        self._check(memory, queries)
        owners = memory.require_slots()
        held = (owners >= 0)[:, None]  # (B, 1, slots)
        wanted = self._blocks(queries)
        with torch.autocast(owners.device.type, enabled=False):  # distances need full precision
            blocks = memory.grid.read(memory.map, _every_cell(owners))
            query = self.query(_unit(wanted.to(blocks.dtype).flatten(2)))
            key = self.key(_unit(blocks.flatten(2)))
            norms = query.square().sum(-1)[..., None] + key.square().sum(-1)[:, None]
            distance = norms - 2 * (query @ key.mT)  # squared
            score = -distance / (2 * query.shape[-1] ** 0.5)
            lowest = torch.finfo(score.dtype).min  # not -inf: softmax over -inf alone is NaN
            weights = score.masked_fill(~held, lowest).softmax(dim=-1) * held
            mean = (weights @ blocks.flatten(2)).unflatten(-1, self.block)
        score = score.masked_fill(~held, -torch.inf)
        best = owners.gather(1, score.argmax(dim=-1))  # -1 where the memory is empty
        return Read(self._values(mean), best, score)

    def get(self, memory: Memory, handles: Int[Tensor, "B T"]) -> Features:
        """Read by handle: each block by itself, as it was written."""
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
    """Scale to mean square one, so that scores do not depend on the scale of the features."""
    return F.rms_norm(numbers, numbers.shape[-1:], eps=1e-6)


def _rotation(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.orthogonal_(linear.weight)
    return linear
