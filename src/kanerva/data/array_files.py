"""Read arrays from npy and npz files: the header first, never unpickled, within a size limit."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kanerva.errors import UserError
from kanerva.plain_files import open_regular, reason

HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
Stream = Any  # a file, perhaps in a zip: IO[bytes] to a type checker, not to beartype


@contextmanager
def damage_named(path: Path, what: str, remedy: str = "") -> Iterator[None]:
    """Turn any exception while reading a file into a one-line `UserError`: on damaged files,
    libraries raise errors of many kinds."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{path}: not {what} ({reason(error)[:100]}){remedy}") from error


@contextmanager
def open_array(path: Path, name: str) -> Iterator[tuple[Stream, tuple[int, ...], np.dtype]]:
    """Open one array of an npz. Yields a stream at its first value, its shape and its dtype."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        with archive.open(f"{name}.npy") as member:
            yield member, *read_header(member)


def read_header(file: Stream) -> tuple[tuple[int, ...], np.dtype]:
    """Read the shape and dtype of an array; its values follow in the stream."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"an array in format {version}")
    try:
        shape, fortran, dtype = HEADERS[version](file)
    except Exception as error:  # of any kind: numpy evaluates the header as a Python literal
        raise ValueError("an array without a proper header") from error
    if dtype.hasobject:
        raise ValueError("an array of objects, which would have to be unpickled")
    if fortran and len(shape) > 1:
        raise ValueError("an array in Fortran order: save it in C order")
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    return shape, dtype


def read_values(file: Stream, shape: tuple[int, ...], dtype: np.dtype, most: int) -> np.ndarray:
    """Read all values of an array of at most `most` bytes; nothing may follow. Reading to the end
    of a zip member also checks its CRC."""
    size = math.prod(shape) * dtype.itemsize
    if size > most:
        raise ValueError(f"an array of {size} bytes, more than {most}")
    values = np.frombuffer(read_exactly(file, size), dtype).reshape(shape)
    require_end(file)
    return values


def read_npz(path: Path, name: str, most: int) -> np.ndarray:
    """Read one array of an npz, of at most `most` bytes."""
    with open_array(path, name) as (member, shape, dtype):
        return read_values(member, shape, dtype, most)


def read_npy(path: Path) -> np.ndarray:
    """Read the array of an npy file; it is no larger than the file."""
    with open_regular(path) as file:
        return read_values(file, *read_header(file), path.stat().st_size)


def read_exactly(file: Stream, size: int) -> bytes:
    raw = file.read(size)
    if len(raw) != size:
        raise ValueError("an array ends early")
    return raw


def require_end(file: Stream) -> None:
    if file.read(1):
        raise ValueError("an array is longer than it says")
