"""Image files: open one without trusting it, or many in parallel."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from kanerva.errors import UserError
from kanerva.plain_files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # whatever the file's name; no EPS
MAX_PIXELS = 64_000_000  # a small file can decode to a picture that fills the memory
MAX_SIDE = 65_535
MAX_FILE = 4 * MAX_PIXELS  # bytes: the largest picture, uncompressed
MAX_SET = 32_000_000_000  # bytes of a split's pixels: twice ImageNet at 64 x 64

_LARGE = threading.Lock()  # only one thread at a time decodes a large picture

Files = Sequence[tuple[str, Path]]  # a file's name in messages, and its path
Read = Callable[[Path], np.ndarray]  # the C x H x W bytes of one file


class Unreadable(Exception):
    """A file that Pillow cannot, or should not, turn into pixels. The message says why."""


# One picture


def open_picture(
    source: Path | bytes, channels: int, formats: tuple[str, ...] = FORMATS, most: int | None = None
) -> "Picture":
    """Open a picture as grey or RGB, transparency on white, rotated as its EXIF data says.

    The header is read first: a file or picture beyond the limits is refused before it is decoded.
    """
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise UserError(f"channels={channels}: images are read as 1 (grey) or 3 (colour)")
    try:
        with BytesIO(source) if isinstance(source, bytes) else open_regular(source) as stream:
            if (size := stream.seek(0, os.SEEK_END)) > MAX_FILE:
                raise Unreadable(f"{size} bytes is too large a file")
            stream.seek(0)
            with Image.open(stream, formats=formats) as file:
                pixels = file.width * file.height
                if pixels > (most or MAX_PIXELS) or max(file.size) > MAX_SIDE:
                    raise Unreadable(f"{file.width} x {file.height} is too many pixels")
                with _LARGE if pixels > 4_000_000 else nullcontext():
                    ImageOps.exif_transpose(file, in_place=True)
                    return flat(file, "L" if channels == 1 else "RGB")
    except (Unreadable, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise Unreadable("too many pixels") from error
    except Exception as error:  # Pillow raises errors of many kinds on broken files
        raise Unreadable("not an image that Pillow reads") from error


def fitted(picture: "Picture", size: tuple[int, int]) -> np.ndarray:
    """Convert to C x H x W bytes, centre-cropped and resized if the size differs."""
    from PIL import Image, ImageOps

    height, width = size
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return channels_first(picture)


def channels_first(picture: "Picture") -> np.ndarray:
    """Convert to C x H x W bytes."""
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()


def _scale_to_bytes(picture: "Picture") -> float:
    """The factor that makes levels of 16 or 32 bits, or floats, bytes."""
    if picture.mode not in "IF":  # 16 bits
        return 1 / 256
    most = np.max(picture.getextrema())
    if picture.mode == "F" and most <= 1:
        return 255.0
    return 1 / 256 if most > 255 else 1.0


def flat(picture: "Picture", mode: str) -> "Picture":
    """Convert to grey (L) or RGB. 16-bit grey keeps its upper byte; floats up to 1 are scaled;
    transparency becomes white."""
    from PIL import Image

    grey = picture.mode[0] in "IF"  # Pillow would clip these to 255, not scale them
    if not grey and not picture.has_transparency_data:
        return picture.convert(mode)
    scale = _scale_to_bytes(picture) if grey else 1
    flat = Image.new(mode, picture.size)
    for top in range(0, picture.height, 256):  # a few rows at a time, to save memory
        band = picture.crop((0, top, picture.width, min(top + 256, picture.height)))
        if grey:
            values = np.floor(scale * np.nan_to_num(np.asarray(band, dtype=np.float64)))
            band = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        else:
            paper = Image.new("RGBA", band.size, "white")
            band = Image.alpha_composite(paper, band.convert("RGBA"))
        flat.paste(band.convert(mode), (0, top))
    return flat


# Many pictures


def image_files(folder: Path) -> list[tuple[str, Path]]:
    """All files under a folder with an image's ending, by relative path, without hidden ones."""
    named: list[tuple[str, Path]] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = os.path.relpath(place, folder).replace(os.sep, "/")
        for name in files:
            like = os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")
            if like and os.path.isfile(os.path.join(place, name)):  # a pipe would never end
                named.append((name if inner == "." else f"{inner}/{name}", Path(place, name)))
    return sorted(named)


def read_files(
    files: Files, read: Read, title: str, problems: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and pixels of each file, in the given order, decoded by a few threads.

    Unreadable files are left out and added to `problems`. Shows a progress bar on a terminal.
    """

    def attempt(file: tuple[str, Path]) -> np.ndarray | Unreadable:
        try:
            return read(file[1])
        except Unreadable as problem:
            return problem

    bar = tqdm(total=len(files), desc=title, unit="image", disable=None, delay=1, leave=False)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), 512):  # so that few are in memory at once
            part = files[start : start + 512]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about files that it can read
                decoded = list(pool.map(attempt, part))
            for (name, _), pixels in zip(part, decoded, strict=True):
                if isinstance(pixels, Unreadable):
                    problems[name] = str(pixels)
                else:
                    yield name, pixels
            bar.update(len(part))


def skipped(where: Path, problems: dict[str, str], count: int) -> str:
    """A line about files that were left out, or ""; an error if that is all of them."""
    if not problems:
        return ""
    first = next(f"{name}: {problem}" for name, problem in problems.items())
    if len(problems) == count:
        raise UserError(f"{where}: {count} of {count} files cannot be read, such as {first}")
    return f"{where}: skipped {len(problems)} of {count} files, such as {first}"


def check_size(where: Path, count: int, shape: tuple[int, int, int]) -> int:
    """Return the bytes that `count` images take; refuse more than MAX_SET."""
    channels, height, width = shape
    total = count * channels * height * width
    if total > MAX_SET:
        raise UserError(
            f"{where}: {count} images of {channels} x {height} x {width} are {total / 1e9:.1f} GB, "
            f"more than {MAX_SET / 1e9:.1f}: use fewer or smaller ones"
        )
    return total
