"""Binarization of grey pixels. The choice moves a bound by tens of nats: always name it.

`sample` adds pixel noise that no model can predict (45.5 nats per MNIST test image, 65.5 per
Omniglot test image). `static` does the same, but only once for training too. `threshold` and
`dither` add no noise.
"""

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kanerva.data.registry import Binarization
from kanerva.errors import UserError
from kanerva.shapes import Pixels


def binarize(pixels: Pixels, how: Binarization, generator: torch.Generator | None = None) -> Pixels:
    """Binarize a set: every pixel becomes 0 or 1. With `none` the bytes are returned unchanged.

    `sample` and `static` give 1 with probability pixel / 255, in integer arithmetic: 0 never
    becomes 1, and 255 always does. Only these use the generator, which must be on the pixels'
    device.
    """
    if how == "none":
        return pixels
    if how == "threshold":
        return (pixels > 127).to(torch.uint8)  # pixel / 255 > 0.5
    if how == "dither":
        return _dither(pixels)
    if how not in ("sample", "static"):
        raise UserError(f"binarization={how!r}: choose sample, static, threshold, dither or none")
    levels = torch.randint(
        0, 255, pixels.shape, dtype=torch.uint8, device=pixels.device, generator=generator
    )
    return (pixels > levels).to(torch.uint8)


def to_float(pixels: UInt8[Tensor, "..."], binarized: bool) -> Float[Tensor, "..."]:
    """Convert pixels to floats on [0, 1] for a model: {0, 1} unchanged, bytes divided by 255."""
    return pixels.float() if binarized else pixels.float() / 255


def _dither(pixels: Pixels) -> Pixels:
    """Floyd-Steinberg error diffusion: Pillow's mode '1', as in the paper's author's loader."""
    from PIL import Image

    planes = pixels.cpu().numpy().reshape(-1, *pixels.shape[2:])  # (N * C, H, W)
    dots = np.empty(planes.shape, np.uint8)
    for dot, plane in zip(dots, planes, strict=True):
        dot[:] = np.asarray(Image.fromarray(plane).convert("1"))
    return torch.from_numpy(dots).reshape(pixels.shape).to(pixels.device)
