"""ImageNet made small, 32 x 32 or 64 x 64 (Chrabaszcz et al. 2017).

Read from the published npz files (`train_data_batch_1.npz` and so on, `val_data.npz`) or from
folders of images, such as the PNGs of van den Oord et al. (2016) or Tiny ImageNet. These were made
small in different ways: a figure on one says nothing of another.

Test is the official validation set, as is usual. Validation is a fixed draw of 10,000 training
images. The published pickles can run code when they are opened, so they are not.
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
HELD_OUT = 10_000  # training images that are kept for validation; a tenth where there are few
MAX_IMAGES = 2_000_000  # ImageNet has 1,281,167: a file that claims far more is not of it
CHUNK = 4096  # images that are read at once
BATCH = re.compile(r"train_data_batch_(\d+)\.npz")


def find_imagenet(name: str, part: str, place: Path) -> list[Path]:
    """The official `train` or `val`: npz files in `place` or a folder in it, in their order; else
    one folder of images; else nothing."""
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
    """One split, or None where the set is not there. Labels are as stored, where they are."""
    size = SIZES[name]
    part = "val" if split == "test" else "train"
    source = find_imagenet(name, part, place)
    if not source:
        pickles = [*place.glob("train_data_batch_1"), *place.glob("val_data")]
        if pickles:
            raise UserError(f"{pickles[0]}: a pickle, which is never opened here: use the npz form")
        if find_imagenet(name, "train" if part == "val" else "val", place):
            file = "val_data.npz" if part == "val" else "train_data_batch_1.npz"
            raise UserError(f"{place}: neither {file} nor a folder {part}/ is there")
        return None
    if source[0].is_dir():
        found = _folder(name, split, source[0], size)
    else:
        found = _npz(name, split, source, size)
    labels = None if found.labels is None else torch.from_numpy(found.labels)
    return ImageSet(name, split, torch.from_numpy(found.images), labels)


def has_test_images(name: str, place: Path) -> bool:
    """Whether the official validation set, which is test here, is there."""
    return bool(find_imagenet(name, "val", place))


def in_split(name: str, split: str, count: int) -> np.ndarray:
    """Which images of a part are in a split: all of val in test, most of train in train."""
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
    """All images under a folder. Those of another size are squeezed into the square, as in the npz
    files: Pillow's box filter, no crop."""
    found = image_files(folder)
    if not found:
        raise UserError(f"{folder}: holds no images")

    def read(path: Path) -> np.ndarray:
        from PIL import Image

        picture = open_picture(path, channels=3)
        if picture.size != (size, size):
            picture = picture.resize((size, size), Image.Resampling.BOX)
        return channels_first(picture)

    chosen = in_split(name, split, len(found))
    files = [file for file, kept in zip(found, chosen, strict=True) if kept]
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
    """How many images a file says it holds, after a look at the header of `data` alone."""
    with _array(path, "data") as (_, shape, dtype):
        known = ((3 * size * size,), (3, size, size))
        if dtype != np.uint8 or shape[1:] not in known or shape[0] < 1:
            raise ValueError(
                f"data is {dtype} of shape {shape}, not uint8 of (N, {3 * size * size})"
            )
        return shape[0]


def _images(path: Path, count: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """The images of a file in order, some at a time, each time with the position of the first."""
    one = 3 * size * size
    with _array(path, "data") as (member, _, _):
        for first in range(0, count, CHUNK):
            some = min(CHUNK, count - first)
            raw = read_exactly(member, some * one)
            yield first, np.frombuffer(raw, np.uint8).reshape(some, 3, size, size)
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
