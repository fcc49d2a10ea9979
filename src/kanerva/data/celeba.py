"""CelebA (Liu et al. 2015): 202,599 aligned faces, 178 x 218, in the published splits.

Read from `img_align_celeba/000001.jpg` and so on, with `list_eval_partition.txt` beside that
folder; or from the publishers' folders `Img/` and `Eval/`.
"""

import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kanerva.data.image_set import ImageSet
from kanerva.data.packing import packed_files, state_of
from kanerva.data.picture_files import Unreadable, channels_first, open_picture
from kanerva.errors import UserError
from kanerva.plain_files import read_limited

SHAPE = (3, 64, 64)
IMAGES, PARTITION = "img_align_celeba", "list_eval_partition.txt"
SPLITS = {"0": "train", "1": "validation", "2": "test"}  # as numbered in the partition file
MAX_PARTITION = 2**24  # bytes; the published list has 2.8 million
LINE = re.compile(r"(\w[\w.-]*)\s+([012])")  # a plain file name, without a path


def find_source(place: Path) -> tuple[Path, Path] | None:
    """The folder of images and the partition file; None if either is missing."""
    for images, partition in ((IMAGES, PARTITION), (f"Img/{IMAGES}", f"Eval/{PARTITION}")):
        if (place / images).is_dir() and (place / partition).is_file():
            return place / images, place / partition
    return None


def load(split: str, place: Path, crop: int | None = None) -> ImageSet | None:
    """Load one split at 64 x 64; None if the set is missing. Missing and unreadable files are
    counted in a warning.

    The whole picture, which is not quite square, is resized to a square with Pillow's Lanczos
    filter. With `crop` only a centred square of that side is used; 148 is usual.
    """
    source = find_source(place)
    if source is None:
        return None
    images, partition = source
    named = [name for name, its_split in read_partition(partition) if its_split == split]
    if not named:
        raise UserError(f"{partition}: names no {split} images")
    files = [(name, images / name) for name in named if (images / name).is_file()]
    if not files:
        raise UserError(f"{images}: holds none of the {len(named)} {split} images")
    there = dict(files)
    if missing := [name for name in named if name not in there]:
        count = f"{len(missing)} of {len(named)} {split} images are missing"
        warnings.warn(f"{images}: {count}, such as {missing[0]}", stacklevel=2)
    key = f"{split} crop={crop} {partition.resolve()} {state_of([partition])}"
    read = partial(face, crop=crop)
    packed = packed_files(f"celeba-{split}", key, images, files, read, SHAPE)
    return ImageSet("celeba", split, torch.from_numpy(packed.images))


def is_present(place: Path) -> bool:
    return find_source(place) is not None


def read_partition(path: Path) -> list[tuple[str, str]]:
    """Read each image's name and split, in file order. A line looks like `000001.jpg 0`."""
    try:
        lines = read_limited(path, MAX_PARTITION).decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a list of images and splits ({error})") from error
    entries: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        match = LINE.fullmatch(line.strip())
        if match:
            entries.append((match[1], SPLITS[match[2]]))
        elif line.strip():
            raise UserError(
                f"{path}: line {number} is {line.strip()[:40]!r}, expected something like "
                "'000001.jpg 0' (0 train, 1 validation, 2 test)"
            )
    return entries


def face(path: Path, crop: int | None) -> np.ndarray:
    """Read one file as 3 x 64 x 64 bytes."""
    from PIL import Image

    picture = open_picture(path, channels=3)
    if crop is not None:
        if crop > min(picture.size):
            raise Unreadable(f"{picture.width} x {picture.height} is too small for crop={crop}")
        left, top = (picture.width - crop) // 2, (picture.height - crop) // 2
        picture = picture.crop((left, top, left + crop, top + crop))
    _, height, width = SHAPE
    return channels_first(picture.resize((width, height), Image.Resampling.LANCZOS))
