"""The user's cache folder, and arrays that are worked out once and kept there."""

import hashlib
import os
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np

from kanerva.data.array_files import read_npz
from kanerva.errors import UserError
from kanerva.plain_files import write_whole

Arrays = dict[str, np.ndarray]
MOST = 2**30  # bytes of an array that is kept
_NAMES = "names of arrays"


def cache_dir() -> Path:
    """`$KANERVA_CACHE`, else the platform's cache folder for `kanerva`."""
    chosen = os.environ.get("KANERVA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    try:
        import pooch
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "kanerva"
    return Path(pooch.os_cache("kanerva"))


def cached_arrays(name: str, key: str, build: Callable[[], Arrays]) -> Arrays:
    """What `build` returns, from the cache if it was built before under the same key.

    A damaged file is built anew. Where the folder cannot be written the arrays are used all the
    same, and the next process builds them again.
    """
    short = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_dir() / "built" / f"{name}-{short}.npz"
    kept = _read(path)
    if kept is not None:
        return kept
    arrays = build()
    try:
        _write(path, arrays)
    except (OSError, UserError) as error:
        warnings.warn(f"{name} is not kept for next time: {error}", stacklevel=2)
    return arrays


def _read(path: Path) -> Arrays | None:
    """The arrays of one file, each checked against its CRC; None when there is nothing sound."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as stored:
            names = [name.removesuffix(".npy") for name in stored.namelist()]
        arrays = {name: read_npz(path, name, MOST).copy() for name in names}
        whole = arrays.pop(_NAMES).tolist() == sorted(arrays)  # a sum covers an array, not a list
        return arrays if whole else None
    except Exception:  # of every kind, from numpy and zipfile
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays, **{_NAMES: np.array(sorted(arrays))})
    write_whole(path, file.getvalue())
