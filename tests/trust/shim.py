"""The operations on files below a folder, counted; at a chosen one something happens.

The package writes through `os` alone (plain_files), so patching `os` reaches every operation of a
save: open, write, fsync, replace, rename, unlink, mkdir, rmdir.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "listdir")
Act = Callable[
    [str, Callable[..., Any], tuple[Any, ...]], Any
]  # operation, the real one, arguments


class Shim:
    """Counts; at operation `number` calls `act` instead."""

    def __init__(self, place: Path, number: int = 0, act: Act | None = None) -> None:
        self.place, self.number, self.act = os.fspath(place), number, act
        self.count, self.handles, self.struck = 0, set[int](), ""

    def concerns(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        first = arguments[0] if arguments else ""
        if isinstance(first, int):
            return first in self.handles
        inside = os.path.abspath(os.fspath(first)).startswith(self.place)
        return inside or options.get("dir_fd") in self.handles

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            if not self.concerns(arguments, options):
                return real(*arguments, **options)
            self.count += 1
            if self.count == self.number and self.act is not None:
                self.struck = name
                return self.act(name, real, arguments)
            result = real(*arguments, **options)
            if name == "open":
                self.handles.add(result)
            return result

        return operation


@contextmanager
def watching(shim: Shim) -> Iterator[Shim]:
    """`os` with the shim in it."""
    real = {name: getattr(os, name) for name in OPERATIONS}
    for name, function in real.items():
        setattr(os, name, shim.wrap(name, function))
    try:
        yield shim
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def fail(code: int) -> Act:
    """As on a full disk, or a broken one."""

    def act(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        raise OSError(code, os.strerror(code))

    return act


def cut_short(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A write that takes half, and then nothing more; other operations fail."""
    if name == "write" and len(arguments[1]) > 1:
        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A write that takes half and says so: no error, and the rest is to follow."""
    if name == "write" and len(arguments[1]) > 1:
        return real(arguments[0], arguments[1][: len(arguments[1]) // 2])
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def kill(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
