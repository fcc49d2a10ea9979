"""Affine augmentation: half of the training images are rotated, scaled, sheared and shifted a bit.

Resampling also blurs them. A model that saw only such images would expect blur everywhere. And if
kin (images of one label) were warped more often than others, a model could recognise kin by it.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kanerva.shapes import Labels, Pixels

_TURN, _SCALE, _SHEAR, _SHIFT = math.pi / 12, 0.15, 0.2, 1 / 14  # largest; a shift of 1 is half
_WHOLE = 2  # pixels: the largest shift of a copy that is not warped
_AT_ONCE = 4096


def affine_maps(chance: Float[Tensor, "n 6"]) -> Float[Tensor, "n 2 3"]:
    """Affine maps of image coordinates, from random numbers on [-1, 1]."""
    turn, shear = _TURN * chance[:, 0], _SHEAR * chance[:, 1]
    scale = (_SCALE * chance[:, 2:4]).exp()
    linear = torch.stack(
        [turn.cos() + shear * turn.sin(), -turn.sin() + shear * turn.cos(), turn.sin(), turn.cos()]
    )
    linear = linear.T.unflatten(1, (2, 2)) * scale[:, None]
    return torch.cat([linear, _SHIFT * chance[:, 4:, None]], dim=2)


def random_affine(
    pixels: Pixels, generator: torch.Generator, labels: Labels | None = None
) -> Pixels:
    """Warp each image with probability 1/2, by its own map, or with `labels` by that of its label.
    Pixels from outside the image are 0."""
    device = pixels.device
    count = len(pixels) if labels is None else int(labels.max()) + 1
    chance = 2 * torch.rand(count, 6, generator=generator, device=device) - 1
    maps = affine_maps(chance)
    chosen = torch.rand(count, generator=generator, device=device) < 0.5
    if labels is not None:
        maps, chosen = maps[labels], chosen[labels]
    return torch.where(chosen[:, None, None, None], _warp(pixels, maps), pixels)


def move_copies(pixels: Pixels, generator: torch.Generator) -> Pixels:
    """Give every image its own map, so that copies of one image differ. Half of the maps are
    affine; the others are shifts by whole pixels, which do not blur."""
    device, (height, width) = pixels.device, pixels.shape[2:]
    chance = 2 * torch.rand(len(pixels), 6, generator=generator, device=device) - 1
    turned = torch.rand(len(pixels), generator=generator, device=device) < 0.5
    sides = torch.tensor([width, height], device=device)
    shift = 2 * (_WHOLE * chance[:, 4:]).round() / sides
    straight = torch.eye(2, device=device).expand(len(pixels), 2, 2)
    moved = torch.cat([straight, shift[..., None]], dim=2)
    return _warp(pixels, torch.where(turned[:, None, None], affine_maps(chance), moved))


def _warp(pixels: Pixels, maps: Float[Tensor, "N 2 3"]) -> Pixels:
    parts = [
        F.grid_sample(
            part.float(),
            F.affine_grid(map, list(part.shape), align_corners=False),
            align_corners=False,
        )
        for part, map in zip(pixels.split(_AT_ONCE), maps.split(_AT_ONCE), strict=True)
    ]
    return torch.cat(parts).round().clamp(0, 255).to(torch.uint8)
