"""Memory: what a user holds after writing, and its heap: malloc, free, slots, all here.

memory = model.write(images)                # malloc for each image
memory = model.append(memory, more)         # malloc again: the rest stays where it is
memory = memory.free(memory.handles[3])     # its cell is zeros, and free for others

A slot is a cell of the memory's grid. Saved as safetensors, never as a pickle.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from kanerva.errors import UserError
from kanerva.files import FLOATS, read_tensors, require_tensor, write_tensors
from kanerva.memory.grid import Grid
from kanerva.memory.quantise import pack, quantise, unpack
from kanerva.plain_files import reason, shown
from kanerva.shapes import Blocks, Cells

# 1: a float32 map, no slots. 2: with points and blocks of slots, which follow from the grid.
_FORMAT, _OLDER = "kanerva-memory-3", ("kanerva-memory-1", "kanerva-memory-2")
_STORED = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)
_SEALED = (_FORMAT, "kanerva-memory-2")  # the first had no digest yet


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of one episode (Cm, Hm, Wm), or of a batch of episodes (B, Cm, Hm, Wm).

    `map` is all that reading uses. `owners` says which handle lies in which cell, -1 where it is
    free; a model that writes its episode as a whole has none, and nothing in its memory can be told
    apart or freed. `issued` counts the handles given out: none is used twice.
    """

    map: Float[Tensor, "*B Cm Hm Wm"]
    owners: Int[Tensor, "*B slots"] | None = None
    issued: int = 0

    def __post_init__(self) -> None:
        if self.map.ndim not in (3, 4):
            shape = tuple(self.map.shape)
            raise UserError(f"a memory map is (Cm, Hm, Wm) or (B, Cm, Hm, Wm), got {shape}")

    # Batches

    @property
    def is_batch(self) -> bool:
        """Whether this holds several episodes' memories."""
        return self.map.ndim == 4

    @property
    def floats(self) -> int:
        """Numbers in one episode's memory: no bound charges for them, so say how many."""
        return self.map[0].numel() if self.is_batch else self.map.numel()

    def __getitem__(self, episode: int) -> "Memory":
        """One episode's memory out of a batch."""
        if not self.is_batch:
            raise UserError("this memory holds one episode; there is nothing to index")
        return self._apply(lambda tensor: tensor[episode])

    @classmethod
    def stack(cls, memories: "list[Memory]") -> "Memory":
        """Memories of one episode each as a batch."""
        maps = torch.stack([memory.map for memory in memories])
        owners = [memory.owners for memory in memories if memory.owners is not None]
        if len(owners) < len(memories):
            return cls(maps)
        return cls(maps, torch.stack(owners), max(memory.issued for memory in memories))

    def as_batch(self) -> "Memory":
        """This memory as a batch of memories."""
        return self if self.is_batch else Memory.stack([self])

    def to(self, device: str | torch.device) -> "Memory":
        return self._apply(lambda tensor: tensor.to(device))

    def _apply(self, function: Callable[[Tensor], Tensor]) -> "Memory":
        owners = None if self.owners is None else function(self.owners)
        return Memory(function(self.map), owners, self.issued)

    # Slots

    def require_slots(self) -> Int[Tensor, "*B slots"]:
        """Which handle lies in which cell; refused where a memory was written as a whole."""
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
        """Blocks there is room for."""
        return self.require_slots().shape[-1]

    @property
    def handles(self) -> list[int]:
        """Handles of what is held, in order of writing."""
        owners = self._require_one()
        return sorted(owners[owners >= 0].tolist())

    @property
    def cells(self) -> Int[Tensor, "*B held"]:
        """The cell of each block held, in order of handle; the memories of a batch must hold
        equally many."""
        owners = self.require_slots()
        count = (owners >= 0).sum(dim=-1)
        if bool((count != count.max()).any()):
            raise UserError("the memories of this batch hold different numbers of blocks")
        order = owners.masked_fill(owners < 0, self.issued).argsort(dim=-1)
        return order[..., : int(count.max())]

    @property
    def places(self) -> Float[Tensor, "*B held 2"]:
        """Where each block held lies, (x, y) on [-1, 1], in order of handle."""
        return self.grid.centres(self.map.device)[self.cells]

    def __len__(self) -> int:
        return int((self._require_one() >= 0).sum())

    def __bool__(self) -> bool:
        return True  # a memory that holds nothing is still one

    def slot_of(self, handle: int) -> int:
        """The cell in which a handle's block lies."""
        owners = self._require_one()
        known = handle if 0 <= handle < self.issued else self.issued  # a number that tensors hold
        found = (owners == known).nonzero()
        if len(found) == 0:
            raise UserError(f"handle {handle} is not held: it was freed, or never given out")
        return int(found[0, 0])

    def slots_of(self, handles: Int[Tensor, "B T"]) -> Cells:
        """The cells of handles, for a batch of memories."""
        matches = self.require_slots()[:, None] == handles[..., None]  # (B, T, slots)
        if not bool(matches.any(dim=-1).all()) or bool((handles < 0).any()):
            raise UserError("a handle given is not held by this memory")
        return matches.int().argmax(dim=-1)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.map.shape))
        if self.owners is None:
            return f"Memory({shape})"
        held = "" if self.is_batch else f", {len(self)} of {self.capacity} blocks held"
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
        """A batch of memories that hold nothing."""
        owners = torch.full((batch, capacity), -1, dtype=torch.long, device=device)
        return cls(torch.zeros(batch, *shape, device=device, dtype=dtype), owners)

    def malloc(self, blocks: Blocks, cells: Cells) -> "Memory":
        """A batch of memories with one block more in each of some free cells. Their handles are the
        next ones, in order; gradients reach the blocks."""
        count, length = cells.shape
        new = self.issued + torch.arange(length, device=cells.device).expand(count, -1)
        owners = self.require_slots().scatter(1, cells, new)
        return Memory(self.map + self.grid.paste(blocks, cells), owners, self.issued + length)

    def free_cells(self, count: int) -> Cells:
        """The first `count` free cells of each memory of a batch."""
        held = self.require_slots() >= 0
        if bool((held.sum(dim=1) + count > self.capacity).any()):
            raise UserError(
                f"the memory is full: its capacity is {self.capacity} blocks, "
                f"{int(held.sum(dim=1).max())} are held, and {count} more were given"
            )
        return held.int().argsort(dim=1, stable=True)[:, :count]

    def free(self, *handles: int | list[int] | Int[Tensor, "*B T"]) -> "Memory":
        """The memory without some blocks; the handles of all others stay as they are. For a batch
        a tensor names handles of each memory, -1 none: what `read` found may be given as it is."""
        if self.is_batch and len(handles) == 1 and isinstance(handles[0], Tensor):
            return self._clear(self._named(handles[0]))
        owners = self._require_one()
        try:
            named = [h for one in handles for h in torch.as_tensor(one).flatten().tolist()]
        except (ValueError, RuntimeError, OverflowError) as error:  # numbers that no tensor holds
            raise UserError(f"handles {shown(handles)} are not held") from error
        if len(set(named)) != len(named):
            raise UserError(f"a handle is named twice: {named}")
        if not named:
            return self
        cells = torch.tensor([self.slot_of(h) for h in named], device=self.map.device)
        return self._clear(torch.zeros_like(owners, dtype=torch.bool).index_fill(0, cells, True))

    def _named(self, handles: Int[Tensor, "..."]) -> Bool[Tensor, "B slots"]:
        """Which cells of each memory the handles name; twice is once."""
        if handles.ndim != 2 or len(handles) != len(self.map):
            raise UserError(
                f"a batch of {len(self.map)} memories takes handles ({len(self.map)}, number), got "
                f"{tuple(handles.shape)}"
            )
        matches = self.require_slots()[:, None] == handles[..., None]  # (B, T, slots)
        lost = (handles != -1) & ~(matches.any(dim=-1) & (handles >= 0))
        if bool(lost.any()):
            raise UserError(
                f"handle {int(handles[lost][0])} is not held: it was freed, or never given out"
            )
        return (matches & (handles >= 0)[..., None]).any(dim=1)

    def _clear(self, gone: Bool[Tensor, "*B slots"]) -> "Memory":
        """Zeros in some cells, which are free from then on."""
        pixels = torch.zeros(
            (*gone.shape[:-1], self.grid.height * self.grid.width),
            dtype=torch.bool,
            device=gone.device,
        )
        pixels[..., self.grid.pixels(gone.device)] = gone[..., None]
        pixels = pixels.unflatten(-1, self.map.shape[-2:]).unsqueeze(-3)
        owners = self.require_slots().masked_fill(gone, -1)
        return replace(self, map=self.map.masked_fill(pixels, 0), owners=owners)

    def quantise(self, dtype: str) -> "Memory":
        """This memory as it reads back after `save(dtype=...)`."""
        return replace(self, map=quantise(self.map, dtype))

    # Files

    def save(self, path: str | Path, dtype: str = "float32") -> None:
        """Write one file, all of it or nothing; `dtype`: float32, bfloat16, int8 or int4."""
        require_tensor({"map": self.map}, "map", f"cannot write {path}", FLOATS)
        about = {"format": _FORMAT, "dtype": dtype, "shape": json.dumps(list(self.map.shape))}
        tensors = pack(self.map, dtype)
        if self.owners is not None:
            tensors |= {"owners": self.owners}
            about |= {"issued": json.dumps(self.issued)}
        write_tensors(Path(path), tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> "Memory":
        """Read what `save` wrote; a file that is no memory, or was altered, is refused."""
        tensors, about = read_tensors(Path(path), lambda about: about.get("format") in _SEALED)
        if about.get("format") not in (_FORMAT, *_OLDER) or "map" not in tensors:
            raise UserError(f"{path} is not a saved memory (format {about.get('format')})")
        try:
            shape = json.loads(about.get("shape", json.dumps(list(tensors["map"].shape))))
            require_tensor(tensors, "map", "it", _STORED)
            map = unpack(tensors, about.get("dtype", "float32"), tuple(shape))
            issued = json.loads(about.get("issued", "0"))
            memory = cls(map, tensors.get("owners"), issued)
            _check_file(memory, tensors, tuple(shape))
            between = about.get("disjoint") == "false" and not memory._lies_in_cells(tensors)
        except (LookupError, ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"{path} is a damaged memory: {reason(error)}") from error
        if between:
            raise UserError(f"{path} holds blocks between cells: read it with kanerva 0.1")
        return memory

    def _lies_in_cells(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the slots of an older file, whose blocks might overlap, are cells."""
        owners, grid = self.require_slots(), self.grid
        points = require_tensor(tensors, "points", "it", [torch.float32], (*owners.shape, 2))
        off = (points - grid.centres()).abs().amax(dim=-1)
        fits = "blocks" not in tensors or tuple(tensors["blocks"].shape[-2:]) == grid.block
        pixels = self.as_batch().map.flatten(2)[:, :, grid.pixels()]  # (B, Cm, cells, hw)
        free = self.as_batch().require_slots() < 0
        blank = bool((pixels.movedim(2, 1)[free] == 0).all())  # no block reaches into a free cell
        return fits and blank and bool((off[owners >= 0] < 1e-4).all())

    def to_image(self, scale: int = 4) -> Image.Image:
        """The map as a picture (`map_picture`)."""
        maps = self.map if self.is_batch else self.map[None]
        return map_picture(maps, scale)


def _check_file(memory: Memory, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    """Refuse what `save` never writes: other types and shapes, numbers that are not finite,
    a handle in two cells, or one that was not given out and would be given out again."""
    require_tensor({"map": memory.map}, "map", "it", [torch.float32], shape)
    if "scale" in tensors:
        require_tensor(tensors, "scale", "it", [torch.float32], (*shape[:-3], 1, 1, 1))
    if type(memory.issued) is not int or memory.issued < 0:
        raise UserError(f"{memory.issued!r} handles were given out")
    if memory.owners is not None:
        lead = (*shape[:-3], memory.capacity)
        owners = require_tensor(tensors, "owners", "it", [torch.int64], lead)
        rows = owners.reshape(-1, memory.capacity).sort(dim=-1).values
        if bool(((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)).any()):
            raise UserError("a handle lies in two cells")
        if not -1 <= int(owners.min()) <= int(owners.max()) < max(memory.issued, 1):
            raise UserError("a handle was never given out")
        memory.grid  # noqa: B018  refuses a number of cells that makes none


def map_picture(maps: Float[Tensor, "B Cm Hm Wm"], scale: int = 4) -> Image.Image:
    """Maps side by side, each stretched to its own range: three channels as colours, a few others
    side by side, many by their three principal components."""
    maps = maps.detach().float().cpu()
    if maps.shape[1] > 8:
        maps = torch.stack([principal_components(one) for one in maps])
    low, high = maps.amin(dim=(1, 2, 3), keepdim=True), maps.amax(dim=(1, 2, 3), keepdim=True)
    levels = ((maps - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    if levels.shape[1] == 3:
        picture = Image.fromarray(torch.cat(list(levels), dim=2).permute(1, 2, 0).numpy())
    else:
        picture = Image.fromarray(torch.cat(list(levels.flatten(0, 1)), dim=1).numpy())
    size = (picture.width * scale, picture.height * scale)
    return picture.resize(size, Image.Resampling.NEAREST)


def principal_components(map: Float[Tensor, "Cm Hm Wm"]) -> Float[Tensor, "3 Hm Wm"]:
    """The three directions in which the pixels of a deep map differ most."""
    pixels = map.flatten(1).T  # (Hm Wm, Cm)
    left, size, _ = torch.linalg.svd(pixels - pixels.mean(dim=0), full_matrices=False)
    scores = torch.nn.functional.pad(left * size, (0, max(0, 3 - len(size))))[:, :3]
    return scores.T.unflatten(1, map.shape[1:])
