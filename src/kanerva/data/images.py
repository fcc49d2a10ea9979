"""Pictures of your own: a folder tree as a data set, or files named on the command line."""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kanerva.data.image_set import ImageSet
from kanerva.errors import UserError
from kanerva.shapes import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
MAX_PIXELS = 64_000_000  # a small file can claim a picture that fills the memory: refuse those
SMALL_FOLDER = 200  # up to here a tenth of the files may be none at all
SPLITS = ("train", "validation", "test")


class Unreadable(Exception):
    """A file that Pillow cannot, or should not, turn into pixels. The message says why."""


def load_folder(
    folder: Path, split: str, size: tuple[int, int] = (64, 64), channels: int = 3
) -> ImageSet:
    """One split of all pictures under a folder, by path, cropped about the centre and resized.

    Files are dealt 80/10/10 by a hash of their path, so one more file moves no other; in a small
    folder an empty split is lent a picture. Files that cannot be read are skipped and counted.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of images")
    named = {path.relative_to(folder).as_posix(): path for path in image_paths(folder)}
    if not named:
        raise UserError(f"{folder}: holds no images ({', '.join(sorted(SUFFIXES))})")
    small = len(named) <= SMALL_FOLDER
    names = [name for name in named if small or split_of(name) == split]
    pictures: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for name in names:
        try:
            pictures[name] = read_picture(named[name], size, channels, resize=True)
        except Unreadable as problem:
            problems.append(f"{name}: {problem}")
    if problems:
        count = f"{len(problems)} of {len(names)} files"
        if not pictures:
            raise UserError(f"{folder}: {count} cannot be read, such as {problems[0]}")
        warnings.warn(f"{folder}: skipped {count}, such as {problems[0]}", stacklevel=2)
    deal = _deal(list(pictures)) if small else dict.fromkeys(pictures, split)
    kept = [picture for name, picture in pictures.items() if deal[name] == split]
    if not kept:
        raise UserError(f"{folder}: {len(pictures)} images leave none for {split}: add some")
    return ImageSet("images", split, torch.from_numpy(np.stack(kept)))


def load_images(
    paths: Sequence[Path], image_shape: tuple[int, int, int], resize: bool = False
) -> Pixels:
    """The given files, and for a folder all images in it, as a model of this shape takes them."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        found = image_paths(path) if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path}: holds no images ({', '.join(sorted(SUFFIXES))})")
        files += found
    if not files:
        raise UserError("no images given: name image files or a folder of them")
    channels, height, width = image_shape
    pictures: list[np.ndarray] = []
    for file in files:
        try:
            pictures.append(read_picture(file, (height, width), channels, resize))
        except Unreadable as problem:
            raise UserError(f"{file}: {problem}") from problem
    return torch.from_numpy(np.stack(pictures))


def image_paths(folder: Path) -> list[Path]:
    """All files under a folder that are named like images, by relative path; none hidden."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    named = [(path.relative_to(folder).as_posix(), path) for path in found if path.is_file()]
    return [path for name, path in sorted(named) if not f"/{name}".count("/.")]


def split_of(name: str) -> str:
    """The split of a relative path: one file in ten to validation, one to test."""
    tenth = _hash(name) % 10
    return {0: "validation", 1: "test"}.get(tenth, "train")


def read_picture(path: Path, size: tuple[int, int], channels: int, resize: bool) -> np.ndarray:
    """C x H x W bytes. Transparency is laid on white, turned photographs are set upright."""
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise UserError(f"channels={channels}: images are read as 1 (grey) or 3 (colour)")
    height, width = size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit is about as wide as ours
            with Image.open(path) as file:
                if file.width * file.height > MAX_PIXELS:
                    raise Unreadable(f"{file.width} x {file.height} is too many pixels")
                picture = _flat(ImageOps.exif_transpose(file), "L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise Unreadable("not an image that Pillow reads") from error
    if picture.size != (width, height):
        if not resize:
            found = f"{picture.width} x {picture.height}"
            raise UserError(f"{path}: {found} where {width} x {height} is needed: use --resize")
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1).copy()


def _flat(picture: "Picture", mode: str) -> "Picture":
    """Grey (L) or RGB: 16-bit grey keeps its upper byte, what is transparent becomes white."""
    from PIL import Image

    if picture.mode.startswith("I"):  # Pillow would clip these to 255, not scale them
        values = np.asarray(picture).astype(np.int64)
        deep = picture.mode != "I" or values.max() > 255
        picture = Image.fromarray((values >> (8 if deep else 0)).clip(0, 255).astype(np.uint8))
    elif picture.has_transparency_data:
        paper = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(paper, picture.convert("RGBA"))
    return picture.convert(mode)


def _deal(names: list[str]) -> dict[str, str]:
    """Each name's split; from three names on, a split left empty takes one from the largest."""
    deal = {name: split_of(name) for name in names}
    for split in SPLITS if len(names) >= len(SPLITS) else ():
        if split not in deal.values():
            dealt = list(deal.values())
            largest = max(SPLITS, key=dealt.count)
            deal[min((name for name in deal if deal[name] == largest), key=_hash)] = split
    return deal


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
