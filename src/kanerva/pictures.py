"""Grids of images with labelled rows, and how they are saved."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from kanerva.errors import UserError
from kanerva.plain_files import reason, write_whole

_FRAME, _PAPER, _RULE, _INK = 2, (255, 255, 255), (208, 208, 208), (40, 40, 40)
Pictures = Float[Tensor, "_ C H W"]
Shown = Shaped[Tensor, "..."] | np.ndarray | Sequence  # one image, images, or steps of them

MODEL_COLOURS = {  # a model has the same colour in every picture
    "kpp": "#1b6ca8",
    "kpp-bits": "#103a5c",
    "kpp-paper": "#e07b00",
    "no-memory": "#6a6a6a",
    "vae": "#a03070",
    "dkm": "#2c8a4b",
    "dkm-tsm": "#8fbf3f",
}


def tile(images: Pictures, columns: int, scale: int = 2) -> Image.Image:
    """Images on [0, 1] in rows of `columns`, left to right, top to bottom, each in a thin frame."""
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    if pixels.shape[1] == 1:
        pixels = pixels.expand(-1, 3, -1, -1)
    count, _, height, width = pixels.shape
    rows = -(-count // columns)
    size = (columns * (width + _FRAME) + _FRAME, rows * (height + _FRAME) + _FRAME)
    canvas = Image.new("RGB", size, _PAPER)
    frame = Image.new("RGB", (width + 2 * _FRAME, height + 2 * _FRAME), _RULE)
    for index, image in enumerate(pixels):
        row, column = divmod(index, columns)
        left, top = column * (width + _FRAME), row * (height + _FRAME)
        canvas.paste(frame, (left, top))
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        canvas.paste(picture, (left + _FRAME, top + _FRAME))
    return canvas.resize((size[0] * scale, size[1] * scale), Image.Resampling.NEAREST)


def sheet(parts: list[tuple[str, Pictures]], columns: int, scale: int = 2) -> Image.Image:
    """One tile for each (label, images), stacked, each label above its tile and never cut off."""
    font = ImageFont.load_default(size=13)
    tiles = [(label, tile(images, columns, scale)) for label, images in parts]
    labels = [font.getbbox(label) for label, _ in tiles]
    margin, line = 10, 20
    width = max([t.width for _, t in tiles] + [int(box[2]) for box in labels]) + 2 * margin
    height = sum(t.height + line + margin for _, t in tiles) + margin
    canvas = Image.new("RGB", (width, height), _PAPER)
    draw, top = ImageDraw.Draw(canvas), margin
    for label, picture in tiles:
        draw.text((margin, top), label, fill=_INK, font=font)
        canvas.paste(picture, (margin, top + line))
        top += picture.height + line + margin
    return canvas


def show(
    images: Shown | Mapping[str, Shown] | None = None,
    *,
    columns: int | None = None,
    scale: int = 2,
    **rows: Shown,
) -> Image.Image:
    """Return images on [0, 1] as one picture, which a notebook displays.

    Call `show(images)`, or label the rows: `show(written=images, recalled=recalled[-1])`. Each
    value is an image (C, H, W), images (T, C, H, W), or steps of recall (S, T, C, H, W), one row
    per step.
    """
    named = dict(images) if isinstance(images, Mapping) else {} if images is None else {"": images}
    parts: list[tuple[str, Pictures]] = []
    for name, value in (named | rows).items():
        try:
            if isinstance(value, list | tuple):
                value = torch.stack([torch.as_tensor(image) for image in value])
            tensor = (
                torch.tensor(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)
            )
        except (TypeError, ValueError, RuntimeError):
            kind = type(value).__name__
            raise UserError(f"show takes tensors or arrays of images, got {kind}") from None
        if tensor.ndim not in (3, 4, 5) or tensor.shape[-3] not in (1, 3) or 0 in tensor.shape:
            raise UserError(
                f"show takes images (C, H, W), (T, C, H, W) or (S, T, C, H, W), grey or in "
                f"colour; got {tuple(tensor.shape)}"
            )
        steps = list(tensor) if tensor.ndim == 5 else [tensor.reshape(-1, *tensor.shape[-3:])]
        labels = [f"{name} step {n + 1}".strip() for n in range(len(steps))]
        parts += zip(labels if len(steps) > 1 else [name], steps, strict=True)
    if not parts:
        raise UserError("nothing to show: give images, or rows by name")
    return sheet(parts, columns or min(16, max(len(row) for _, row in parts)), scale)


def stacked(pictures: list[Image.Image]) -> Image.Image:
    """Pictures below one another."""
    size = (max(p.width for p in pictures), sum(p.height for p in pictures))
    canvas, top = Image.new("RGB", size, _PAPER), 0
    for picture in pictures:
        canvas.paste(picture, (0, top))
        top += picture.height
    return canvas


def write_picture(picture: Any, path: Path) -> None:
    """Write a Pillow image or a matplotlib figure atomically, in the format of the path's ending.

    `picture` is not annotated because matplotlib takes long to import.
    """
    buffer = io.BytesIO()
    try:
        kind = Image.registered_extensions()[path.suffix.lower()]
        if isinstance(picture, Image.Image):
            picture.save(buffer, format=kind)
        else:
            picture.savefig(buffer, format=kind, dpi=110)
    except KeyError as error:
        raise UserError(f"cannot write {path}: unknown kind of picture; name it .png") from error
    except (OSError, ValueError) as error:  # Pillow: this format cannot hold such pixels
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    write_whole(path, buffer.getvalue())


def map_with_thumbnails(
    memory: Image.Image,
    places: Float[Tensor, "n 2"],
    images: Pictures,
    handles: list[int],
    *,
    cells: tuple[int, int] | None = None,
    title: str = "the map",
    side: int = 640,
) -> Image.Image:
    """Draw a memory's map with its grid of `cells` (rows, columns). Beside it, draw each image at
    its place (x, y) on [-1, 1], with its handle."""
    margin, line = 10, 20
    canvas = Image.new("RGB", (2 * side + 3 * margin, side + line + 2 * margin), _PAPER)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=13)
    top, left = margin + line, 2 * margin + side
    draw.text((margin, margin), title, fill=_INK, font=font)
    draw.text((left, margin), "stored images and their handles", fill=_INK, font=font)
    canvas.paste(memory.resize((side, side), Image.Resampling.NEAREST), (margin, top))
    draw.rectangle((left, top, left + side - 1, top + side - 1), fill=(245, 245, 245))
    for axis, count in enumerate(cells or (1, 1)):
        for number in range(1, count):
            at = round(number * side / count)
            for start in (margin, left):
                ends = (start, top + at, start + side - 1, top + at)
                if axis == 1:
                    ends = (start + at, top, start + at, top + side - 1)
                draw.line(ends, fill=_PAPER if start == margin else _RULE, width=1)
    for (x, y), image, handle in zip(places.tolist(), images, handles, strict=True):
        small = tile(image[None], 1)
        if cells is not None:  # shrink it to its cell
            small.thumbnail((side // cells[1], side // cells[0]))
        across = round((x + 1) / 2 * side - small.width / 2)
        down = round((y + 1) / 2 * side - small.height / 2)
        across = max(0, min(across, side - small.width))
        down = max(0, min(down, side - small.height))
        canvas.paste(small, (left + across, top + down))
        corner = (left + across + 5, top + down + 3)
        draw.text(corner, str(handle), fill=(255, 190, 60), font=font)
    return canvas
