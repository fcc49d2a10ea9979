"""Networks in integer arithmetic: the same output on every machine, to the last bit.

An arithmetic code cannot be decoded if the probabilities differ by one unit from those it was
written with. So the networks that predict them compute in integers: weights of 8 bits, activations
of 8 bits, and sums below 2^24, which float32 represents exactly in whatever order they are added.
TF32 and bfloat16 represent each factor exactly too. Convolutions are written as matrix products,
because a library may choose a convolution algorithm that divides.

Training computes with the same integers: rounding has the gradient of the identity.
"""

from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor, nn

ONE = 32  # an activation of 1.0; activations lie in [0, 255 / 32]
_WEIGHT = 64  # a weight of 1.0; weights lie in [-127 / 64, 127 / 64]
_LARGEST_ACTIVATION, _LARGEST_WEIGHT = 255, 127

Integers = Float[Tensor, "..."]  # integers, as floats


def round_through(x: Float[Tensor, "..."], low: int, high: int) -> Integers:
    """Round to the nearest integer in [low, high], halves up; the gradient is that of a clamp."""
    if not torch.is_grad_enabled():
        return (x + 0.5).floor_().clamp_(low, high)
    x = x.clamp(low, high)
    return x + ((x + 0.5).floor().clamp(low, high) - x).detach()


def activate(sums: Integers) -> Integers:
    """Turn the sums of one layer into the activations of the next: a ReLU, clamped at 255 / 32.
    Outside that range a gradient of 0.01 keeps units alive."""
    ramp = sums / _WEIGHT
    if not torch.is_grad_enabled():
        return ramp.add_(0.5).floor_().clamp_(0, _LARGEST_ACTIVATION)
    return round_through(ramp, 0, _LARGEST_ACTIVATION) + 0.01 * (ramp - ramp.detach())


def multiply(x: Integers, weight: Integers) -> Integers:
    """x @ weight.mT; in training on a GPU by `multiply_each`, which is faster there."""
    batch = x.ndim == 3 and weight.ndim == 2
    on_gpu = x.is_cuda and torch.is_grad_enabled()
    return multiply_each(x, weight) if batch and on_gpu else x @ weight.mT


def multiply_each(
    x: Float[Tensor, "N n inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "N n outputs"]:
    """The same, one matrix of the batch at a time, so that the weight's gradient is a sum of N
    products. A single product over all rows would be one long sum for each weight, which keeps only
    a few of a GPU's processors busy."""
    return torch.bmm(x, weight.mT.expand(len(x), -1, -1))


class FixedLinear(nn.Module):
    """A linear layer from integer activations to integer sums, in which 1.0 is `ONE * 64`. `lead`
    makes a batch of independent layers; weights where `mask` is 0 are 0."""

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

    def whole(self, part: slice = slice(None)) -> tuple[Integers, Integers]:
        """Weights and biases as integers; of a batch of layers, those of a part."""
        weight, bias = self.weight[part], self.bias[part]
        if self.mask is not None:
            weight = weight * self.mask[part]
        weight = round_through(_WEIGHT * weight.float(), -_LARGEST_WEIGHT, _LARGEST_WEIGHT)
        return weight, round_through(_WEIGHT * ONE * bias.float(), -(2**20), 2**20)

    def forward(self, x: Integers) -> Integers:
        """Map the last dimension; with `lead`, (*lead, n, inputs) to (*lead, n, outputs)."""
        weight, bias = self.whole()
        return multiply(x, weight) + (bias[..., None, :] if bias.ndim > 1 else bias)


def as_bytes(layer: FixedLinear) -> Int8[Tensor, "..."]:
    """A layer's weights as it uses them: integers of 8 bits."""
    return layer.whole()[0].detach().to(torch.int8)


def from_bytes(weight: Int8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Weights for a layer that then uses these integers."""
    return weight.float() / _WEIGHT


def is_exact(inputs: int) -> bool:
    """Whether float32 represents every sum over `inputs` inputs and a bias exactly."""
    return inputs * _LARGEST_ACTIVATION * _LARGEST_WEIGHT + 2**21 < 2**24


def clear_of(x: Tensor) -> "torch.autocast":
    """Disable mixed precision: bfloat16 does not represent every integer up to 2^24."""
    return torch.autocast(x.device.type, enabled=False)


# Probabilities and what they cost


TOTAL = 2**16  # probabilities are integer counts, of TOTAL
BIT = 256  # costs are integers in 256ths of a bit


@cache
def cost_table() -> Int[Tensor, " counts"]:
    """Entry c is the cost of a symbol with probability c / TOTAL, in 256ths of a bit. A decoder
    sums costs to know where a block ends, so the logarithm is computed digit by digit with exact
    operations: the logarithm of a library may differ between machines."""
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
