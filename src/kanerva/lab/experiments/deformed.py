"""As many digits as a store is to hold: training images under affine and elastic maps of their own.

Image n is training image n mod 60,000 under the n-th map, its pixels sampled: any part of the
sequence can be made alone.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kanerva.data.binarization import binarize, to_float
from kanerva.seeding import stream
from kanerva.shapes import Pixels

CHUNK = 2000  # images that share a stream of random numbers
_TURN, _SCALE, _SHEAR, _SHIFT = math.pi / 12, 0.15, 0.2, 1 / 14  # at most; a shift of 1 is half
_COARSE, _BEND = 5, 0.06  # an elastic map's knots along a side, and how far one moves, std


def deformed_chunk(originals: Pixels, chunk: int) -> Float[Tensor, "n C H W"]:
    """Images CHUNK * chunk and after, binary, as floats."""
    noise = stream("deformed", chunk)
    rows = torch.arange(CHUNK * chunk, CHUNK * (chunk + 1)) % len(originals)
    images = originals[rows].float()
    chance = 2 * torch.rand(CHUNK, 6, generator=noise) - 1
    turn, shear = _TURN * chance[:, 0], _SHEAR * chance[:, 1]
    scale = (_SCALE * chance[:, 2:4]).exp()
    linear = torch.stack(
        [turn.cos() + shear * turn.sin(), -turn.sin() + shear * turn.cos(), turn.sin(), turn.cos()]
    )
    linear = linear.T.unflatten(1, (2, 2)) * scale[:, None]
    maps = torch.cat([linear, _SHIFT * chance[:, 4:, None]], dim=2)
    knots = _BEND * torch.randn(CHUNK, 2, _COARSE, _COARSE, generator=noise)
    bend = F.interpolate(knots, images.shape[-2:], mode="bicubic", align_corners=True)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid + bend.permute(0, 2, 3, 1), align_corners=False)
    pixels = moved.round().clamp(0, 255).to(torch.uint8)
    return to_float(binarize(pixels, "sample", noise), True)
