"""Memory: the object that `write` returns, with its heap: malloc, free, slots and files.

memory = model.write(images)                # malloc for each image
memory = model.append(memory, more)         # malloc for more; stored blocks do not move
memory = memory.free(memory.handles[3])     # its cell becomes zeros, and free for others

A slot is a cell of the memory's grid. Files are plain data, never a pickle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from kanerva.errors import UserError
from kanerva.files import FLOATS, require_tensor
from kanerva.inputs import as_count, as_device, as_handles, as_path
from kanerva.memory.codec import BlockCodec
from kanerva.memory.container import Container, read_container
from kanerva.memory.detail import ALL, Detail, symbol_digest
from kanerva.memory.float_file import SavedMemory
from kanerva.memory.grid import Grid
from kanerva.memory.map_picture import map_picture
from kanerva.memory.quantise import quantise
from kanerva.plain_files import reason, write_whole
from kanerva.shapes import Blocks, Cells


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of one episode (Cm, Hm, Wm), or of a batch of episodes (B, Cm, Hm, Wm).

    `map` is all that reading uses. `owners` has the handle in each cell, -1 if the cell is free. It
    is None if the model writes an episode as a whole: then no image has a block of its own, and
    none can be freed. `issued` counts the handles issued so far: none is reused.
    """

    map: Float[Tensor, "*B Cm Hm Wm"]
    owners: Int[Tensor, "*B slots"] | None = None
    issued: int = 0
    detail: Detail | None = None  # if blocks are bits
    codec: BlockCodec | None = None
    writer: str | None = None  # fingerprint of the model that wrote it: no other can read it
    kept: dict[str, Any] = field(default_factory=dict, repr=False)  # caches of what was decoded

    def __post_init__(self) -> None:
        if self.map.ndim not in (3, 4):
            shape = tuple(self.map.shape)
            raise UserError(f"a memory map is (Cm, Hm, Wm) or (B, Cm, Hm, Wm), got {shape}")

    # Batches

    @property
    def is_batch(self) -> bool:
        """Whether this is a batch of memories, one for each episode."""
        return self.map.ndim == 4

    @property
    def floats(self) -> int:
        """Numbers in one episode's memory. No bound charges for them, so reports state how many."""
        return self.map[0].numel() if self.is_batch else self.map.numel()

    def __getitem__(self, episode: int) -> "Memory":
        """One episode's memory out of a batch."""
        if not self.is_batch:
            raise UserError("this memory holds one episode; there is nothing to index")
        return self._apply(lambda tensor: tensor[episode])

    @classmethod
    def stack(cls, memories: "list[Memory]") -> "Memory":
        """Stack memories of one episode each into a batch."""
        maps = torch.stack([memory.map for memory in memories])
        writer, *others = {memory.writer for memory in memories if memory.writer} or {None}
        if others:
            raise UserError("these memories were written by different models")
        owners = [memory.owners for memory in memories if memory.owners is not None]
        if len(owners) < len(memories):
            return cls(maps, writer=writer)
        details = [memory.detail for memory in memories if memory.detail is not None]
        if 0 < len(details) < len(memories):
            raise UserError("some of these memories have coded pixels, and others do not")
        detail = Detail.join(details, torch.stack) if details else None
        issued = max(memory.issued for memory in memories)
        return cls(maps, torch.stack(owners), issued, detail, memories[0].codec, writer)

    def as_batch(self) -> "Memory":
        """This memory as a batch, of one if it is not one already."""
        return self if self.is_batch else self._apply(lambda tensor: tensor[None])

    def to(self, device: str | torch.device) -> "Memory":
        """Move every tensor to a device."""
        target = as_device(device)
        return self._apply(lambda tensor: tensor.to(target))

    def _apply(self, function: Callable[[Tensor], Tensor]) -> "Memory":
        owners = None if self.owners is None else function(self.owners)
        detail = None if self.detail is None else self.detail.apply(function)
        return replace(self, map=function(self.map), owners=owners, detail=detail)

    # Slots

    def require_slots(self) -> Int[Tensor, "*B slots"]:
        """`owners`, with an error if the memory was written as a whole."""
        if self.owners is None:
            raise UserError("this memory was written as a whole: it has no blocks to tell apart")
        return self.owners

    def _require_one(self) -> Int[Tensor, " slots"]:
        if self.is_batch:
            raise UserError("this is a batch of memories: take one, memory[i], first")
        return self.require_slots()

    @property
    def grid(self) -> Grid:
        """The cells that blocks lie in."""
        return Grid(self.capacity, (self.map.shape[-2], self.map.shape[-1]))

    @property
    def capacity(self) -> int:
        """The number of blocks that the memory has room for."""
        return self.require_slots().shape[-1]

    @property
    def handles(self) -> list[int]:
        """Handles of the stored blocks, in order of writing."""
        owners = self._require_one()
        return sorted(owners[owners >= 0].tolist())

    @property
    def cells(self) -> Int[Tensor, "*B held"]:
        """The cell of each stored block, in order of handle. All memories of a batch must hold
        equally many blocks."""
        owners = self.require_slots()
        count = (owners >= 0).sum(dim=-1)
        if bool((count != count.max()).any()):
            raise UserError("the memories of this batch hold different numbers of blocks")
        order = owners.masked_fill(owners < 0, self.issued).argsort(dim=-1)
        return order[..., : int(count.max())]

    @property
    def places(self) -> Float[Tensor, "*B held 2"]:
        """The position (x, y) of each stored block, on [-1, 1], in order of handle."""
        return self.grid.centres(self.map.device)[self.cells]

    def __len__(self) -> int:
        return int((self._require_one() >= 0).sum())

    def __contains__(self, handle: object) -> bool:
        return handle in self.handles

    def __bool__(self) -> bool:
        return True  # also when empty: `__len__` would make it False

    def slot_of(self, handle: int) -> int:
        """The cell of a handle's block."""
        self._require_one()
        return int(self.slots_of(handle)[0, 0])

    def slots_of(self, handles: object, number: int | None = None) -> Cells:
        """The cells of handles, with `number` handles for each memory of a batch."""
        named, batch = as_handles(handles).to(self.map.device), self.as_batch()
        count = len(batch.map)
        shape = (count, named.numel() // count if number is None else number)
        if named.numel() != shape[0] * shape[1]:
            raise UserError(f"expected handles {shape}, one for each image; got {named.tolist()}")
        named, (owners, cells) = named.view(shape).contiguous(), batch.require_slots().sort(dim=1)
        at = torch.searchsorted(owners, named).clamp(max=owners.shape[1] - 1)
        missing = (owners.gather(1, at) != named) | (named < 0)
        if bool(missing.any()):
            raise UserError(_not_held(int(named[missing][0])))
        return cells.gather(1, at)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.map.shape))
        if self.owners is None:
            return f"Memory({shape})"
        held = "" if self.is_batch else f", {len(self)} of {self.capacity} blocks held"
        if self.detail is not None and not self.is_batch:
            held += f", {self.bits.sum():.0f} bits"
        return f"Memory({shape}{held})"

    # malloc and free

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int],
        capacity: int,
        batch: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> "Memory":
        """Make a batch of empty memories."""
        owners = torch.full((batch, capacity), -1, dtype=torch.long, device=device)
        return cls(torch.zeros(batch, *shape, device=device, dtype=dtype), owners)

    def malloc(self, blocks: Blocks, cells: Cells, detail: Detail | None = None) -> "Memory":
        """Put blocks into free cells of each memory of a batch. They get the next handles, in
        order. Gradients flow to the blocks."""
        count, length = cells.shape
        new = self.issued + torch.arange(length, device=cells.device).expand(count, -1)
        owners = self.require_slots().scatter(1, cells, new)
        if detail is not None and self.detail is not None:
            detail = self.detail.put(cells, detail)
        map = self.map + self.grid.paste(blocks, cells)
        return replace(self, map=map, owners=owners, issued=self.issued + length, detail=detail)

    def free_cells(self, count: int) -> Cells:
        """The first `count` free cells of each memory of a batch."""
        held = self.require_slots() >= 0
        if bool((held.sum(dim=1) + count > self.capacity).any()):
            raise UserError(
                f"the memory is full: its capacity is {self.capacity} blocks, "
                f"{int(held.sum(dim=1).max())} are held, and {count} more do not fit"
            )
        return held.int().argsort(dim=1, stable=True)[:, :count]

    def free(self, *handles: int | Sequence | Int[Tensor, "*B T"]) -> "Memory":
        """Free blocks; the handles of the others do not change. For a batch, a tensor or a list of
        lists has the handles of each memory. There -1 is ignored, so that the handles which
        `BlockMemory.read` found can be passed as they are."""
        if self.is_batch and len(handles) == 1:
            return self._clear(self._named(as_handles(handles[0]).to(self.map.device)))
        self._require_one()
        named = [h for one in handles for h in as_handles(one).flatten().tolist()]
        if len(set(named)) != len(named):
            raise UserError(f"a handle is named twice: {named}")
        if not named:
            return self
        return self._clear(self._cells_of(named))

    def _named(self, handles: Int[Tensor, "..."]) -> Bool[Tensor, "B slots"]:
        """A mask of the cells that handles name; a handle may be named twice."""
        if handles.ndim != 2 or len(handles) != len(self.map):
            raise UserError(
                f"a batch of {len(self.map)} memories takes handles ({len(self.map)}, number), got "
                f"{tuple(handles.shape)}; or take one, memory[i]"
            )
        matches = self.require_slots()[:, None] == handles[..., None]  # (B, T, slots)
        missing = (handles != -1) & ~(matches.any(dim=-1) & (handles >= 0))
        if bool(missing.any()):
            raise UserError(_not_held(int(handles[missing][0])))
        return (matches & (handles >= 0)[..., None]).any(dim=1)

    def _cells_of(self, handles: list[int]) -> Bool[Tensor, " slots"]:
        """A mask of the cells that the handles of one memory name."""
        named = torch.zeros_like(self._require_one(), dtype=torch.bool)
        return named.index_fill(0, self.slots_of(handles)[0], True)

    def _clear(self, freed: Bool[Tensor, "*B slots"]) -> "Memory":
        """Zero some cells and mark them as free."""
        pixels = torch.zeros(
            (*freed.shape[:-1], self.grid.height * self.grid.width),
            dtype=torch.bool,
            device=freed.device,
        )
        pixels[..., self.grid.pixels(freed.device)] = freed[..., None]
        pixels = pixels.unflatten(-1, self.map.shape[-2:]).unsqueeze(-3)
        owners = self.require_slots().masked_fill(freed, -1)
        detail = self.detail
        if detail is not None:
            detail = detail.apply(
                lambda x: x.masked_fill(freed.view(*freed.shape, *[1] * (x.ndim - freed.ndim)), 0)
            )
        return replace(self, map=self.map.masked_fill(pixels, 0), owners=owners, detail=detail)

    def quantise(self, dtype: str) -> "Memory":
        """This memory as `load` would return it after `save(dtype=...)`."""
        self._check_dtype(dtype)
        return replace(self, map=quantise(self.map, dtype))

    # Bits

    @property
    def bits(self) -> Float[Tensor, " held"]:
        """Bits of each stored block, in order of handle: its cost in a file."""
        cells = self.cells
        if self.detail is not None:
            return self.detail.bits.gather(-1, cells)
        numbers = self.map.shape[-3] * self.grid.block[0] * self.grid.block[1]
        return torch.full(cells.shape, 32.0 * numbers, dtype=torch.float64)

    def shrink(self, bits: int, *handles: int | Sequence | Int[Tensor, " n"]) -> "Memory":
        """Forget by degrees: shrink all blocks, or those of some handles, to at most `bits` bits,
        plus what the last pixel (or group of the gist) costs. Pixels are dropped first, from the
        last, then the gist. What is not dropped does not change."""
        owners = self._require_one()
        if self.detail is None:
            raise UserError("blocks of this memory are floats: there is nothing to drop by degrees")
        caps = torch.full_like(owners, min(as_count("bits", bits, 0), ALL))
        if handles:
            named = [h for one in handles for h in as_handles(one).flatten().tolist()]
            caps = caps.masked_fill(~self._cells_of(named), ALL)
        detail, grid = self.detail.within(caps), self.grid
        every = torch.arange(self.capacity, device=owners.device)[None]
        blocks = detail.cut(grid.read(self.map[None], every))
        return replace(self, map=grid.paste(blocks, every)[0], detail=detail)

    # Files

    def save(self, path: str | Path, dtype: str = "float32") -> None:
        """Write one file, atomically. `dtype`, for blocks of floats: float32, bfloat16, int8 or
        int4."""
        self._check_dtype(dtype)
        require_tensor({"map": self.map}, "map", f"cannot write {path}", FLOATS)
        if self.detail is not None:
            return write_whole(as_path(path), self.as_container().pack())
        SavedMemory(self.map, self.owners, self.issued, self.writer).write(as_path(path), dtype)

    def _check_dtype(self, dtype: str) -> None:
        if self.detail is not None and dtype != "float32":
            raise UserError(f"this memory holds bits, which cannot be rounded to {dtype}")

    def as_container(self) -> Container:
        """The contents of the file of a memory of bits."""
        self._require_one()
        assert self.detail is not None and self.codec is not None
        self.codec.require_unchanged()
        gists, detail = self._in_order()
        return Container(
            fingerprint=self.codec.fingerprint,
            cells=self.capacity,
            issued=self.issued,
            handles=self.handles,
            stream=self.codec.encode(gists, detail),
            symbols=symbol_digest(gists, detail),
        )

    def _in_order(self) -> tuple[Float[Tensor, "held D"], Detail]:
        """Gists and detail of the stored blocks, in order of handle."""
        assert self.detail is not None
        cells = self.cells[None]
        blocks = self.grid.read(self.map[None], cells)[0].flatten(1)
        gists = blocks[:, : blocks.shape[1] - self.detail.gist_costs.shape[-1]]
        detail = self.detail.apply(lambda part: part[None]).at(cells)
        return gists, detail.apply(lambda part: part[0])

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "Memory":
        """Read what `save` wrote; a file that is no memory, or was altered, is refused. A memory of
        bits is decoded by the `model` that wrote it; it gets as many cells as it needs."""
        if (content := read_container(as_path(path))) is None:
            saved = SavedMemory.read(as_path(path))
            return cls(saved.map, saved.owners, saved.issued, writer=saved.writer)
        bits = Container.unpack(content, str(path))
        if not hasattr(model, "empty"):  # None, say; models are not imported here
            raise UserError(f"{path} holds bits: Memory.load(path, model) reads it")
        empty = model.empty()
        if empty.codec is not None and len(bits.handles) > empty.capacity:
            empty = model.with_capacity(len(bits.handles)).empty()
        return empty._fill(bits, str(path))

    def _fill(self, saved: Container, name: str) -> "Memory":
        """Fill the first cells of this empty memory with the blocks of a file."""
        if self.codec is None or saved.fingerprint != self.codec.fingerprint:
            raise UserError(f"{name} was written by another model, or by other weights of it")
        try:
            gists, detail = self.codec.decode(saved.stream, len(saved.handles))
        except (ValueError, LookupError, RuntimeError, AssertionError) as error:
            raise UserError(f"{name} is a damaged memory: {reason(error)}") from error
        if symbol_digest(gists, detail) != saved.symbols:
            raise UserError(f"{name} decodes to other blocks than were written")
        device = self.map.device
        block = (self.map.shape[-3], *self.grid.block)
        blocks = torch.cat([gists, detail.is_kept], dim=1).unflatten(1, block).to(device)
        cells = torch.arange(len(gists), device=device)[None]
        more = detail.apply(lambda part: part.to(device)[None])
        memory = self.as_batch().malloc(blocks[None], cells, more)[0]
        owners = torch.full_like(memory.require_slots(), -1)
        owners[: len(gists)] = torch.tensor(saved.handles, dtype=owners.dtype, device=device)
        return replace(memory, owners=owners, issued=saved.issued)

    def to_image(self, scale: int = 4) -> Image.Image:
        """The map as a picture (`map_picture`)."""
        maps = self.map if self.is_batch else self.map[None]
        return map_picture(maps, scale)

    def _repr_png_(self) -> bytes:
        """The map as a PNG, which notebooks show."""
        buffer = BytesIO()
        self.to_image().save(buffer, format="PNG")
        return buffer.getvalue()


def _not_held(handle: int) -> str:
    return f"handle {handle} is not held: it was freed, or never issued"


def require_memory_object(memory: object) -> Memory:
    if not isinstance(memory, Memory):
        raise UserError(
            f"expected a memory, as model.write(images) makes it; got {type(memory).__name__}"
        )
    return memory
