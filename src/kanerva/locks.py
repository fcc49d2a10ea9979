"""One process at a time, where several would write the same file or folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file or folder; a kill lets go. Where another process has it this waits,
    or else raises `BlockingIOError`."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
