"""Networks in whole numbers: the same output on every machine, to the last bit.

A code is lost if the machine that reads it differs by one unit from the one that wrote it. So what
picks a probability table computes in integers: weights of 8 bits, activations of 8 bits, sums below
2^24, which float32 holds exactly and float64 all the more, in whatever order they are added up.

Training sees the same numbers: rounding has the gradient of the identity.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

ONE = 32  # an activation of 1.0; they lie in [0, 255 / 32]
_WEIGHT = 64  # a weight of 1.0; they lie in [-127 / 64, 127 / 64]
_LARGEST_ACTIVATION, _LARGEST_WEIGHT = 255, 127
_EXACT = 2**24  # float32 counts so far without a gap

Integers = Float[Tensor, "..."]  # whole numbers, held as floats


def round_through(x: Float[Tensor, "..."], low: int, high: int) -> Integers:
    """The nearest whole number of a range, halves up; the gradient of a clamp."""
    x = x.clamp(low, high)
    return x + ((x + 0.5).floor().clamp(low, high) - x).detach()


def activate(sums: Integers) -> Integers:
    """From the sums of one layer to the activations of the next: a ramp from 0 to 255 / 32.
    Below and above it a gradient of a hundredth keeps units alive."""
    ramp = sums / _WEIGHT
    inside = round_through(ramp, 0, _LARGEST_ACTIVATION)
    return inside + 0.01 * (ramp - ramp.detach())


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

    def whole(self, dtype: torch.dtype = torch.float32) -> tuple[Integers, Integers]:
        """Weights and biases as whole numbers."""
        weight = self.weight if self.mask is None else self.weight * self.mask
        largest = _LARGEST_WEIGHT
        weight = round_through(_WEIGHT * weight.float(), -largest, largest)
        bias = round_through(_WEIGHT * ONE * self.bias.float(), -(2**20), 2**20)
        return weight.to(dtype), bias.to(dtype)

    def forward(self, x: Integers) -> Integers:
        """Along the last dimension; side by side, (lead, n, inputs) to (lead, n, outputs)."""
        weight, bias = self.whole(x.dtype)
        return x @ weight.mT + (bias[..., None, :] if bias.ndim > 1 else bias)

    def check_exact(self, largest_input: int) -> None:
        """Refuse weights whose sums float32 might not count."""
        weight, bias = self.whole(torch.float64)
        most = (weight.abs().sum(dim=-1) * largest_input + bias.abs()).max()
        assert most < _EXACT, f"sums up to {most:.0f}"


def clear_of(x: Tensor) -> "torch.autocast":
    """No mixed precision here: bfloat16 does not count to 2^24."""
    return torch.autocast(x.device.type, enabled=False)
