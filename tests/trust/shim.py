"""The operations on files below a folder, counted; at a chosen one something happens.

The package writes through `os` alone (plain_files), so patching `os` reaches every operation of a
save: open, write, fsync, replace, rename, unlink, mkdir, rmdir. A store's file is written by
SQLite, which lets its own calls of the system be replaced (all but fsync: `no_syncs`).
"""

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPERATIONS = (
    "open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "listdir",
    "truncate",
)  # fmt: skip
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
            if name == "close":  # no operation: the number may be another file's next
                self.handles.discard(arguments[0])
                return real(*arguments)
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
    real = {name: getattr(os, name) for name in (*OPERATIONS, "close")}
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
        real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A write that takes half and says so: no error, and the rest is to follow."""
    if name == "write" and len(arguments[1]) > 1:
        return real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def kill(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


# SQLite

_INT, _TEXT, _DATA, _SIZE = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_ssize_t
_CALLS = {  # what SQLite calls, as which operation, and its types: of the result, of arguments
    "open": ("open", _INT, _TEXT, _INT, _INT),
    "close": ("close", _INT, _INT),
    "write": ("write", _SIZE, _INT, _DATA, _SIZE),
    "pwrite": ("write", _SIZE, _INT, _DATA, _SIZE, _SIZE),
    "pwrite64": ("write", _SIZE, _INT, _DATA, _SIZE, _SIZE),
    "ftruncate": ("truncate", _INT, _INT, _SIZE),
    "fallocate": ("truncate", _INT, _INT, _SIZE, _SIZE),
    "unlink": ("unlink", _INT, _TEXT),
}


class _Vfs(ctypes.Structure):
    """https://sqlite.org/c3ref/vfs.html"""

    _fields_ = [
        ("numbers", _INT * 3),
        ("next", _DATA),
        ("name", _TEXT),
        ("data", _DATA),
        ("methods", _DATA * 13),
        ("set_call", ctypes.CFUNCTYPE(_INT, _DATA, _TEXT, _DATA)),
        ("get_call", ctypes.CFUNCTYPE(_DATA, _DATA, _TEXT)),
    ]


@contextmanager
def watching_sqlite(shim: Shim) -> Iterator[Shim]:
    """SQLite's calls with the shim in them."""
    import _sqlite3

    find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find  # of the library it is linked to
    find.restype = ctypes.POINTER(_Vfs)
    vfs = find(None)
    table, kept = vfs.contents, list[Any]()
    for call, (name, *types) in _CALLS.items():
        address = table.get_call(vfs, call.encode())
        if address:  # not every build has each
            form = ctypes.CFUNCTYPE(*types, use_errno=True)
            kept.append(form(_replaced(shim, name, form(address))))
            table.set_call(vfs, call.encode(), ctypes.cast(kept[-1], _DATA))
    try:
        yield shim
    finally:
        for call in _CALLS:
            table.set_call(vfs, call.encode(), None)


def _replaced(shim: Shim, name: str, real: Callable[..., Any]) -> Callable[..., int]:
    """A call of C's as the shim takes it: bytes for an address, an OSError for a code."""

    def call(*words: Any) -> Any:
        given = list(words)
        if name == "write":
            given.insert(2, len(given[1]))
        if isinstance(given[0], str):
            given[0] = os.fsencode(given[0])
        result = real(*given)
        if result == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    watched = shim.wrap(name, call)

    def replaced(*words: Any) -> int:
        given = list(words)
        if name == "write":
            given[1:3] = [ctypes.string_at(given[1], given[2])]
        if isinstance(given[0], bytes):
            given[0] = os.fsdecode(given[0])
        try:
            return watched(*given)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1

    return replaced


def no_syncs() -> None:
    """From now on no fsync of this process succeeds, whoever calls it: the kernel says EIO."""
    fsync, fdatasync = {"x86_64": (74, 75), "aarch64": (82, 83)}[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06  # of a program for packet filters
    program = struct.pack("HBBI", load, 0, 0, 0) + struct.pack("HBBI", equal, 1, 0, fsync)
    program += struct.pack("HBBI", equal, 0, 1, fdatasync)
    program += struct.pack("HBBI", give, 0, 0, 0x50000 | errno.EIO)
    program += struct.pack("HBBI", give, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(program)
    filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for words in ((38, 1, 0, 0, 0), (22, 2, filter, 0, 0)):  # no new privileges; a filter
        if prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), "the kernel takes no filter of calls")
