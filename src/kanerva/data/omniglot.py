"""Omniglot (Lake et al. 2015): 1,623 handwritten characters, each drawn by 20 people.

Read from the published zips, from those zips unpacked, or from arrays in an npz. Drawings are
sorted by their published number, as in 0709_01.png: character 709 of 1,623, drawer 1. The numbers
do not follow the names of the folders, so sorting by folder would give another order.
"""

import re
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from kanerva.data.array_files import damage_named, read_npz
from kanerva.data.cache import Arrays, cached_arrays
from kanerva.data.download import published
from kanerva.data.image_set import ImageSet
from kanerva.data.packing import state_of
from kanerva.data.picture_files import open_picture
from kanerva.errors import UserError
from kanerva.plain_files import open_regular
from kanerva.seeding import stream
from kanerva.shapes import Labels

SIZE = 28
MOST = 2**28  # bytes of the drawings of a part; the published ones have 212 million
MOST_DRAWINGS = 100_000  # of a part; published: 19,280
MOST_PIXELS = 2**20  # of a drawing; published: 11,025
HELD_OUT = 2_000  # drawings of the background set that are kept for validation
BACKGROUND_CHARACTERS = 964  # so the evaluation set's first label is 964
ALPHABETS = {  # of the evaluation set, sorted by their characters' numbers
    "Angelic": 20, "Atemayar_Qelisayer": 26, "Atlantean": 26, "Aurek-Besh": 26, "Avesta": 26,
    "Ge_ez": 26, "Glagolitic": 45, "Gurmukhi": 45, "Kannada": 41, "Keble": 26, "Malayalam": 47,
    "Manipuri": 40, "Mongolian": 30, "Old_Church_Slavonic_(Cyrillic)": 45, "Oriya": 46,
    "Syriac_(Serto)": 23, "Sylheti": 28, "Tengwar": 25, "Tibetan": 42, "ULOG": 26,
}  # fmt: skip
DRAWING = re.compile(r"(?:^|/)(\d{4})_(\d{2})\.png$")  # character, drawer
FILES = published(
    "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
    {
        "images_background.zip": ("68d2efa1b9178cc56df9314c21c6e718", 9_464_212),
        "images_evaluation.zip": ("6b91aef0f799c5bb55b94e3f2daec811", 6_462_886),
    },
)


def find_part(place: Path, part: str) -> Path | None:
    """Find `images_background` or `images_evaluation`: npz, zip or unpacked, in that order."""
    for path in (place / f"images_{part}.npz", place / f"images_{part}.zip"):
        if path.is_file():
            return path
    path = place / f"images_{part}"
    return path if path.is_dir() else None


def load(split: str, place: Path) -> ImageSet | None:
    """Load one split at 28 x 28, ink 255; None if it is missing. A label is a character.

    The test set's alphabets do not occur in training; the characters of validation do.
    """
    part = "evaluation" if split == "test" else "background"
    source = find_part(place, part)
    if source is None:
        return None
    arrays = cached_arrays(f"omniglot-{part}", _state(source), lambda: _read(source, part))
    images, labels = torch.from_numpy(arrays["images"])[:, None], torch.from_numpy(arrays["labels"])
    if split != "test":
        held_out = min(HELD_OUT, len(images) // 5)
        order = torch.randperm(len(images), generator=stream("omniglot", "validation"))
        validation = torch.zeros(len(images), dtype=torch.bool)
        validation[order[:held_out]] = True
        kept = validation if split == "validation" else ~validation
        images, labels = images[kept], labels[kept]
    return ImageSet("omniglot", split, images, labels)


def alphabets_of(labels: Labels) -> Labels:
    """The alphabet of the evaluation set that each character belongs to."""
    ends = BACKGROUND_CHARACTERS + torch.tensor(list(ALPHABETS.values())).cumsum(0)
    if not BACKGROUND_CHARACTERS <= int(labels.min()) <= int(labels.max()) < int(ends[-1]):
        raise ValueError("these are not all characters of the evaluation set")
    return torch.searchsorted(ends, labels.cpu(), right=True)


def is_present(place: Path) -> bool:
    return find_part(place, "evaluation") is not None


def resize_ink(ink: np.ndarray) -> np.ndarray:
    """Resize a drawing to 28 x 28 with Pillow's bilinear filter, which averages when shrinking."""
    from PIL import Image

    small = Image.fromarray(ink).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(small)


def _state(source: Path) -> str:
    """A cache key that changes with the source: its name, sizes and modification times."""
    files = sorted(source.rglob("*.png")) if source.is_dir() else [source]
    return f"{source.resolve()} {state_of(files)} {SIZE}"


def _read(source: Path, part: str) -> Arrays:
    drawings = _npz(source, part) if source.suffix == ".npz" else _pngs(source)
    with damage_named(source, "readable as Omniglot", ": remove it and fetch it again"):
        labels, images = zip(*((label, resize_ink(ink)) for label, ink in drawings), strict=True)
    return {"images": np.stack(images), "labels": np.array(labels, np.int64)}


def _npz(source: Path, part: str) -> Iterator[tuple[int, np.ndarray]]:
    """Drawings from an npz: characters x drawers x height x width, True for paper."""
    paper = read_npz(source, "images", MOST)
    if paper.dtype != np.bool_ or paper.ndim != 4:
        raise ValueError(
            f"images are {paper.dtype} of shape {paper.shape}, not bool, 4-dimensional"
        )
    first = 0 if part == "background" else BACKGROUND_CHARACTERS
    for character, drawings in enumerate(paper):
        for drawing in drawings:
            yield first + character, np.where(drawing, 0, 255).astype(np.uint8)


def _pngs(source: Path) -> Iterator[tuple[int, np.ndarray]]:
    """Every NNNN_DD.png of a zip or a folder, sorted by number. Ink is black on white there."""
    with zipfile.ZipFile(source) if source.is_file() else nullcontext() as archive:
        pngs = archive.namelist() if archive else map(Path.as_posix, source.rglob("*.png"))
        named = [(match, name) for name in pngs if (match := DRAWING.search(name))]
        if not 0 < len(named) <= MOST_DRAWINGS:
            raise UserError(f"{source}: holds {len(named) or 'no'} drawings named like 0709_01.png")
        for match, name in sorted(named, key=lambda pair: pair[0].groups()):
            with archive.open(name) if archive else open_regular(Path(name)) as file:
                raw = file.read(MOST_PIXELS)
            picture = open_picture(raw, channels=1, formats=("PNG",), most=MOST_PIXELS)
            yield int(match[1]) - 1, 255 - np.asarray(picture)
