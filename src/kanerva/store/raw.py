"""Raw access to a file that SQLite has open too.

Under POSIX, a process that closes any handle of a file loses all its locks on that file, including
SQLite's. Another process would then take the store for closed, and remove the log while this one
still writes to it. So each file has a single handle here, which is closed with its last store.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

_LOCK = Lock()
_HANDLES: dict[tuple[int, int], list[int]] = {}  # (device, inode): [handle, number of users]
_PART = 1 << 24  # bytes read at once


def hold(path: Path) -> int:
    """Open a handle for reading, or share the open one; call `release` when done."""
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
    """Give a handle back; call this only after SQLite has closed the file."""
    with _LOCK:
        for key, kept in list(_HANDLES.items()):
            if kept[0] == handle:
                kept[1] -= 1
                if kept[1] == 0:
                    del _HANDLES[key]
                    os.close(handle)


def search(handle: int, needles: Sequence[bytes]) -> set[bytes]:
    """Which of these byte strings occur in a file."""
    found, start = set[bytes](), 0
    overlap = max((len(needle) for needle in needles), default=1)
    while part := os.pread(handle, _PART + overlap, start):
        found |= {needle for needle in needles if needle in part}
        start += _PART
    return found
