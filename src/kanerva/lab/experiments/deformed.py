"""An endless sequence of digits to fill a store: training images under random affine and elastic
maps.

Image n is training image n mod 60,000 under the n-th map, binarized by sampling. Any chunk of the
sequence can be made without the rest.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kanerva.data.augment import affine_maps
from kanerva.data.binarization import binarize, to_float
from kanerva.seeding import stream
from kanerva.shapes import Pixels

CHUNK = 2000  # images made from one random generator
_COARSE, _BEND = 5, 0.06  # elastic map: knots along a side, std of their shifts


def deformed_chunk(originals: Pixels, chunk: int) -> Float[Tensor, "n C H W"]:
    """The CHUNK images from number CHUNK * chunk on: binary, as floats."""
    noise = stream("deformed", chunk)
    rows = torch.arange(CHUNK * chunk, CHUNK * (chunk + 1)) % len(originals)
    images = originals[rows].float()
    chance = 2 * torch.rand(CHUNK, 6, generator=noise) - 1
    maps = affine_maps(chance)
    knots = _BEND * torch.randn(CHUNK, 2, _COARSE, _COARSE, generator=noise)
    bend = F.interpolate(knots, images.shape[-2:], mode="bicubic", align_corners=True)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid + bend.permute(0, 2, 3, 1), align_corners=False)
    pixels = moved.round().clamp(0, 255).to(torch.uint8)
    return to_float(binarize(pixels, "sample", noise), True)
