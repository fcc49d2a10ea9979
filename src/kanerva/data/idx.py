"""Idx files, as the authors of MNIST and Fashion-MNIST publish them.

An idx file is two zero bytes, a type byte (8: unsigned byte), the number of dimensions, each
dimension as a big-endian 32-bit number, and then the values.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from kanerva.data.image_set import ImageSet
from kanerva.errors import UserError

HELD_OUT = 10_000  # the last images of the training file are the validation set


def read_idx(path: Path) -> UInt8[Tensor, "..."]:
    """The values of an idx file of unsigned bytes, of any shape, gzipped or plain."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise _damaged(path, f"it begins with {raw[:4].hex(' ') or 'nothing'}")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise _damaged(path, f"{len(raw)} bytes")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist()
    if len(raw) - start != math.prod(shape):
        raise _damaged(path, f"{len(raw) - start} values for shape {tuple(shape)}")
    values = np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())


def find_idx(folder: Path, part: str, kind: str) -> Path | None:
    """The file of a part (train, t10k) and kind (images, labels), under any of its usual names."""
    dims = {"images": 3, "labels": 1}[kind]
    for joint in ("-", "."):
        for suffix in ("", ".gz"):
            path = folder / f"{part}-{kind}{joint}idx{dims}-ubyte{suffix}"
            if path.is_file():
                return path
    return None


def load_idx_set(name: str, split: str, place: Path) -> ImageSet | None:
    """One split of the set in `place`, or None where its images are not there.

    The training file is cut in two: all but the last 10,000 to train on, those to validate with.
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
        cut = len(images) - min(HELD_OUT, len(images) // 6)  # a sixth, when the file is a small one
        kept = slice(cut) if split == "train" else slice(cut, None)
    return ImageSet(name, split, images[kept, None], None if labels is None else labels[kept])


def has_test_images(place: Path) -> bool:
    """Whether the images of the test split are there."""
    return find_idx(place, "t10k", "images") is not None


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: not a whole idx file ({what}): remove it and fetch it again")
