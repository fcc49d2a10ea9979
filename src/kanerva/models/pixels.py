"""The format of the images that a model takes, and `prepare`, which converts others to it."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from PIL import Image
from torch import Tensor

from kanerva.data.binarization import binarize, to_float
from kanerva.data.picture_files import channels_first, fitted, flat
from kanerva.errors import UserError
from kanerva.inputs import require_tensor_images
from kanerva.plain_files import shown
from kanerva.shapes import Episode

if TYPE_CHECKING:
    from kanerva.models.base import MemoryModel

_CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency
_NO_PIXEL = 16.0  # ours: larger than any noisy pixel on [0, 1]


@dataclass(frozen=True)
class PixelFormat:
    """The images that a model writes and scores: (T, C, H, W) or (B, T, C, H, W), on [0, 1].

    If `binary`, each pixel is 0.0 or 1.0; else it is one of 256 levels, k / 255 or uint8. Cues are
    only compared with images, so they may be any finite numbers.
    """

    image: tuple[int, int, int]  # C, H, W
    binary: bool

    def __str__(self) -> str:
        values = "0 or 1, as floats" if self.binary else "8-bit: k/255 on [0, 1], or uint8"
        return f"{' x '.join(map(str, self.image))}, {values}"

    def as_episodes(self, images: object, finite: bool = True) -> Episode:
        """Convert images or cues to a batch of episodes of floats, and check that they are finite.
        Whether they are valid pixel values is checked by the likelihood."""
        images = require_tensor_images(images)
        if tuple(images.shape) == self.image:
            raise UserError(f"got one image {self.image}: image[None] is an episode of one")
        if images.ndim not in (4, 5) or tuple(images.shape[-3:]) != self.image:
            raise UserError(
                f"expected images (T, C, H, W) or (B, T, C, H, W) with (C, H, W) = {self.image}, "
                f"got {tuple(images.shape)}: kanerva.prepare(images, model) crops and resizes"
            )
        if 0 in images.shape[:-3]:
            raise UserError("an episode needs at least one image, got none")
        if images.dtype == torch.uint8 and not self.binary:
            images = images / 255
        if not images.is_floating_point():
            raise UserError(
                f"this model takes pixels that are {self}; got {images.dtype}: "
                "kanerva.prepare(images, model) converts"
            )
        images = images.float()
        if finite and not images.isfinite().all():
            raise UserError("images contain numbers that are not finite")
        return images if images.ndim == 5 else images[None]

    def check_cue(self, cue: Float[Tensor, "..."]) -> None:
        """Refuse bytes that were converted to floats without dividing by 255. Other finite numbers
        are valid cues; these would match nothing, so that `find` would always answer none."""
        most = float(cue.max()) if cue.numel() else 0.0
        if most > _NO_PIXEL and bool(((cue >= 0) & (cue == cue.round())).all()):
            raise UserError(
                f"this cue is whole numbers up to {most:g}, and pixels lie on [0, 1]: divide it by "
                "255, or kanerva.prepare(cue.byte(), model)"
            )


def prepare(
    images: Any, model: "MemoryModel", *, generator: torch.Generator | None = None
) -> Float[Tensor, "*B T C H W"]:
    """Convert pictures to the format of `model` (`model.pixels`): floats on [0, 1], (T, C, H, W).

    `images` are Pillow images, numpy arrays or tensors: one, a list, or an array of several; of any
    size; grey or in colour; channels first or last. Values are integers from 0 to 255, or only 0
    and 1, bool, or floats on [0, 1]. Other sizes are cropped about the centre and resized. For a
    model of binary pixels, a pixel becomes 1 if it is above a half or, with a `generator`, with its
    brightness as the probability. Ink is 1: images that are mostly white get a warning.
    """
    if isinstance(images, np.ndarray | Tensor) and images.ndim == 5:
        parts = [prepare(one, model, generator=generator) for one in images]
        return torch.stack(parts)
    image, binary = model.config.image, model.pixels.binary
    found = [_fit(picture, image) for picture in _pictures(images, image[0], image[1] * image[2])]
    if not found:
        raise UserError("no images given")
    how = "none" if not binary else "threshold" if generator is None else "sample"
    pixels = binarize(torch.cat(found), how, generator)
    if binary and float(pixels.float().mean()) > 0.5:
        warnings.warn(
            "most pixels are white: the models of this package know white ink on black. Invert "
            "dark ink on white paper: 1 - images",
            stacklevel=2,
        )
    return to_float(pixels, binary).to(model.device)


def _pictures(images: Any, channels: int, size: int) -> Iterator[UInt8[Tensor, "n C H W"]]:
    """Batches of pictures of one size, as bytes. Flattened pictures, rows of `size` numbers, are
    refused."""
    if isinstance(images, list | tuple):
        for one in images:
            yield from _pictures(one, channels, size)
    elif isinstance(images, Image.Image):
        mode = "L" if channels == 1 else "RGB"
        try:
            yield torch.tensor(channels_first(flat(images, mode)))[None]
        except OSError as error:  # Pillow reads the pixels now
            raise UserError(f"cannot read a picture: {error}") from error
    elif isinstance(images, np.ndarray | Tensor):
        if isinstance(images, np.ndarray):  # copied: it may be read-only, or of a type torch lacks
            wide = images.dtype.kind in "iu" and images.dtype != np.uint8
            array = torch.tensor(images.astype(np.int64) if wide else images)
        else:
            array = images.detach().cpu()
        if array.ndim not in (2, 3, 4) or 0 in array.shape:
            raise UserError(f"an array of pictures has 2 to 5 dimensions, got {tuple(array.shape)}")
        if array.ndim == 2 and array.shape[1] == size and array.shape[0] != size:
            raise UserError(
                f"got {tuple(array.shape)}: array.reshape(-1, H, W) makes pictures of it"
            )
        yield _as_bytes(_channels_second(array, channels))
    else:
        raise UserError(
            "images must be Pillow's, numpy arrays or tensors, or a list of those; got "
            f"{shown(images)}"
        )


def _channels_second(array: Shaped[Tensor, "..."], channels: int) -> Shaped[Tensor, "n C H W"]:
    """Move channels to the second dimension. They are recognised by their number, 1, 3 or 4;
    pictures without such a dimension are grey."""
    shape = array.shape
    if array.ndim == 2:
        return array[None, None]
    last = shape[-1] in _CHANNELS and shape[-3] not in _CHANNELS
    if array.ndim == 4:
        return array.permute(0, 3, 1, 2) if last else array
    if last:
        return array.permute(2, 0, 1)[None]
    return array[None] if shape[0] == channels else array[:, None]


def _as_bytes(array: Shaped[Tensor, "n C H W"]) -> UInt8[Tensor, "n C H W"]:
    if array.shape[1] not in _CHANNELS:
        raise UserError(f"pictures have 1, 3 or 4 channels, got {tuple(array.shape)}")
    if not array.is_floating_point() and int(array.max()) <= 1:  # bool, or only 0 and 1
        array = array * 255
    most = 1 if array.is_floating_point() else 255
    wrong = array[~((array >= 0) & (array <= most))]  # NaN too
    if len(wrong):
        kind = "floats lie on [0, 1]: divide by 255?" if most == 1 else "integers are 0 to 255"
        raise UserError(f"pixels that are {kind}; got {wrong[0].item():g}")
    return (array * 255).round().byte() if most == 1 else array.byte()


def _fit(
    pictures: UInt8[Tensor, "n c h w"], image: tuple[int, int, int]
) -> UInt8[Tensor, "n C H W"]:
    """Crop, resize and convert pictures to a model's size and number of channels."""
    if tuple(pictures.shape[1:]) == image:
        return pictures
    mode, made = "L" if image[0] == 1 else "RGB", []
    for picture in pictures:
        array = picture.permute(1, 2, 0).squeeze(2).numpy()
        made.append(fitted(flat(Image.fromarray(array), mode), image[1:]))
    return torch.from_numpy(np.stack(made))
