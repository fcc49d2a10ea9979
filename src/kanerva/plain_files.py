"""Plain files: read JSON and YAML within limits, check file names, write files atomically."""

import errno
import hashlib
import json
import os
import re
import reprlib
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

from kanerva.errors import UserError
from kanerva.locks import lock

MAX_JSON = 16_000_000  # bytes; our largest record has 50,000
MAX_YAML = 100_000  # bytes; PyYAML needs half a second for them. A config has 2,000
MAX_DEPTH = 32
MAX_NUMBER = 2**63

_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # do not wait for the other end of a pipe
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | _NO_WAIT


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def shown(value: object) -> str:
    """Format a value for a message, shortened if it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


def require_name(value: str, what: str) -> None:
    """Refuse names that, as part of a file name, would lead to another folder or be hidden."""
    if len(value) > 100 or not re.fullmatch(r"\w[\w.+ -]*", value):
        raise UserError(f"{what} must be a plain name, got {shown(value)}")


# Reading


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; refuse folders, devices and pipes, which may never end."""
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | _NO_WAIT))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_limited(path: Path, most: int) -> bytes:
    """Read all bytes of a file; refuse one with more than `most`."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    if len(content) > most:
        raise UserError(f"{path} is too large: more than {most} bytes")
    return content


def file_digest(path: Path, kind: str = "sha256") -> str:
    """The SHA-256 of a file, or the hash named by `kind`."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, kind).hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; errors are one line that says what is wrong with it."""
    return _read(path, MAX_JSON, json.loads, "JSON")


def read_yaml(path: Path) -> Any:
    """Read a YAML file; errors are one line that says what is wrong with it."""
    return _read(path, MAX_YAML, parse_yaml, "YAML")


def parse_yaml(text: str) -> Any:
    """Parse YAML. A text that is not valid may raise any kind of exception."""
    return _bounded(yaml.load(text, _Loader))  # a SafeLoader


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses aliases: a few lines of them can expand to fill any memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not read")
        return super().compose_node(parent, index)


def _read(path: Path, most: int, parse: Callable[[str], Any], kind: str) -> Any:
    content = read_limited(path, most)
    try:
        return _bounded(parse(content.decode()))
    except Exception as error:  # PyYAML raises errors of many kinds on odd values
        raise UserError(f"{path} is not readable {kind}: {reason(error)}") from error


def _bounded(value: Any, depth: int = 0) -> Any:
    """Return the value; refuse nesting or integers beyond what our own files contain."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, int) and abs(value) >= MAX_NUMBER:
        raise ValueError("a number of more than 64 bits")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        _bounded(one, depth + 1)
    return value


# JSON with a digest of its content


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Add the SHA-256 of a mapping's content to it."""
    return content | {"seal": _seal(content)}


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a mapping written with `sealed`; refuse it if it was altered since."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("seal") != _seal(content):
        raise UserError(f"{path} was altered after it was saved")
    return content


def _seal(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# Writing


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file atomically, even if other processes write it too.

    The content goes to a temporary file, is synced, and moved into place. A link is replaced, not
    followed.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not (path.is_file() or path.is_dir() or path.is_symlink()):
            raise ValueError("it is no regular file")  # a device would be replaced by one
        remove_leftovers(path)
        draft, handle = _open_draft(path)
        try:
            write_all(handle, data)
            os.fsync(handle)
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        finally:
            os.close(handle)
        sync(path.parent)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error


def append(path: Path, text: str) -> None:
    """Append to a file, creating it if needed. A link is not followed."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666)
    try:
        write_all(handle, text.encode(errors="backslashreplace"))
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_draft(path: Path) -> tuple[Path, int]:
    """Create a temporary file beside `path`. It stays locked while it is being written."""
    while True:
        draft = path.with_name(f"{_draft_prefix(path)}{secrets.token_hex(6)}.tmp")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            lock(handle, wait=True)
        if os.fstat(handle).st_nlink:
            return draft, handle
        os.close(handle)  # another writer took it for a leftover before it was locked


def remove_leftovers(path: Path) -> None:
    """Delete temporary files of processes that were killed: they are no longer locked."""
    pattern = re.compile(re.escape(_draft_prefix(path)) + r"([0-9a-f]{12}\.)?tmp")
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        with suppress(OSError):
            handle = os.open(path.with_name(name), os.O_WRONLY | NO_LINK)
            try:
                if lock(handle):
                    os.unlink(path.with_name(name))
            finally:
                os.close(handle)


def _draft_prefix(path: Path) -> str:
    return f".{path.name[:100]}."  # short enough to leave room for a suffix in a file name


def write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
