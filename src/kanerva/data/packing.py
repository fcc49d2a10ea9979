"""Packed splits: images that take minutes to decode are cached as one memory-mapped array."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kanerva.data.array_files import read_npy
from kanerva.data.cache import cache_dir
from kanerva.data.picture_files import Files, Read, check_size, read_files, skipped
from kanerva.errors import UserError
from kanerva.locks import alone
from kanerva.plain_files import open_regular, read_json, sync


@dataclass(frozen=True)
class Packed:
    """A cached split. The images are memory-mapped: bytes are read when they are used."""

    images: np.ndarray
    labels: np.ndarray | None
    note: str  # which files were left out; empty if none


class Packing:
    """Writes a split: images in order, labels for all of them or none, and a note."""

    def __init__(self, file: BinaryIO, shape: tuple[int, int, int]) -> None:
        self.count, self.note = 0, ""
        self.labels: list[np.ndarray] = []
        self._file, self._shape = file, shape
        self._header()

    def add(self, images: np.ndarray) -> None:
        """Append N x C x H x W bytes."""
        if images.dtype != np.uint8 or images.shape[1:] != self._shape:
            raise ValueError(f"{images.dtype} of shape {images.shape}, not of {self._shape}")
        self._file.write(np.ascontiguousarray(images).data)
        self.count += len(images)

    def finish(self) -> None:
        """Rewrite the header, now that the number of images is known."""
        start = self._file.tell() - self.count * int(np.prod(self._shape))
        self._file.seek(0)
        self._header()
        if self._file.tell() != start:  # numpy pads headers for a first dimension of any length
            raise AssertionError("the header of a packed array has changed its length")

    def _header(self) -> None:
        shape = (self.count, *self._shape)
        about = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, about)


def packed_files(
    name: str, key: str, where: Path, files: Files, read: Read, shape: tuple[int, int, int]
) -> Packed:
    """Load files as one packed array. Warns of skipped files each time, not only when packing."""

    def fill(packing: Packing) -> None:
        problems: dict[str, str] = {}
        for _, pixels in read_files(files, read, name, problems):
            packing.add(pixels[None])
        packing.note = skipped(where, problems, len(files))

    check_size(where, len(files), shape)
    key = f"{where.resolve()} {state_of([path for _, path in files])} {key}"
    split = packed(name, key, len(files), shape, fill)
    if split.note:
        warnings.warn(split.note, stacklevel=3)
    return split


def state_of(files: Sequence[Path]) -> str:
    """A cache key that changes with the files: a hash of each one's name, size and modification
    time, in the given order."""
    digest = hashlib.sha256()
    for file in files:
        about = file.stat()
        digest.update(os.fsencode(f"{file.name}\0{about.st_size} {about.st_mtime_ns}\n"))
    return digest.hexdigest()


def packed(
    name: str,
    key: str,
    count: int,
    shape: tuple[int, int, int],
    fill: Callable[[Packing], None],
) -> Packed:
    """Return what `fill` writes, at most `count` images; from the cache if the key is the same.

    The cache is written atomically. Of several processes one writes and the others wait.
    """
    place = cache_dir() / "built"
    short = hashlib.sha256(os.fsencode(f"{key} {shape}")).hexdigest()[:16]
    folder, draft = place / f"{name}-{short}", place / f".{name}-{short}.tmp"
    lock = place / f".{name}-{short}.lock"
    kept = _kept(folder, shape)
    if kept is not None:
        return kept
    need = count * int(np.prod(shape))
    advice = f"point $KANERVA_CACHE at a folder with room for {need / 1e9:.1f} GB"
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock.touch()
        with alone(lock):
            kept = _kept(folder, shape)
            if kept is not None:
                return kept
            free = shutil.disk_usage(place).free
            if need > free:
                raise UserError(f"{place}: {free / 1e9:.1f} GB left for {name}: {advice}")
            shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
            draft.mkdir()
            try:
                _pack(draft, shape, fill)
                for file in draft.iterdir():  # before it is moved to a name that is trusted
                    sync(file)
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            kept = _kept(folder, shape)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{place}: {name} cannot be packed there ({reason}): {advice}") from error
    if kept is None:
        raise UserError(f"{folder}: was written and cannot be read back: {advice}")
    return kept


def _pack(draft: Path, shape: tuple[int, int, int], fill: Callable[[Packing], None]) -> None:
    with (draft / "images.npy").open("wb") as file:
        packing = Packing(file, shape)
        fill(packing)
        packing.finish()
    labels = np.concatenate(packing.labels) if packing.labels else None
    if labels is not None:
        np.save(draft / "labels.npy", labels, allow_pickle=False)
    about = {"images": packing.count, "labels": labels is not None, "note": packing.note}
    (draft / "about.json").write_text(json.dumps(about))


def _kept(folder: Path, shape: tuple[int, int, int]) -> Packed | None:
    """Open a packed split; None if it is missing or incomplete. It is mapped copy-on-write, so that
    it cannot be changed by mistake."""
    try:
        about = read_json(folder / "about.json")
        open_regular(folder / "images.npy").close()  # numpy would wait for a pipe
        images = np.load(folder / "images.npy", mmap_mode="c", allow_pickle=False)
        labels = read_npy(folder / "labels.npy").copy() if about["labels"] else None
        sound = images.dtype == np.uint8 and images.shape == (about["images"], *shape)
        if labels is not None:
            sound &= labels.shape == (len(images),)
        return Packed(images, labels, str(about["note"])) if sound else None
    except Exception:  # numpy raises errors of many kinds
        return None
