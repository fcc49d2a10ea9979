"""A user's own images: a folder tree as a data set, or files named on the command line."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kanerva.data.image_set import ImageSet
from kanerva.data.packing import packed_files
from kanerva.data.picture_files import (
    SUFFIXES,
    Unreadable,
    check_size,
    fitted,
    image_files,
    open_picture,
    read_files,
    skipped,
)
from kanerva.data.registry import SPLITS
from kanerva.errors import UserError
from kanerva.shapes import Pixels

PACKED_FROM = 32_000_000  # bytes of a split's pixels: a larger folder is packed into the cache
SMALL_FOLDER = 200  # files: in a folder up to this size a split could be empty by chance


def load(
    split: str,
    place: Path,
    folder: Path,
    size: tuple[int, int] = (64, 64),
    channels: int = 3,
) -> ImageSet:
    """Load one split of the pictures under `folder`; `place` is not used."""
    return load_folder(folder.expanduser(), split, size, channels)


def is_present(place: Path) -> bool:
    """Always false: it depends on the folder."""
    return False


def load_folder(
    folder: Path, split: str, size: tuple[int, int] = (64, 64), channels: int = 3
) -> ImageSet:
    """Load one split of all pictures under a folder, sorted by path, centre-cropped and resized.

    Files are split 80/10/10 by a hash of their path, so a new file does not move others. In a small
    folder an empty split gets a picture from the largest. Unreadable files are skipped and counted.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of images")
    named = dict(image_files(folder))
    if not named:
        raise UserError(f"{folder}: holds no images ({', '.join(sorted(SUFFIXES))})")
    small = len(named) <= SMALL_FOLDER
    files = [(name, named[name]) for name in named if small or split_of(name) == split]
    shape = (channels, *size)

    def read(path: Path) -> np.ndarray:
        return fitted(open_picture(path, channels), size)

    if check_size(folder, len(files), shape) >= PACKED_FROM and not small:
        packed = packed_files("images", f"{split} {shape}", folder, files, read, shape)
        return ImageSet("images", split, torch.from_numpy(packed.images))
    problems: dict[str, str] = {}
    pictures = dict(read_files(files, read, "images", problems))
    if note := skipped(folder, problems, len(files)):
        warnings.warn(note, stacklevel=2)
    deal = _deal(list(pictures)) if small else dict.fromkeys(pictures, split)
    kept = [picture for name, picture in pictures.items() if deal[name] == split]
    if not kept:
        raise UserError(f"{folder}: {len(named)} images leave none for {split}: add some")
    return ImageSet("images", split, torch.from_numpy(np.stack(kept)))


def load_images(
    paths: Sequence[Path],
    image_shape: tuple[int, int, int],
    resize: bool = False,
    problems: dict[str, str] | None = None,
) -> Pixels:
    """Load files, and all images of folders, for a model with this image shape.

    Unreadable files are added to `problems` and left out. Without `problems`, they are an error.
    """
    files: list[Path] = []
    for path in paths:
        if not os.path.exists(path):  # also False for names that are not valid
            raise UserError(f"{path}: no such file or folder")
        if path.is_dir():
            files += _readable_files(path, image_shape[0])
        else:
            files.append(path)
    if not files:
        raise UserError("no images given: name image files or a folder of them")
    check_size(paths[0], len(files), image_shape)
    channels, height, width = image_shape
    pictures: list[np.ndarray] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about files that it can read
        for file in files:
            try:
                picture = open_picture(file, channels)
            except Unreadable as problem:
                if problems is None:
                    raise UserError(f"{file}: {problem}") from problem
                problems[str(file)] = str(problem)
                continue
            if picture.size != (width, height) and not resize:
                size = f"{picture.width} x {picture.height}"
                raise UserError(f"{file}: {size} where {width} x {height} is needed: use --resize")
            pictures.append(fitted(picture, (height, width)))
    return torch.from_numpy(np.array(pictures, dtype=np.uint8).reshape(-1, *image_shape))


def _readable_files(folder: Path, channels: int) -> list[Path]:
    """List all images in a folder. Unreadable ones are skipped and counted in a warning."""
    every = image_files(folder)
    if not every:
        raise UserError(f"{folder}: holds no images ({', '.join(sorted(SUFFIXES))})")
    problems: dict[str, str] = {}
    for name, file in every:
        try:
            open_picture(file, channels)
        except Unreadable as problem:
            problems[name] = str(problem)
    if note := skipped(folder, problems, len(every)):
        warnings.warn(note, stacklevel=3)
    return [file for name, file in every if name not in problems]


def split_of(name: str) -> str:
    """The split of a relative path: one file in ten is validation, one is test."""
    tenth = _hash(name) % 10
    return {0: "validation", 1: "test"}.get(tenth, "train")


def _deal(names: list[str]) -> dict[str, str]:
    """Assign each name a split. From three names on, an empty split takes one from the largest."""
    deal = {name: split_of(name) for name in names}
    for split in SPLITS if len(names) >= len(SPLITS) else ():
        if split not in deal.values():
            dealt = list(deal.values())
            largest = max(SPLITS, key=dealt.count)
            deal[min((name for name in deal if deal[name] == largest), key=_hash)] = split
    return deal


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "little")
