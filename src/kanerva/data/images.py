"""Pictures of your own: a folder tree as a data set, or files named on the command line.

Also what every set of picture files shares: a reader that trusts no file, several at a time, and
arrays that are packed once and memory-mapped from then on.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from tqdm import tqdm

from kanerva.data.cache import cache_dir
from kanerva.data.image_set import ImageSet
from kanerva.errors import UserError
from kanerva.shapes import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # whatever the name says: no EPS
MAX_PIXELS = 64_000_000  # a small file can claim a picture that fills the memory: refuse those
MAX_FILE = 4 * MAX_PIXELS  # bytes: what the largest picture takes uncompressed
MAX_SET = 32_000_000_000  # bytes of a split's pixels: twice ImageNet at 64 x 64
PACKED_FROM = 32_000_000  # bytes of a split's pixels: from here on a folder is kept packed
SMALL_FOLDER = 200  # up to here a tenth of the files may be none at all
SPLITS = ("train", "validation", "test")

Files = Sequence[tuple[str, Path]]  # what a file is called in messages, and where it is
Read = Callable[[Path], np.ndarray]  # the C x H x W bytes of one file


class Unreadable(Exception):
    """A file that Pillow cannot, or should not, turn into pixels. The message says why."""


# A folder tree


def load_folder(
    folder: Path, split: str, size: tuple[int, int] = (64, 64), channels: int = 3
) -> ImageSet:
    """One split of all pictures under a folder, by path, cropped about the centre and resized.

    Files are dealt 80/10/10 by a hash of their path, so one more file moves no other; in a small
    folder an empty split is lent a picture. Files that cannot be read are skipped and counted.
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
        found = packed_files("images", f"{split} {shape}", folder, files, read, shape)
        return ImageSet("images", split, torch.from_numpy(found.images))
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
    paths: Sequence[Path], image_shape: tuple[int, int, int], resize: bool = False
) -> Pixels:
    """The given files, and for a folder all images in it, as a model of this shape takes them."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        found = [file for _, file in image_files(path)] if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path}: holds no images ({', '.join(sorted(SUFFIXES))})")
        files += found
    if not files:
        raise UserError("no images given: name image files or a folder of them")
    check_size(paths[0], len(files), image_shape)
    channels, height, width = image_shape
    pictures: list[np.ndarray] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about files that it reads all the same
        for file in files:
            try:
                picture = open_picture(file, channels)
            except Unreadable as problem:
                raise UserError(f"{file}: {problem}") from problem
            if picture.size != (width, height) and not resize:
                found = f"{picture.width} x {picture.height}"
                raise UserError(f"{file}: {found} where {width} x {height} is needed: use --resize")
            pictures.append(fitted(picture, (height, width)))
    return torch.from_numpy(np.stack(pictures))


def image_files(folder: Path) -> list[tuple[str, Path]]:
    """All files under a folder that are named like images, by relative path; none hidden."""
    named: list[tuple[str, Path]] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = os.path.relpath(place, folder).replace(os.sep, "/")
        for name in files:
            like = os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")
            if like and os.path.isfile(os.path.join(place, name)):  # a pipe would never end
                named.append((name if inner == "." else f"{inner}/{name}", Path(place, name)))
    return sorted(named)


def split_of(name: str) -> str:
    """The split of a relative path: one file in ten to validation, one to test."""
    tenth = _hash(name) % 10
    return {0: "validation", 1: "test"}.get(tenth, "train")


# One picture


def open_picture(path: Path, channels: int) -> "Picture":
    """Grey or RGB. Transparency is laid on white, turned photographs are set upright.

    The header is asked first: a file or picture beyond the limits is refused before it is decoded.
    """
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise UserError(f"channels={channels}: images are read as 1 (grey) or 3 (colour)")
    try:
        if path.stat().st_size > MAX_FILE:
            raise Unreadable(f"{path.stat().st_size} bytes is too large a file")
        with Image.open(path, formats=FORMATS) as file:
            if file.width * file.height > MAX_PIXELS:
                raise Unreadable(f"{file.width} x {file.height} is too many pixels")
            return _flat(ImageOps.exif_transpose(file), "L" if channels == 1 else "RGB")
    except (Unreadable, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise Unreadable("too many pixels") from error
    except Exception as error:  # a broken file leads Pillow to errors of every kind
        raise Unreadable("not an image that Pillow reads") from error


def fitted(picture: "Picture", size: tuple[int, int]) -> np.ndarray:
    """C x H x W bytes, cropped about the centre and resized where the size is another."""
    from PIL import Image, ImageOps

    height, width = size
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return channels_first(picture)


def channels_first(picture: "Picture") -> np.ndarray:
    """C x H x W bytes."""
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()


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


# Many pictures


def read_files(
    files: Files, read: Read, title: str, problems: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and pixels of each file, in the order given, decoded by a few threads at once.

    What cannot be read is left out and entered in `problems`. A bar is shown on a terminal.
    """

    def attempt(file: tuple[str, Path]) -> np.ndarray | Unreadable:
        try:
            return read(file[1])
        except Unreadable as problem:
            return problem

    bar = tqdm(total=len(files), desc=title, unit="image", disable=None, delay=1, leave=False)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), 512):  # so that few wait in memory to be written
            some = files[start : start + 512]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, about files that it reads all the same
                found = list(pool.map(attempt, some))
            for (name, _), pixels in zip(some, found, strict=True):
                if isinstance(pixels, Unreadable):
                    problems[name] = str(pixels)
                else:
                    yield name, pixels
            bar.update(len(some))


