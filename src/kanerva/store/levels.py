"""A cache of decoded pictures, in a file beside the store's: one byte per pixel and channel.

It is made from the blocks; missing or damaged rows are made anew. Row id - 1 has the picture and a
checksum. Freed rows become zeros.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kanerva.plain_files import NO_LINK, open_regular, write_all, write_whole

_HEADER = 64  # bytes, which hold the seal


class LevelsFile:
    """Rows of bytes by id. A process reads only the rows that it needs."""

    def __init__(self, path: Path, size: int, seal: str) -> None:
        """`size`: bytes per picture. `seal`: identifies the store and the model's weights."""
        self.path, self.size, self.width = path, size, size + 4
        self._head = seal.encode()[:_HEADER].ljust(_HEADER, b"\0")
        self._ensure()

    def _ensure(self) -> None:
        """Start a new file, unless there is a regular one of this store."""
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
        """Write the rows of pictures; they are on disk when this returns."""
        rows = np.zeros((len(ids), self.width), dtype=np.uint8)
        rows[:, : self.size] = levels.reshape(len(ids), self.size)
        sums = [
            zlib.crc32(row[: self.size].tobytes(), id) for row, id in zip(rows, ids, strict=True)
        ]
        rows[:, self.size :] = np.array(sums, dtype="<u4").view(np.uint8).reshape(-1, 4)
        self._put(ids, rows)

    def erase(self, ids: Sequence[int]) -> None:
        """Overwrite rows with zeros, the checksum too, so that it does not match."""
        self._put(ids, np.zeros((len(ids), self.width), dtype=np.uint8))

    def holds(self, ids: Sequence[int]) -> int:
        """How many of these rows, which are freed, are not all zeros."""
        count = 0
        self._ensure()
        with open_regular(self.path) as file:
            for id in ids:
                file.seek(_HEADER + (id - 1) * self.width)
                count += any(file.read(self.width))
        return count

    def cut_after(self, last: int) -> None:
        """Truncate after the last id: rows that follow were left by a process killed in `add`."""
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
        """Read the pictures of stored ids. Rows whose checksum does not match come from `mend`,
        which decodes their blocks."""
        rows = self._get(ids)
        sums = rows[:, self.size :].copy().view("<u4")[:, 0].tolist()
        pairs = enumerate(zip(ids.tolist(), sums, strict=True))
        bad = [n for n, (id, sum) in pairs if zlib.crc32(rows[n, : self.size].data, id) != sum]
        if bad:
            made = mend([int(ids[n]) for n in bad])
            rows[bad, : self.size] = made.reshape(len(bad), self.size)
        return rows[:, : self.size]

    def _get(self, ids: np.ndarray) -> np.ndarray:
        """Read rows from the file, consecutive ones in one piece; zeros beyond its end. The file is
        not memory-mapped: the pages that a search touches would stay in memory."""
        rows = np.zeros((len(ids), self.width), dtype=np.uint8)
        if not len(ids):
            return rows
        starts = np.flatnonzero(np.diff(ids, prepend=-1) != 1)
        places = (_HEADER + (ids[starts] - 1) * self.width).tolist()
        edges, data = [*(starts * self.width).tolist(), rows.size], rows.reshape(-1).data
        with suppress(OSError), open_regular(self.path) as file:  # missing rows are mended
            handle = file.fileno()
            for place, start, end in zip(places, edges, edges[1:], strict=False):
                os.preadv(handle, [data[start:end]], place)
        return rows
