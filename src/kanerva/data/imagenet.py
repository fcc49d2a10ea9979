"""Downsampled ImageNet, 32 x 32 or 64 x 64 (Chrabaszcz et al. 2017).

Read from the published npz files (`train_data_batch_1.npz` and so on, `val_data.npz`) or from
folders of images, such as the PNGs of van den Oord et al. (2016) or Tiny ImageNet. These were
downsampled in different ways: their results are not comparable.

Test is the official validation set, as is usual. Validation is a fixed random sample of 10,000
training images. The published pickles are never opened, because that can run code.
"""

import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from kanerva.data.array_files import (
    Stream,
    damage_named,
    open_array,
    read_exactly,
    require_end,
)
from kanerva.data.image_set import ImageSet
from kanerva.data.packing import Packed, Packing, packed, packed_files, state_of
from kanerva.data.picture_files import channels_first, image_files, open_picture
from kanerva.errors import UserError
from kanerva.plain_files import open_regular
from kanerva.seeding import stream

SIZES = {"imagenet32": 32, "imagenet64": 64}
HELD_OUT = 10_000  # training images that are kept for validation; at most a tenth
MAX_IMAGES = 2_000_000  # ImageNet has 1,281,167: a file with far more is something else
CHUNK = 4096  # images that are read at once
BATCH = re.compile(r"train_data_batch_(\d+)\.npz")


def find_imagenet(name: str, part: str, place: Path) -> list[Path]:
    """Find the official `train` or `val`: npz files in `place` or in a folder there, in order; else
    one folder of images; else an empty list."""
    size = SIZES[name]
    found = [*place.glob("*.npz"), *place.glob("*/*.npz")]
    if part == "val":
        npz = [path for path in found if path.name == "val_data.npz"][:1]
    else:
        numbered = {int(m[1]): path for path in found if (m := BATCH.fullmatch(path.name))}
        npz = [numbered[number] for number in sorted(numbered)]
        absent = [number for number in range(1, max(numbered, default=0)) if number not in numbered]
        if absent:
            raise UserError(f"{place}: train_data_batch_{absent[0]}.npz is not there")
    if npz:
        return npz
    folders = ("train", f"train_{size}x{size}")
    if part == "val":
        folders = ("val", "valid", f"valid_{size}x{size}")
    return [place / folder for folder in folders if (place / folder).is_dir()][:1]


def load_imagenet(name: str, split: str, place: Path) -> ImageSet | None:
    """Load one split; None if the set is missing. Labels are as stored, if any."""
    size = SIZES[name]
    part = "val" if split == "test" else "train"
    source = find_imagenet(name, part, place)
    if not source:
        pickles = [*place.glob("train_data_batch_1"), *place.glob("val_data")]
        if pickles:
            raise UserError(f"{pickles[0]}: pickles are never opened: use the npz files")
        if find_imagenet(name, "train" if part == "val" else "val", place):
            file = "val_data.npz" if part == "val" else "train_data_batch_1.npz"
            raise UserError(f"{place}: neither {file} nor a folder {part}/ is there")
        return None
    if source[0].is_dir():
        packed = _folder(name, split, source[0], size)
    else:
        packed = _npz(name, split, source, size)
    labels = None if packed.labels is None else torch.from_numpy(packed.labels)
    return ImageSet(name, split, torch.from_numpy(packed.images), labels)


def has_test_images(name: str, place: Path) -> bool:
    """Whether the official validation set is present; it is the test split here."""
    return bool(find_imagenet(name, "val", place))


def in_split(name: str, split: str, count: int) -> np.ndarray:
    """Which images of a part are in a split. All of val are test; train is split in two."""
    if split == "test":
        return np.ones(count, bool)
    if count < 2:
        raise UserError(f"{name}: {count} training images leave none for validation")
    held_out = max(1, min(HELD_OUT, count // 10))
    order = torch.randperm(count, generator=stream(name, "validation")).numpy()
    validation = np.zeros(count, bool)
    validation[order[:held_out]] = True
    return validation if split == "validation" else ~validation


# A folder of images


def _folder(name: str, split: str, folder: Path, size: int) -> Packed:
    """Load all images under a folder. Those of another size are resized to the square without a
    crop, by Pillow's box filter, as in the npz files."""
    every = image_files(folder)
    if not every:
        raise UserError(f"{folder}: holds no images")

    def read(path: Path) -> np.ndarray:
        from PIL import Image

        picture = open_picture(path, channels=3)
        if picture.size != (size, size):
            picture = picture.resize((size, size), Image.Resampling.BOX)
        return channels_first(picture)

    chosen = in_split(name, split, len(every))
    files = [file for file, kept in zip(every, chosen, strict=True) if kept]
    return packed_files(f"{name}-{split}", split, folder, files, read, (3, size, size))


# The npz files: read a few thousand images at a time, never unpickled


def _npz(name: str, split: str, files: Sequence[Path], size: int) -> Packed:
    counts = [_count(path, size) for path in files]
    total = sum(counts)
    if total > MAX_IMAGES:
        raise UserError(f"{files[0].parent}: claims {total} images, more than {MAX_IMAGES}")
    chosen = in_split(name, split, total)
    labelled = all(_has_labels(path) for path in files)

    def fill(packing: Packing) -> None:
        bar = tqdm(total=total, desc=name, unit="image", disable=None, delay=1, leave=False)
        start = 0
        with bar:
            for path, count in zip(files, counts, strict=True):
                kept = chosen[start : start + count]
                for first, images in _images(path, count, size):
                    packing.add(images[kept[first : first + len(images)]])
                    bar.update(len(images))
                if labelled:
                    packing.labels.append(_labels(path, count)[kept])
                start += count

    places = " ".join(str(path.resolve()) for path in files)
    key = f"{places} {state_of(files)} {labelled}"
    return packed(f"{name}-{split}", key, int(chosen.sum()), (3, size, size), fill)


def _count(path: Path, size: int) -> int:
    """The number of images in a file, from the header of `data` alone."""
    with _array(path, "data") as (_, shape, dtype):
        known = ((3 * size * size,), (3, size, size))
        if dtype != np.uint8 or shape[1:] not in known or shape[0] < 1:
            raise ValueError(
                f"data is {dtype} of shape {shape}, not uint8 of (N, {3 * size * size})"
            )
        return shape[0]


def _images(path: Path, count: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the images of a file in order, in chunks, each with the position of its first image."""
    image_bytes = 3 * size * size
    with _array(path, "data") as (member, _, _):
        for first in range(0, count, CHUNK):
            chunk = min(CHUNK, count - first)
            raw = read_exactly(member, chunk * image_bytes)
            yield first, np.frombuffer(raw, np.uint8).reshape(chunk, 3, size, size)
        require_end(member)


def _labels(path: Path, count: int) -> np.ndarray:
    with _array(path, "labels") as (member, shape, dtype):
        if dtype.kind not in "iu" or shape != (count,):
            raise ValueError(
                f"labels are {dtype} of shape {shape}, not whole numbers of ({count},)"
            )
        labels = np.frombuffer(read_exactly(member, count * dtype.itemsize), dtype)
        require_end(member)
        return labels.astype(np.int64)


def _has_labels(path: Path) -> bool:
    with damage_named(path, "readable as downsampled ImageNet"), open_regular(path) as file:
        return "labels.npy" in zipfile.ZipFile(file).namelist()


@contextmanager
def _array(path: Path, name: str) -> Iterator[tuple[Stream, tuple[int, ...], np.dtype]]:
    with damage_named(path, "readable as downsampled ImageNet"), open_array(path, name) as found:
        yield found
