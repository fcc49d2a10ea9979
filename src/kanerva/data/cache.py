"""The user's cache folder, and arrays that are computed once and kept there."""

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
MOST = 2**30  # bytes of a cached array
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
    """Return what `build` returns, from the cache if it was built before under the same key.

    A damaged file is rebuilt. If the folder cannot be written, the arrays are used but not kept,
    and the next process has to build them.
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
        warnings.warn(f"{name} is not cached: {error}", stacklevel=2)
    return arrays


def _read(path: Path) -> Arrays | None:
    """Read the arrays of one file, each checked against its CRC; None if missing or damaged."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as stored:
            names = [name.removesuffix(".npy") for name in stored.namelist()]
        arrays = {name: read_npz(path, name, MOST).copy() for name in names}
        # A CRC covers one array, not which arrays there are
        complete = arrays.pop(_NAMES).tolist() == sorted(arrays)
        return arrays if complete else None
    except Exception:  # numpy and zipfile raise errors of many kinds
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays, **{_NAMES: np.array(sorted(arrays))})
    write_whole(path, file.getvalue())
