"""Residual blocks with per-sample statistics: GroupNorm, SiLU, 3x3 convolutions."""

from math import gcd
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.layers.kernels.norms import norm_silu, supported

Maps = Float[Tensor, "N C H W"]


class NormSiLU(nn.GroupNorm):
    """SiLU(GroupNorm(x)). Runs as one fused kernel when the model is compiled for a GPU."""

    def forward(self, input: Maps) -> Maps:
        if torch.compiler.is_compiling() and supported(input, self.num_groups):
            return norm_silu(input, self.weight, self.bias, self.num_groups, self.eps)
        return F.silu(super().forward(input))


class ResidualBlock(nn.Module):
    """x + f(x), f = two rounds of norm, SiLU and convolution; starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        groups = gcd(width, 8)
        self.body = nn.Sequential(
            NormSiLU(groups, width),
            nn.Conv2d(width, width, 3, padding=1),
            NormSiLU(groups, width),
            zeroed(nn.Conv2d(width, width, 3, padding=1)),
        )

    def forward(self, x: Maps) -> Maps:
        return x + self.body(x)


def residual_stack(width: int, blocks: int) -> nn.Sequential:
    """Several blocks in a row."""
    return nn.Sequential(*[ResidualBlock(width) for _ in range(blocks)])


Layer = TypeVar("Layer", bound=nn.Module)


def zeroed(layer: Layer) -> Layer:
    """Initialise a layer so that its output is zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
