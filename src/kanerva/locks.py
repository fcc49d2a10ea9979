"""One process at a time, where several would write the same file or folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kanerva.errors import UserError


@contextmanager
def alone(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder. Where another process has it this waits, or else is a
    `UserError` that says `busy`; where there are no locks all are let in."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            if not lock(handle, wait=busy is None):
                raise UserError(busy)
        yield
    finally:
        os.close(handle)


def lock(handle: int, *, wait: bool = False) -> bool:
    """Whether nobody else has this file; a kill lets go. An OSError where there are no locks."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOSYS, "no locks on this system") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
