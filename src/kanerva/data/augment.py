"""Training images turned, scaled, sheared and moved a little: half of them.

What is turned is also blurred; a model that saw no other images would expect that of all.
"""

import math

import torch
import torch.nn.functional as F

from kanerva.shapes import Labels, Pixels

_TURN, _SCALE, _SHEAR, _SHIFT = math.pi / 12, 0.15, 0.2, 1 / 14  # at most; a shift of 1 is half
_AT_ONCE = 4096


def random_affine(
    pixels: Pixels, generator: torch.Generator, labels: Labels | None = None
) -> Pixels:
    """Every other image, as chance has it, under a map of its own, or under that of its label; what
    comes in from outside is 0."""
    device = pixels.device
    count = len(pixels) if labels is None else int(labels.max()) + 1
    chance = 2 * torch.rand(count, 6, generator=generator, device=device) - 1
    turn, shear = _TURN * chance[:, 0], _SHEAR * chance[:, 1]
    scale = (_SCALE * chance[:, 2:4]).exp()
    linear = torch.stack(
        [turn.cos() + shear * turn.sin(), -turn.sin() + shear * turn.cos(), turn.sin(), turn.cos()]
    )
    linear = linear.T.unflatten(1, (2, 2)) * scale[:, None]
    maps = torch.cat([linear, _SHIFT * chance[:, 4:, None]], dim=2)
    chosen = torch.rand(count, generator=generator, device=device) < 0.5
    if labels is not None:
        maps, chosen = maps[labels], chosen[labels]
    moved = [
        F.grid_sample(
            part.float(),
            F.affine_grid(map, list(part.shape), align_corners=False),
            align_corners=False,
        )
        for part, map in zip(pixels.split(_AT_ONCE), maps.split(_AT_ONCE), strict=True)
    ]
    changed = torch.cat(moved).round().clamp(0, 255).to(torch.uint8)
    return torch.where(chosen[:, None, None, None], changed, pixels)
