"""The bytes of a file that SQLite has open too.

A process that closes a file loses all its locks on it, through whichever handle it has them
(POSIX), and SQLite's are such locks: another process would then take the store for closed, and
remove the log that this one goes on to write. So a file has one handle here, closed with the last
store of it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

_LOCK = Lock()
_HANDLES: dict[tuple[int, int], list[int]] = {}  # of a device and inode: handle, users
_PART = 1 << 24  # bytes read at once


def hold(path: Path) -> int:
    """A handle to read from, until `release`."""
    with _LOCK:
        about = path.stat()
        kept = _HANDLES.get((about.st_dev, about.st_ino))
        if kept is None:
            handle = os.open(path, os.O_RDONLY)
            about = os.fstat(handle)
            kept = _HANDLES.setdefault((about.st_dev, about.st_ino), [handle, 0])
        kept[1] += 1
        return kept[0]


def release(handle: int) -> None:
    """After SQLite has closed the file."""
    with _LOCK:
        for key, kept in list(_HANDLES.items()):
            if kept[0] == handle:
                kept[1] -= 1
                if kept[1] == 0:
                    del _HANDLES[key]
                    os.close(handle)


def search(handle: int, needles: Sequence[bytes]) -> set[bytes]:
    """Which of these stand in a file."""
    found, start = set[bytes](), 0
    overlap = max((len(needle) for needle in needles), default=1)
    while part := os.pread(handle, _PART + overlap, start):
        found |= {needle for needle in needles if needle in part}
        start += _PART
    return found
