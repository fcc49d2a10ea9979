"""Plain files: JSON and YAML read within limits, names that are names, files written whole."""

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

MAX_JSON = 16_000_000  # bytes; the largest record has 50,000
MAX_YAML = 100_000  # bytes, which PyYAML takes half a second for; a config has 2,000
MAX_DEPTH = 32
MAX_NUMBER = 2**63

_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for the other end of a pipe
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | _NO_WAIT


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def shown(value: object) -> str:
    """A value for a message: short, however much there is of it."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


def require_name(value: str, what: str) -> None:
    """Refuse what is to be part of a file's name and leads elsewhere, or hides."""
    if len(value) > 100 or not re.fullmatch(r"\w[\w.+ -]*", value):
        raise UserError(f"{what} must be a plain name, got {shown(value)}")


# Reading


def open_regular(path: Path) -> BufferedReader:
    """A file to read from: not a folder, a device, or a pipe, which might never end."""
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | _NO_WAIT))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_limited(path: Path, most: int) -> bytes:
    """All bytes of a file that has at most so many."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    if len(content) > most:
        raise UserError(f"{path} is too large: more than {most} bytes")
    return content


def file_digest(path: Path, kind: str = "sha256") -> str:
    """The SHA-256 of a file, or another hash."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, kind).hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def read_json(path: Path) -> Any:
    """A JSON file's content, or one line that says what is wrong with it."""
    return _read(path, MAX_JSON, json.loads, "JSON")


def read_yaml(path: Path) -> Any:
    """A YAML file's content, or one line that says what is wrong with it."""
    return _read(path, MAX_YAML, parse_yaml, "YAML")


def parse_yaml(text: str) -> Any:
    """The value that a text is in YAML; errors of every kind where it is none."""
    return _bounded(yaml.load(text, _Loader))  # a SafeLoader


class _Loader(yaml.SafeLoader):
    """Without aliases: a few lines of them stand for more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not read")
        return super().compose_node(parent, index)


def _read(path: Path, most: int, parse: Callable[[str], Any], kind: str) -> Any:
    content = read_limited(path, most)
    try:
        return _bounded(parse(content.decode()))
    except Exception as error:  # PyYAML meets odd values with errors of every kind
        raise UserError(f"{path} is not readable {kind}: {reason(error)}") from error


def _bounded(value: Any, depth: int = 0) -> Any:
    """The value, if it is nested no deeper and its whole numbers are no larger than any of ours."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, int) and abs(value) >= MAX_NUMBER:
        raise ValueError("a number of more than 64 bits")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        _bounded(one, depth + 1)
    return value


# JSON that tells if it was altered


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """A mapping with the SHA-256 of all else in it."""
    return content | {"seal": _seal(content)}


def read_sealed(path: Path) -> dict[str, Any]:
    """Such a mapping from a JSON file, if it is as it was saved."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("seal") != _seal(content):
        raise UserError(f"{path} was altered after it was saved")
    return content


def _seal(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# Writing


def write_whole(path: Path, content: bytes | str) -> None:
    """A file, all of it or nothing, whoever else writes there: filled under a name of its own,
    synced, moved into place. A link is replaced, not followed."""
    data = content.encode() if isinstance(content, str) else content
    try:
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
    """More at the end of a file, which is made if need be; not through a link."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666)
    try:
        write_all(handle, text.encode(errors="backslashreplace"))
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_draft(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, locked for as long as it is being written."""
    while True:
        draft = path.with_name(f"{_draft_prefix(path)}{secrets.token_hex(6)}.tmp")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            lock(handle, wait=True)
        if os.fstat(handle).st_nlink:
            return draft, handle
        os.close(handle)  # another writer took it for a leftover before it was locked


def remove_leftovers(path: Path) -> None:
    """Drafts of those who were killed: nobody has locked them."""
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
    return f".{path.name[:100]}."  # short enough to be a file's name with what follows


def write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
