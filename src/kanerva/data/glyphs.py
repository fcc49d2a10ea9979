"""Characters of the DejaVu fonts that come with matplotlib: a data set without a download.

Thousands of characters of many scripts in up to twelve styles, 28 x 28 and grey, ink 255, as in
Omniglot and MNIST. A picture depends only on its character and style, and its split only on its
character: a newer font adds to the set without changing the splits. All `ours`.
"""

import hashlib
import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kanerva.data.cache import Arrays, cached_arrays
from kanerva.data.image_set import ImageSet
from kanerva.errors import UserError
from kanerva.seeding import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

RECIPE = 1  # raise this when a change below changes pictures
SIZE = 28
FINE = 4  # rendered at 112 x 112, then averaged down
EM = 34 * FINE  # the largest type: an x-height letter then spans 19 of the 28 pixels
EXTENT = (19.5, 22.5)  # pixels spanned by characters that are larger than that
PADDING = 2  # so that edges blend into paper
TURN, SHEAR, SHIFT = math.radians(7), 0.1, 1.5  # largest rotation, slant, shift
STYLES = (
    *("Sans", "Sans-Bold", "Sans-Oblique", "Sans-BoldOblique"),
    *("SansMono", "SansMono-Bold", "SansMono-Oblique", "SansMono-BoldOblique"),
    *("Serif", "Serif-Bold", "Serif-Italic", "Serif-BoldItalic"),
)


def load(split: str, place: Path) -> ImageSet:
    """Load one split; its characters are in no other. Labels are code points. The set is kept in
    the cache, not in `place`."""
    arrays = cached_arrays("glyphs", _recipe(), render_all)
    kept = arrays["split"] == split
    images = torch.from_numpy(arrays["images"][kept])[:, None]
    return ImageSet("glyphs", split, images, torch.from_numpy(arrays["code_points"][kept]))


def is_present(place: Path) -> bool:
    """Always true: the set is rendered on first use."""
    return True


def fetch(place: Path) -> list[Path]:
    """Render the set now instead of on first use. Nothing is downloaded."""
    load("train", place)
    return []


def split_of(code_point: int) -> str:
    """Eight characters in ten are for training, one for validation and one for test."""
    tenth = derive_seed("glyphs", "split", code_point) % 10
    return {0: "validation", 1: "test"}.get(tenth, "train")


def render_all() -> Arrays:
    """Render every character in every style that has it, sorted by code point, then style.

    If any style draws a character exactly like an earlier one (Greek Alpha and A), the character is
    left out in all styles: otherwise the same shape could be in both training and test. A style
    that draws a character exactly like an earlier style is skipped for that character.
    """
    from tqdm import tqdm

    pictures: dict[tuple[int, int], np.ndarray] = {}
    first: dict[bytes, int] = {}  # the lowest code point of each shape
    doubles: set[int] = set()
    work = [(style, code) for style in range(len(STYLES)) for code in _code_points(style)]
    bar = tqdm(work, "drawing glyphs", unit="img", delay=2, leave=False, disable=None)
    for (style, code), ink in zip(bar, _inks(work), strict=True):
        if ink is None:
            continue
        shape = hashlib.sha256(repr(ink.size).encode() + ink.tobytes()).digest()
        if first.get(shape) == code:
            continue
        if shape in first:
            doubles.add(max(code, first[shape]))
        first[shape] = min(code, first.get(shape, code))
        pictures[code, style] = draw(ink, code, STYLES[style])
    kept = sorted(place for place in pictures if place[0] not in doubles)
    codes = np.array([code for code, _ in kept], np.int64)
    return {
        "images": np.stack([pictures[place] for place in kept]),
        "code_points": codes,
        "styles": np.array([style for _, style in kept], np.int64),
        "split": np.array([split_of(code) for code, _ in kept]),
    }


def draw(ink: "Picture", code: int, style: str) -> np.ndarray:
    """Draw a character in the middle of its frame, slightly rotated, slanted, scaled and shifted.

    Large characters are scaled to fit and small ones keep their size, so a full stop stays a dot.
    The corners of the ink's box always stay inside the frame: nothing is cut off.
    """
    from PIL import Image

    random = np.random.default_rng(derive_seed("glyphs", "jitter", code, style))
    turn, shear = random.uniform(-TURN, TURN), random.uniform(-SHEAR, SHEAR)
    shift = random.uniform(-SHIFT, SHIFT, size=2) * FINE
    extent, relative = random.uniform(*EXTENT) * FINE, random.uniform(0.87, 1.0)
    turned = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    warp = turned @ np.array([[1.0, shear], [0.0, 1.0]])
    box = np.array(ink.size, float)
    warp = warp * min(relative, extent / (np.abs(warp) @ box).max())
    # Pillow needs the inverse map: where each pixel of the frame comes from. Centre maps to centre.
    back = np.linalg.inv(warp)
    offset = box / 2 + PADDING - back @ (np.full(2, SIZE * FINE / 2) + shift)
    padded = Image.new("L", (ink.width + 2 * PADDING, ink.height + 2 * PADDING))
    padded.paste(ink, (PADDING, PADDING))
    affine = (*back[0], offset[0], *back[1], offset[1])
    frame = padded.transform(
        (SIZE * FINE, SIZE * FINE), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR
    )
    return np.asarray(frame.reduce(FINE))


def _inks(work: list[tuple[int, int]]) -> "Iterator[Picture | None]":
    """Render each character at full size, cropped to its ink; None if it has no ink."""
    from PIL import Image, ImageDraw, ImageFont

    basic = ImageFont.Layout.BASIC  # the other engine is not in every build of Pillow
    fonts = [ImageFont.truetype(_font_path(style), EM, layout_engine=basic) for style in STYLES]
    for style, code in work:
        left, top, right, bottom = map(int, fonts[style].getbbox(chr(code)))
        ink = Image.new("L", (max(right - left, 1), max(bottom - top, 1)))
        ImageDraw.Draw(ink).text((-left, -top), chr(code), fill=255, font=fonts[style])
        box = ink.getbbox()
        yield None if box is None else ink.crop(box)


def _code_points(style: int) -> list[int]:
    """The font's characters, without spaces, controls, private use and combining marks."""
    from matplotlib.ft2font import FT2Font

    mapped = FT2Font(_font_path(STYLES[style])).get_charmap()
    return sorted(code for code in mapped if unicodedata.category(chr(code))[0] not in "CMZ")


def _font_path(style: str) -> str:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"DejaVu{style}.ttf"
    if not path.is_file():
        raise UserError(f"glyphs need matplotlib's fonts; {path} is missing: reinstall matplotlib")
    return str(path)


def _recipe() -> str:
    """A cache key of all that pictures depend on: RECIPE, the fonts, and FreeType."""
    from PIL import features

    sizes = [Path(_font_path(style)).stat().st_size for style in STYLES]
    return f"{RECIPE} {sizes} freetype {features.version('freetype2')}"
