"""Memory: what a user holds after writing. Saved as safetensors, never as a pickle.

memory = model.write(images)                # malloc for each image
memory = model.append(memory, more)         # malloc again: the rest stays where it is
memory = memory.free(memory.handles[3])     # its place is zeros, and free for others
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors
from kanerva.memory.blocks import block_windows, paste_blocks
from kanerva.memory.grid import Grid
from kanerva.memory.quantise import packed, rounded, unpacked

_FORMAT, _OLDER = "kanerva-memory-2", "kanerva-memory-1"  # the older: a float32 map, no slots


@dataclass(frozen=True, eq=False)
class Slots:
    """The heap's own books: which handle lies in which slot, and where a slot is.

    p reads none of this; it is kept so that blocks can be found and freed. With cells a slot is a
    cell and its block is the cell's pixels; where blocks may overlap, they are kept one by one.
    """

    owners: Int[Tensor, "*B slots"]  # handle, or -1: free
    points: Float[Tensor, "*B slots 2"]  # (x, y) on [-1, 1]
    blocks: Float[Tensor, "*B slots Cm h w"] | None  # None: cells, or saved without
    disjoint: bool  # whether every slot has pixels of its own
    issued: int  # handles given out so far; they are never used twice

    def tensors(self) -> dict[str, Tensor]:
        found = {"owners": self.owners, "points": self.points}
        return found if self.blocks is None else found | {"blocks": self.blocks}

    def map_tensors(self, function) -> "Slots":  # noqa: ANN001
        changed = {name: function(value) for name, value in self.tensors().items()}
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of one episode (Cm, Hm, Wm), or of a batch of episodes (B, Cm, Hm, Wm).

    `map` is all that reading uses. `slots` says what lies where; a model that pools its episode has
    none, and nothing in its memory can be told apart or freed.
    """

    map: Float[Tensor, "*B Cm Hm Wm"]
    slots: Slots | None = None

    def __post_init__(self) -> None:
        if self.map.ndim not in (3, 4):
            shape = tuple(self.map.shape)
            raise UserError(f"a memory map is (Cm, Hm, Wm) or (B, Cm, Hm, Wm), got {shape}")

    @property
    def is_batch(self) -> bool:
        """Whether this holds several episodes' memories."""
        return self.map.ndim == 4

    @property
    def floats(self) -> int:
        """Numbers in one episode's memory: what a bound gets for free, so say how many."""
        return self.map[0].numel() if self.is_batch else self.map.numel()

    def __getitem__(self, episode: int) -> "Memory":
        """One episode's memory out of a batch."""
        if not self.is_batch:
            raise UserError("this memory holds one episode; there is nothing to index")
        slots = None if self.slots is None else self.slots.map_tensors(lambda t: t[episode])
        return Memory(self.map[episode], slots)

    @classmethod
    def stack(cls, memories: "list[Memory]") -> "Memory":
        """Memories of one episode each as a batch."""
        maps = torch.stack([memory.map for memory in memories])
        books = [memory.slots for memory in memories]
        if any(slots is None for slots in books):
            return cls(maps)
        known = [slots for slots in books if slots is not None]
        if any(slots.blocks is None for slots in known):  # one was saved without
            known = [replace(slots, blocks=None) for slots in known]
        kept = [slots.tensors() for slots in known]
        joint = {name: torch.stack([each[name] for each in kept]) for name in kept[0]}
        issued = max(slots.issued for slots in known)
        return cls(maps, replace(known[0], **joint, issued=issued))

    def to(self, device: str | torch.device) -> "Memory":
        slots = None if self.slots is None else self.slots.map_tensors(lambda t: t.to(device))
        return Memory(self.map.to(device), slots)

    # The heap

    def _books(self) -> Slots:
        if self.slots is None:
            raise UserError("this memory was written as a whole: it has no blocks to tell apart")
        return self.slots

    def _one(self) -> Slots:
        if self.is_batch:
            raise UserError("this is a batch of memories: take one, memory[i], first")
        return self._books()

    @property
    def capacity(self) -> int:
        """Blocks there is room for."""
        return self._books().owners.shape[-1]

    @property
    def handles(self) -> list[int]:
        """Handles of what is held, in order of writing."""
        owners = self._one().owners
        return sorted(owners[owners >= 0].tolist())

    @property
    def places(self) -> Float[Tensor, "*B held 2"]:
        """Where each block held lies, (x, y) on [-1, 1], in order of handle; the memories of a
        batch must hold equally many."""
        slots = self._books()
        count = (slots.owners >= 0).sum(dim=-1)
        if bool((count != count.max()).any()):
            raise UserError("the memories of this batch hold different numbers of blocks")
        rank = slots.owners.masked_fill(slots.owners < 0, slots.issued).argsort(dim=-1)
        order = rank[..., : int(count.max()), None]
        return slots.points.gather(-2, order.expand(*order.shape[:-1], 2))

    def __len__(self) -> int:
        return int((self._one().owners >= 0).sum())

    def __bool__(self) -> bool:
        return True  # a memory that holds nothing is still one

    def slot_of(self, handle: int) -> int:
        """The slot in which a handle's block lies."""
        found = (self._one().owners == handle).nonzero()
        if handle < 0 or len(found) == 0:
            raise UserError(f"handle {handle} is not held: it was freed, or never given out")
        return int(found[0, 0])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.map.shape))
        if self.slots is None:
            return f"Memory({shape})"
        held = "" if self.is_batch else f", {len(self)} of {self.capacity} blocks held"
        return f"Memory({shape}{held})"

    def free(self, *handles: int | list[int]) -> "Memory":
        """The memory without some blocks; the handles of all others stay as they are."""
        slots = self._one()
        named = [h for one in handles for h in (one if isinstance(one, list) else [one])]
        if len(set(named)) != len(named):
            raise UserError(f"a handle is named twice: {named}")
        where = torch.tensor([self.slot_of(h) for h in named], dtype=torch.long)
        where = where.to(self.map.device)
        if len(where) == 0:
            return self
        map, blocks = self.map.clone(), slots.blocks
        if slots.disjoint:
            size = self.map.shape[-1]
            map.flatten(1)[:, Grid(self.capacity, size).pixels(map.device)[where].flatten()] = 0
        elif blocks is None:
            raise UserError("this memory was saved without its blocks (only float32 keeps them)")
        else:
            map -= pasted(blocks[where], slots.points[where], map.shape[-1])
            blocks = blocks.index_fill(0, where, 0)
        owners = slots.owners.index_fill(0, where, -1)
        return Memory(map, replace(slots, owners=owners, blocks=blocks))

    def rounded(self, dtype: str) -> "Memory":
        """This memory as it reads back after `save(dtype=...)`."""
        slots = self.slots
        if slots is not None and dtype != "float32":
            slots = replace(slots, blocks=None)
        return Memory(rounded(self.map, dtype), slots)

    # Files

    def save(self, path: str | Path, dtype: str = "float32") -> None:
        """Write one file, all of it or nothing; `dtype`: float32, bfloat16, int8 or int4."""
        about = {"format": _FORMAT, "dtype": dtype, "shape": json.dumps(list(self.map.shape))}
        tensors = packed(self.map, dtype)
        if self.slots is not None:
            tensors |= {
                name: value
                for name, value in self.slots.tensors().items()
                if name != "blocks" or dtype == "float32"
            }
            about |= {
                "disjoint": json.dumps(self.slots.disjoint),
                "issued": json.dumps(self.slots.issued),
            }
        write_tensors(Path(path), tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> "Memory":
        """Read what `save` wrote; a file that is no memory, or was altered, is refused."""
        tensors, about = read_tensors(Path(path))
        if about.get("format") not in (_FORMAT, _OLDER) or "map" not in tensors:
            raise UserError(f"{path} is not a saved memory (format {about.get('format')})")
        try:
            shape = json.loads(about.get("shape", json.dumps(list(tensors["map"].shape))))
            map = unpacked(tensors, about.get("dtype", "float32"), tuple(shape))
            disjoint, issued = (json.loads(about.get(k, "0")) for k in ("disjoint", "issued"))
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is a damaged memory: {error!r}") from error
        if not map.isfinite().all():
            raise UserError(f"{path} holds no finite map")
        if "owners" not in tensors:
            return cls(map)
        slots = Slots(
            owners=tensors["owners"],
            points=tensors["points"],
            blocks=tensors.get("blocks"),
            disjoint=bool(disjoint),
            issued=int(issued),
        )
        return cls(map, slots)

    def to_image(self, scale: int = 4) -> Image.Image:
        """The map as a picture: three channels as colours, a few others side by side, many by
        their three principal components; a batch in a row. Each is stretched to its own range."""
        maps = (self.map if self.is_batch else self.map[None]).detach().float().cpu()
        if maps.shape[1] > 8:
            maps = torch.stack([principal(one) for one in maps])
        low, high = maps.amin(dim=(1, 2, 3), keepdim=True), maps.amax(dim=(1, 2, 3), keepdim=True)
        levels = ((maps - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
        if levels.shape[1] == 3:
            picture = Image.fromarray(torch.cat(list(levels), dim=2).permute(1, 2, 0).numpy())
        else:
            picture = Image.fromarray(torch.cat(list(levels.flatten(0, 1)), dim=1).numpy())
        size = (picture.width * scale, picture.height * scale)
        return picture.resize(size, Image.Resampling.NEAREST)


def pasted(
    blocks: Float[Tensor, "n Cm h w"], points: Float[Tensor, "n 2"], size: int
) -> Float[Tensor, "Cm Hm Wm"]:
    """The sum of some blocks of one episode, each at its point, pixel for pixel."""
    windows = block_windows(points, blocks.shape[-2], size)[None, :, None]
    return paste_blocks(blocks[None, :, None], windows, (size, size))[0]


def principal(map: Float[Tensor, "Cm Hm Wm"]) -> Float[Tensor, "3 Hm Wm"]:
    """The three directions in which the pixels of a deep map differ most."""
    pixels = map.flatten(1).T  # (Hm Wm, Cm)
    centred = pixels - pixels.mean(dim=0)
    left, size, _ = torch.linalg.svd(centred, full_matrices=False)
    scores = F.pad(left * size, (0, max(0, 3 - len(size))))[:, :3]
    return scores.T.unflatten(1, map.shape[1:])
