"""Locks, so that only one process at a time writes a file or folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kanerva.errors import UserError


@contextmanager
def alone(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder.

    If another process has it, wait; or with `busy`, raise a `UserError` with that message. On a
    system without locks nobody is kept out.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            if not lock(handle, wait=busy is None):
                raise UserError(busy)
        yield
    finally:
        os.close(handle)


def lock(handle: int, *, wait: bool = False) -> bool:
    """Take the lock of an open file; False if another process has it. A process that is killed
    releases its locks. Raises an OSError on systems without locks."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOSYS, "no locks on this system") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
