"""The file of a memory of floats: safetensors, never a pickle. Memories of bits have another
format (`container`)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.files import read_tensors, require_tensor, write_tensors
from kanerva.memory.grid import Grid, check_owners, lies_in_cells
from kanerva.memory.quantise import pack, unpack
from kanerva.plain_files import reason

# Format 1: a float32 map without slots. Format 2: with the points and sizes of its slots, which
# format 3 leaves out, because they follow from the grid.
_FORMAT, _OLDER = "kanerva-memory-3", ("kanerva-memory-1", "kanerva-memory-2")
_STORED = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)
_SEALED = (_FORMAT, "kanerva-memory-2")  # formats with a digest


@dataclass(frozen=True)
class SavedMemory:
    """The fields of a `Memory` that a file holds."""

    map: Float[Tensor, "*B Cm Hm Wm"]
    owners: Int[Tensor, "*B slots"] | None
    issued: int
    writer: str | None

    def write(self, path: Path, dtype: str) -> None:
        """Write the file atomically, with numbers as float32, bfloat16, int8 or int4."""
        about = {"format": _FORMAT, "dtype": dtype, "shape": json.dumps(list(self.map.shape))}
        tensors = pack(self.map, dtype)
        if self.owners is not None:
            tensors |= {"owners": self.owners}
            about |= {"issued": json.dumps(self.issued)}
        if self.writer is not None:
            about |= {"writer": self.writer}
        write_tensors(path, tensors, about)

    @classmethod
    def read(cls, path: Path) -> "SavedMemory":
        """Read what `write` wrote. A file that is no memory, or was altered, is refused."""
        tensors, about = read_tensors(path, lambda about: about.get("format") in _SEALED)
        if about.get("format") not in (_FORMAT, *_OLDER) or "map" not in tensors:
            raise UserError(f"{path} is not a saved memory (format {about.get('format')})")
        try:
            saved = cls._from(tensors, about)
            between = about.get("disjoint") == "false" and not saved._lies_in_cells(tensors)
        except (LookupError, ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"{path} is a damaged memory: {reason(error)}") from error
        if between:
            raise UserError(f"{path} holds blocks between cells: read it with kanerva 0.1")
        return saved

    @classmethod
    def _from(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> "SavedMemory":
        """Check and decode tensors. Refuses what `write` never writes: other types and shapes,
        numbers that are not finite, a handle in two cells, or a handle that was not issued yet and
        would later be issued a second time."""
        shape = tuple(json.loads(about.get("shape", json.dumps(list(tensors["map"].shape)))))
        require_tensor(tensors, "map", "it", _STORED)
        map = unpack(tensors, about.get("dtype", "float32"), shape)
        issued, owners = json.loads(about.get("issued", "0")), tensors.get("owners")
        if map.ndim not in (3, 4):
            raise UserError(f"a memory map is (Cm, Hm, Wm) or (B, Cm, Hm, Wm), got {shape}")
        require_tensor({"map": map}, "map", "it", [torch.float32], shape)
        if "scale" in tensors:
            require_tensor(tensors, "scale", "it", [torch.float32], (*shape[:-3], 1, 1, 1))
        if type(issued) is not int or issued < 0:
            raise UserError(f"the number of issued handles is {issued!r}")
        if owners is not None:
            lead = (*shape[:-3], owners.shape[-1])
            check_owners(require_tensor(tensors, "owners", "it", [torch.int64], lead), issued)
            Grid(owners.shape[-1], (shape[-2], shape[-1]))  # raises an error if they make no grid
        return cls(map, owners, issued, about.get("writer"))

    def _lies_in_cells(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the blocks in a file of kanerva 0.1 lie exactly in cells."""
        if self.owners is None:
            raise UserError("this memory was written as a whole: it has no blocks to tell apart")
        one = self.map.ndim == 3
        map, owners = (self.map[None], self.owners[None]) if one else (self.map, self.owners)
        return lies_in_cells(map, owners, tensors)
