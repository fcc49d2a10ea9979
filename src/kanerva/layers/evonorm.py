"""EvoNorm-S0 (Liu et al. 2020): normalisation and activation in one, per sample (App. E)."""

from math import gcd

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.layers.kernels.norms import evonorm, supported

Maps = Float[Tensor, "N C H W"]


class EvoNormS0(nn.Module):
    """x * sigmoid(v x) / group_std(x) * gamma + beta.

    Statistics are those of one sample, so a prior or decoder built on it sees no other image.
    Eight groups are ours. Runs as one fused kernel when the model is compiled for a GPU.
    """

    def __init__(self, channels: int, groups: int = 8, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = gcd(channels, groups)
        self.eps = eps
        self.v = nn.Parameter(torch.ones(channels))
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Maps) -> Maps:
        if torch.compiler.is_compiling() and supported(x, self.groups):
            return evonorm(x, self.v, self.gamma, self.beta, self.groups, self.eps)
        grouped = x.float().unflatten(1, (self.groups, -1))
        variance = grouped.var(dim=(2, 3, 4), unbiased=False, keepdim=True)
        std = (variance + self.eps).sqrt().expand_as(grouped).flatten(1, 2)
        v, gamma, beta = (p.view(1, -1, 1, 1) for p in (self.v, self.gamma, self.beta))
        return (x * torch.sigmoid(v * x) / std * gamma + beta).to(x.dtype)
