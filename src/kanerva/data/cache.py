"""The user's cache folder, and arrays that are worked out once and kept there."""

import hashlib
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


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
    except OSError as error:
        reason = error.strerror or type(error).__name__
        warnings.warn(f"{name} is not kept for next time: {path}: {reason}", stacklevel=2)
    return arrays


def _read(path: Path) -> Arrays | None:
    """The arrays of one file, each checked against its CRC; None when there is nothing sound."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Written beside its place and moved there whole, so no reader ever meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
