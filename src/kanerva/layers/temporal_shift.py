"""Temporal shift (Lin et al. 2019): neighbours in an episode trade some feature maps (§3.3)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Maps = Float[Tensor, "BT C H W"]


def temporal_shift(maps: Maps, length: int, fraction: float) -> Maps:
    """Move `fraction` of the channels one sample forward and as many one back, zero-padded.

    `length` is T. In an episode of one image the shifted channels are all zero.
    """
    moved = int(maps.shape[1] * fraction)
    if moved == 0:
        return maps
    episodes = maps.unflatten(0, (-1, length))  # (B, T, C, H, W)
    ahead, back, still = episodes.split([moved, moved, episodes.shape[2] - 2 * moved], dim=2)
    ahead = F.pad(ahead[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))  # sample t now holds t - 1's maps
    back = F.pad(back[:, 1:], (0, 0, 0, 0, 0, 0, 0, 1))  # and here t + 1's
    return torch.cat([ahead, back, still], dim=2).flatten(0, 1)
