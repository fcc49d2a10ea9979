"""Idx files, as the authors of MNIST and Fashion-MNIST publish them.

An idx file is two zero bytes, a type byte (8: unsigned byte), the number of dimensions, each
dimension as a big-endian 32-bit number, and then the values.
"""

import gzip
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from kanerva.data.array_files import Stream, damage_named, read_exactly, read_values
from kanerva.data.image_set import ImageSet
from kanerva.errors import UserError
from kanerva.plain_files import open_regular

MOST = 2**28  # bytes of one file's values; MNIST has 47 million
HELD_OUT = 10_000  # the last images of the training file are the validation set


def read_idx(path: Path) -> UInt8[Tensor, "..."]:
    """Read an idx file of unsigned bytes, of any shape, gzipped or plain."""
    with damage_named(path, "a whole idx file", ": remove it and fetch it again"):
        with open_regular(path) as plain:
            with gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain as file:
                return torch.from_numpy(_values(file).copy())


def _values(file: Stream) -> np.ndarray:
    start = file.read(4)
    if len(start) < 4 or start[:3] != b"\x00\x00\x08":
        raise ValueError(f"it begins with {start.hex(' ') or 'nothing'}")
    shape = np.frombuffer(read_exactly(file, 4 * start[3]), ">u4").tolist()
    return read_values(file, tuple(shape), np.dtype(np.uint8), MOST)


def find_idx(folder: Path, part: str, kind: str) -> Path | None:
    """Find the file of a part (train, t10k) and kind (images, labels) under its usual names."""
    dims = {"images": 3, "labels": 1}[kind]
    for joint in ("-", "."):
        for suffix in ("", ".gz"):
            path = folder / f"{part}-{kind}{joint}idx{dims}-ubyte{suffix}"
            if path.is_file():
                return path
    return None


def load_idx_set(name: str, split: str, place: Path) -> ImageSet | None:
    """Load one split of the set in `place`; None if its images are missing.

    The last 10,000 images of the training file are the validation split.
    """
    part = "t10k" if split == "test" else "train"
    images_path = find_idx(place, part, "images")
    if images_path is None:
        return None
    images = read_idx(images_path)
    if images.ndim != 3 or not len(images):
        raise _damaged(images_path, f"shape {tuple(images.shape)} where images are N x H x W")
    labels_path = find_idx(place, part, "labels")
    labels = None if labels_path is None else read_idx(labels_path).long()
    if labels is not None and labels.shape != images.shape[:1]:
        raise UserError(f"{labels_path}: {len(labels)} labels for {len(images)} images")
    kept = slice(None)
    if part == "train":
        cut = len(images) - min(HELD_OUT, len(images) // 6)  # at most a sixth, for small files
        kept = slice(cut) if split == "train" else slice(cut, None)
    return ImageSet(name, split, images[kept, None], None if labels is None else labels[kept])


def has_test_images(place: Path) -> bool:
    """Whether the images of the test split are present."""
    return find_idx(place, "t10k", "images") is not None


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: not a whole idx file ({what}): remove it and fetch it again")
