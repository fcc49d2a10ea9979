"""Networks in whole numbers: the same output on every machine, to the last bit.

A code is lost if the machine that reads it differs by one unit from the one that wrote it. So what
picks a probability table computes in integers: weights of 8 bits, activations of 8 bits, sums below
2^24, which float32 holds exactly, in whatever order they are added up. TF32 and bfloat16 hold each
factor exactly too. Convolutions are written as products of matrices: a library may choose an
algorithm for them that divides.

Training sees the same numbers: rounding has the gradient of the identity.
"""

from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

ONE = 32  # an activation of 1.0; they lie in [0, 255 / 32]
_WEIGHT = 64  # a weight of 1.0; they lie in [-127 / 64, 127 / 64]
_LARGEST_ACTIVATION, _LARGEST_WEIGHT = 255, 127

Integers = Float[Tensor, "..."]  # whole numbers, held as floats


def round_through(x: Float[Tensor, "..."], low: int, high: int) -> Integers:
    """The nearest whole number of a range, halves up; the gradient of a clamp."""
    if not torch.is_grad_enabled():
        return (x + 0.5).floor_().clamp_(low, high)
    x = x.clamp(low, high)
    return x + ((x + 0.5).floor().clamp(low, high) - x).detach()


def activate(sums: Integers) -> Integers:
    """From the sums of one layer to the activations of the next: a ramp from 0 to 255 / 32.
    Below and above it a gradient of a hundredth keeps units alive."""
    ramp = sums / _WEIGHT
    inside = round_through(ramp, 0, _LARGEST_ACTIVATION)
    return inside + 0.01 * (ramp - ramp.detach()) if torch.is_grad_enabled() else inside


class FixedLinear(nn.Module):
    """A linear layer from whole numbers to sums, which are `ONE * 64` to the unit. `lead` makes
    several of them side by side; `mask` says which of their weights there are."""

    mask: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        lead: tuple[int, ...] = (),
        *,
        gain: float = 1.0,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        scale = gain / max(inputs, 1) ** 0.5
        self.weight = nn.Parameter(scale * torch.randn(*lead, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(*lead, outputs))
        self.register_buffer("mask", mask, persistent=False)

    def whole(self) -> tuple[Integers, Integers]:
        """Weights and biases as whole numbers."""
        weight = self.weight if self.mask is None else self.weight * self.mask
        weight = round_through(_WEIGHT * weight.float(), -_LARGEST_WEIGHT, _LARGEST_WEIGHT)
        return weight, round_through(_WEIGHT * ONE * self.bias.float(), -(2**20), 2**20)

    def forward(self, x: Integers) -> Integers:
        """Along the last dimension; side by side, (lead, n, inputs) to (lead, n, outputs)."""
        weight, bias = self.whole()
        return x @ weight.mT + (bias[..., None, :] if bias.ndim > 1 else bias)


def is_exact(inputs: int) -> bool:
    """Whether float32 counts any sum of so many inputs, and a bias."""
    return inputs * _LARGEST_ACTIVATION * _LARGEST_WEIGHT + 2**21 < 2**24


def clear_of(x: Tensor) -> "torch.autocast":
    """No mixed precision here: bfloat16 does not count to 2^24."""
    return torch.autocast(x.device.type, enabled=False)


# Probabilities and what they cost


TOTAL = 2**16  # what probabilities are counted in
BIT = 256  # what costs are counted in: a bit is 256 of them


@cache
def cost_table() -> Int[Tensor, " counts"]:
    """What a probability of so many counts costs. A reader follows costs to know where a block
    ends, so they are worked out digit by digit: another machine's logarithm may differ."""
    counts = np.arange(1, TOTAL + 1, dtype=np.float64)
    mantissa, whole = np.frexp(counts)  # exact: counts = mantissa * 2**whole, mantissa in [0.5, 1)
    mantissa, found = 2 * mantissa, (whole - 1).astype(np.int64)
    for _ in range(12):
        mantissa = mantissa * mantissa
        digit = mantissa >= 2
        mantissa = np.where(digit, mantissa / 2, mantissa)
        found = 2 * found + digit
    costs = (16 * 4096 - found + 8) // 16  # 4096ths to 256ths
    return torch.from_numpy(np.concatenate([costs[:1], costs]))
