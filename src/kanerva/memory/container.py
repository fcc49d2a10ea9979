"""A memory of bits as one file: a header of 128 bytes, one stream for all blocks, then handles.

    header    magic, version, codec, fingerprint of the model, cells, counts, lengths, two digests
    stream    everything that the model reads: gists, detail, caps
    handles   the handle of each block: for the user; the model does not read them

Blocks are in order of handle. When a file is read, they are put into the first cells.
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kanerva.errors import UserError
from kanerva.plain_files import open_regular

MAGIC = b"\x89KANERVA"
VERSION = 5
HEADER = struct.Struct("<8sHH16sIIIII32s32s")  # 8 + 4 + 16 + 20 + 64 = 112 bytes
SIZE = 128  # bytes of the header, padded with zeros
CODEC = 1  # gist and detail; 0 is int8


@dataclass(frozen=True)
class Container:
    """The contents of a file."""

    fingerprint: bytes
    cells: int
    issued: int
    handles: list[int]
    stream: bytes
    symbols: bytes  # SHA-256 of what the stream decodes to

    def pack(self) -> bytes:
        """Make the bytes of a file."""
        steps = np.diff(np.array([-1, *self.handles], np.int64)) - 1
        handles = b"".join(_varint(int(step)) for step in steps)
        body = self.stream + handles
        fields = (MAGIC, VERSION, CODEC, self.fingerprint, self.cells, len(self.handles),
                  self.issued, len(self.stream), len(handles), self.symbols)  # fmt: skip
        blank = HEADER.pack(*fields, bytes(32)).ljust(SIZE, b"\0")
        seal = hashlib.sha256(blank + body).digest()
        return HEADER.pack(*fields, seal).ljust(SIZE, b"\0") + body

    @classmethod
    def unpack(cls, data: bytes, name: str) -> "Container":
        """Read a file's bytes; an altered file is refused."""
        if len(data) < SIZE:
            raise UserError(f"{name} is a damaged memory: it is cut off")
        *fields, seal = HEADER.unpack(data[: HEADER.size])
        blank = HEADER.pack(*fields, bytes(32)).ljust(SIZE, b"\0")
        _, version, codec, fingerprint, cells, count, issued, stream, handles, symbols = fields
        if version != VERSION or codec != CODEC:
            raise UserError(
                f"{name} has version {version}, codec {codec}: this kanerva reads version "
                f"{VERSION}, codec {CODEC}; write its images again"
            )
        if seal != hashlib.sha256(blank + data[SIZE:]).digest() or any(data[HEADER.size : SIZE]):
            raise UserError(f"{name} was altered after it was saved")
        if SIZE + stream + handles != len(data):
            raise UserError(f"{name} is a damaged memory: its lengths do not add up")
        found = _read_varints(data[SIZE + stream :], name)
        owned = (np.cumsum(np.array(found, np.int64) + 1) - 1).tolist()
        if len(owned) != count or count > cells or any(h >= issued for h in owned):
            raise UserError(f"{name} is a damaged memory: its handles do not fit")
        return cls(fingerprint, cells, issued, owned, data[SIZE : SIZE + stream], symbols)


def read_container(path: Path) -> bytes | None:
    """The bytes of such a file; None if there is no file, or one of another kind."""
    try:
        with open_regular(path) as file:
            start = file.read(len(MAGIC))
            return start + file.read() if start == MAGIC else None
    except OSError:
        return None


def _varint(value: int) -> bytes:
    """Encode a number with seven bits per byte, the lowest first."""
    found = bytearray()
    while True:
        value, low = value >> 7, value & 127
        found.append(low | (128 if value else 0))
        if not value:
            return bytes(found)


def _read_varints(data: bytes, name: str) -> list[int]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if shift > 35:
            raise UserError(f"{name} is a damaged memory: its handles do not fit")
        if not byte & 128:
            values.append(value)
            value, shift = 0, 0
    return values
