"""Decoded pictures beside the store's file, a byte for each pixel.

A cache: made from the blocks, and again where it is missing or damaged. Row id - 1 holds the
picture and a check sum; what is freed becomes zeros.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

_HEADER = 64  # bytes: what was decoded with


class LevelsFile:
    """Rows of bytes by id, of which a process reads what it needs."""

    def __init__(self, path: Path, size: int, seal: str) -> None:
        """`size` bytes a picture; `seal` names the weights that decoded them."""
        self.path, self.size, self.width = path, size, size + 4
        self._head = seal.encode()[:_HEADER].ljust(_HEADER, b"\0")
        if not path.exists() or self._read_head() != self._head:
            self._start()

    def _read_head(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(_HEADER)

    def _start(self) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.write_bytes(self._head)
        os.replace(temporary, self.path)

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    def write(self, ids: Sequence[int], levels: np.ndarray) -> None:
        """Rows of pictures, on the disk when this returns."""
        rows = np.zeros((len(ids), self.width), dtype=np.uint8)
        rows[:, : self.size] = levels.reshape(len(ids), self.size)
        sums = [
            zlib.crc32(row[: self.size].tobytes(), id) for row, id in zip(rows, ids, strict=True)
        ]
        rows[:, self.size :] = np.array(sums, dtype="<u4").view(np.uint8).reshape(-1, 4)
        self._put(ids, rows)

    def erase(self, ids: Sequence[int]) -> None:
        """Zeros, and a sum that does not fit them."""
        self._put(ids, np.zeros((len(ids), self.width), dtype=np.uint8))

    def holds(self, ids: Sequence[int]) -> int:
        """How many of some freed rows are not blank."""
        count = 0
        with self.path.open("rb") as file:
            for id in ids:
                file.seek(_HEADER + (id - 1) * self.width)
                count += any(file.read(self.width))
        return count

    def _put(self, ids: Sequence[int], rows: np.ndarray) -> None:
        with self.path.open("r+b") as file:
            for id, row in zip(ids, rows, strict=True):
                file.seek(_HEADER + (int(id) - 1) * self.width)
                file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def read(self, ids: np.ndarray, mend: Callable[[list[int]], np.ndarray]) -> np.ndarray:
        """Pictures of ids that are held. Rows that do not fit their sum come from `mend`, which
        makes them of their blocks."""
        rows = self._get(ids)
        sums = rows[:, self.size :].copy().view("<u4")[:, 0]
        bad = [
            n
            for n, id in enumerate(ids)
            if zlib.crc32(rows[n, : self.size].tobytes(), int(id)) != sums[n]
        ]
        if bad:
            made = mend([int(ids[n]) for n in bad])
            rows[bad, : self.size] = made.reshape(len(bad), self.size)
        return rows[:, : self.size]

    def _get(self, ids: np.ndarray) -> np.ndarray:
        """Rows as they stand in the file, zeros beyond its end; those that follow one another in
        one piece. Read, not mapped: pages that a search touches would stay in memory."""
        rows = np.zeros((len(ids), self.width), dtype=np.uint8)
        starts = np.flatnonzero(np.diff(ids, prepend=-1) != 1).tolist()
        with self.path.open("rb", buffering=0) as file:
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                place = _HEADER + (int(ids[start]) - 1) * self.width
                data = os.pread(file.fileno(), (end - start) * self.width, place)
                rows[start:end].reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return rows