def skipped(where: Path, problems: dict[str, str], count: int) -> str:
    """What was left out, in a line; an error when that is all there is."""
    if not problems:
        return ""
    first = next(f"{name}: {problem}" for name, problem in problems.items())
    if len(problems) == count:
        raise UserError(f"{where}: {count} of {count} files cannot be read, such as {first}")
    return f"{where}: skipped {len(problems)} of {count} files, such as {first}"


def check_size(where: Path, count: int, shape: tuple[int, int, int]) -> int:
    """The bytes that so many images take, or an error where that is more than any set needs."""
    channels, height, width = shape
    total = count * channels * height * width
    if total > MAX_SET:
        raise UserError(
            f"{where}: {count} images of {channels} x {height} x {width} are {total / 1e9:.1f} GB, "
            f"more than {MAX_SET / 1e9:.1f}: use fewer or smaller ones"
        )
    return total


def state_of(files: Sequence[Path | os.DirEntry[str]]) -> str:
    """What changes when files do: how many, how large, and the latest time of writing."""
    stats = [file.stat() for file in files]
    size, newest = sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)
    return f"{len(stats)} {size} {newest}"


# Packed: what took minutes to decode is one array from then on


@dataclass(frozen=True)
class Packed:
    """A split as it is kept. The images are memory-mapped: bytes are read when they are used."""

    images: np.ndarray
    labels: np.ndarray | None
    note: str  # what was left out; empty if nothing was


class Packing:
    """What a split is written to: its images in order, labels for all or none, a note."""

    def __init__(self, file: BinaryIO, shape: tuple[int, int, int]) -> None:
        self.count, self.note = 0, ""
        self.labels: list[np.ndarray] = []
        self._file, self._shape = file, shape
        self._header()

    def add(self, images: np.ndarray) -> None:
        """N x C x H x W bytes."""
        if images.dtype != np.uint8 or images.shape[1:] != self._shape:
            raise ValueError(f"{images.dtype} of shape {images.shape}, not of {self._shape}")
        self._file.write(np.ascontiguousarray(images).data)
        self.count += len(images)

    def finish(self) -> None:
        """Only now is the number of images known."""
        start = self._file.tell() - self.count * int(np.prod(self._shape))
        self._file.seek(0)
        self._header()
        if self._file.tell() != start:  # numpy leaves room for a first dimension of any length
            raise AssertionError("the header of a packed array has changed its length")

    def _header(self) -> None:
        shape = (self.count, *self._shape)
        about = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, about)


def packed_files(
    name: str, key: str, where: Path, files: Files, read: Read, shape: tuple[int, int, int]
) -> Packed:
    """Files as one packed array. What was skipped is said each time, not only when packing."""

    def fill(packing: Packing) -> None:
        problems: dict[str, str] = {}
        for _, pixels in read_files(files, read, name, problems):
            packing.add(pixels[None])
        packing.note = skipped(where, problems, len(files))

    check_size(where, len(files), shape)
    key = f"{where.resolve()} {state_of([path for _, path in files])} {key}"
    found = packed(name, key, len(files), shape, fill)
    if found.note:
        warnings.warn(found.note, stacklevel=3)
    return found


def packed(
    name: str,
    key: str,
    count: int,
    shape: tuple[int, int, int],
    fill: Callable[[Packing], None],
) -> Packed:
    """What `fill` writes, at most `count` images: from the cache if it did so under the same key.

    Written beside its place and moved there whole. Of several processes one writes, others wait.
    """
    place = cache_dir() / "built"
    short = hashlib.sha256(f"{key} {shape}".encode()).hexdigest()[:16]
    folder, draft = place / f"{name}-{short}", place / f".{name}-{short}.tmp"
    kept = _kept(folder, shape)
    if kept is not None:
        return kept
    need = count * int(np.prod(shape))
    advice = f"point $KANERVA_CACHE at a folder with room for {need / 1e9:.1f} GB"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _alone(place / f".{name}-{short}.lock"):
            kept = _kept(folder, shape)
            if kept is not None:
                return kept
            free = shutil.disk_usage(place).free
            if need > free:
                raise UserError(f"{place}: {free / 1e9:.1f} GB left for {name}: {advice}")
            shutil.rmtree(draft, ignore_errors=True)  # of one who was killed
            draft.mkdir()
            try:
                _pack(draft, shape, fill)
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
    """A packed split that is whole, or None. Mapped privately: nobody writes to it by mistake."""
    try:
        about = json.loads((folder / "about.json").read_text())
        images = np.load(folder / "images.npy", mmap_mode="c", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False) if about["labels"] else None
        sound = images.dtype == np.uint8 and images.shape == (about["images"], *shape)
        if labels is not None:
            sound &= labels.shape == (len(images),)
        return Packed(images, labels, str(about["note"])) if sound else None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is inside; a kill lets go."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Who goes where


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
