"""Decoded pictures beside the store's file, a byte for each pixel.

A cache: made from the blocks, and again where it is missing or damaged. Row id - 1 holds the
picture and a check sum; what is freed becomes zeros.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kanerva.plain_files import NO_LINK, open_regular, write_all, write_whole

_HEADER = 64  # bytes: what was decoded with


class LevelsFile:
    """Rows of bytes by id, of which a process reads what it needs."""

    def __init__(self, path: Path, size: int, seal: str) -> None:
        """`size` bytes a picture; `seal` names the store, and the weights that decoded them."""
        self.path, self.size, self.width = path, size, size + 4
        self._head = seal.encode()[:_HEADER].ljust(_HEADER, b"\0")
        self._ensure()

    def _ensure(self) -> None:
        """Begin anew where there is no such file of this store's, but a pipe, a link or another."""
        try:
            with open_regular(self.path) as file:
                if not self.path.is_symlink() and file.read(_HEADER) == self._head:
                    return
        except OSError:
            pass
        write_whole(self.path, self._head)

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

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
        self._ensure()
        with open_regular(self.path) as file:
            for id in ids:
                file.seek(_HEADER + (id - 1) * self.width)
                count += any(file.read(self.width))
        return count

    def cut_after(self, last: int) -> None:
        """End behind the last id: what follows was being added when its process was killed."""
        end = _HEADER + last * self.width
        if self.bytes > end:
            os.truncate(self.path, end)

    def _put(self, ids: Sequence[int], rows: np.ndarray) -> None:
        self._ensure()
        handle = os.open(self.path, os.O_RDWR | NO_LINK)
        try:
            for id, row in zip(ids, rows, strict=True):
                os.lseek(handle, _HEADER + (int(id) - 1) * self.width, os.SEEK_SET)
                write_all(handle, row.tobytes())
            os.fsync(handle)
        finally:
            os.close(handle)

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
        if not len(ids):
            return rows
        starts = np.flatnonzero(np.diff(ids, prepend=-1) != 1).tolist()
        with suppress(OSError), open_regular(self.path) as file:  # else all are made again
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                place = _HEADER + (int(ids[start]) - 1) * self.width
                data = os.pread(file.fileno(), (end - start) * self.width, place)
                rows[start:end].reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return rows
