"""A gist: integers that describe an image, and their cost in bits under a learned prior.

The integers come in groups, the most informative first; a block may hold only the first few groups.
The prior predicts the probabilities of each integer from the groups before its own, in integer
arithmetic (`fixed_point`), so that every machine computes the same table.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kanerva.memory.fixed_point import (
    ONE,
    TOTAL,
    FixedLinear,
    Integers,
    activate,
    clear_of,
    cost_table,
    round_through,
)

LARGEST = 7  # numbers lie in [-7, 7]
ALPHABET = 2 * LARGEST + 1
_LEVELS = 16  # logits are rounded to sixteenths
_FARTHEST = 10 * _LEVELS  # logits are at most 10 below the largest one
_HIDDEN = 64  # ours: units of each layer and group
_AT_ONCE = {"cpu": 64, "cuda": 4096}  # gists per batch: what fits a CPU's cache, or a GPU

Gists = Float[Tensor, "N D"]  # integers, as floats


class GistPrior(nn.Module):
    """p(gist): one small network for each group, whose input is the groups before it."""

    powers: Tensor

    def __init__(self, numbers: int, groups: int) -> None:
        super().__init__()
        self.numbers, self.groups, self.each = numbers, groups, numbers // groups
        before = torch.arange(numbers) // self.each < torch.arange(groups)[:, None]
        mask = before[:, None, :].expand(-1, _HIDDEN, -1).float()
        self.first = FixedLinear(numbers, _HIDDEN, (groups,), mask=mask)
        self.second = FixedLinear(_HIDDEN, _HIDDEN, (groups,))
        self.last = FixedLinear(_HIDDEN, self.each * ALPHABET, (groups,), gain=0.1)
        far = torch.arange(-LARGEST, LARGEST + 1).abs().float()
        with torch.no_grad():  # initially, larger numbers are less likely
            self.last.bias.add_((-0.7 * far).repeat(self.each))
        steps = torch.arange(_FARTHEST + 1, dtype=torch.float64)
        powers = (TOTAL * (-steps / _LEVELS).exp()).round().clamp(min=1)
        self.register_buffer("powers", powers.float())  # saved: exp differs among machines

    def whole(self, group: int | None = None) -> list[tuple[Integers, Integers]]:
        """Weights and biases of every layer as integers, for all groups or for one."""
        part = slice(None) if group is None else slice(group, group + 1)
        layers = [layer.whole(part) for layer in (self.first, self.second, self.last)]
        return [(weight.mT, bias[:, None]) for weight, bias in layers]

    def levels(
        self, gists: Gists, layers: list[tuple[Integers, Integers]]
    ) -> Float[Tensor, "N _ A"]:
        """Logits of every number, in sixteenths; of one group's numbers, if `layers` are
        `whole(group)`."""
        first, *others = layers
        x = (ONE * gists) @ first[0] + first[1]
        for weight, bias in others:
            x = activate(x) @ weight + bias
        x = round_through(x / (64 * ONE / _LEVELS), -(2**14), 2**14)
        return x.movedim(0, 1).reshape(len(gists), len(x) * self.each, ALPHABET)

    def nats(
        self, numbers: Float[Tensor, "N D"], blurred: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N groups"]:
        """The cost of each group after rounding, in nats, with gradients for training. The prior
        gets the gradient at the rounded numbers. The writer gets it at `blurred` ones, with the
        probability interpolated between the two integers around: this has a slope everywhere."""
        with clear_of(numbers):
            levels = self.levels(quantise_gist(numbers), self.whole())
            log_p = (levels / _LEVELS).log_softmax(dim=-1)
            at = (quantise_gist(numbers.detach()) + LARGEST).long()[..., None]
            cost = -log_p.gather(-1, at)[..., 0]
            below = blurred.detach().floor().clamp(max=LARGEST - 1)
            share, place = blurred - below, (below + LARGEST).long()[..., None]
            p = log_p.detach().exp()
            low, high = (p.gather(-1, place + i)[..., 0] for i in (0, 1))
            soft = -((1 - share) * low + share * high).clamp(min=1e-6).log()
            cost = cost + soft - soft.detach()
            return cost.unflatten(-1, (self.groups, -1)).sum(dim=-1)

    @torch.no_grad()
    def tables(self, gists: Gists, group: int | None = None) -> Int[Tensor, "N _ A"]:
        """Probabilities of every number, or of one group's numbers, as counts of at least 1 that
        sum to `TOTAL`. They depend only on the numbers of earlier groups."""
        return self._tables(gists, self.whole(group))

    def _tables(
        self, gists: Gists, layers: list[tuple[Integers, Integers]]
    ) -> Int[Tensor, "N _ A"]:
        with clear_of(gists):
            levels = self.levels(gists, layers)
        below = (levels.amax(dim=-1, keepdim=True) - levels).clamp(max=_FARTHEST).long()
        powers = self.powers.long()[below]
        upto = powers.cumsum(dim=-1)
        ends = upto * (TOTAL - ALPHABET) // upto[..., -1:]
        return ends.diff(dim=-1, prepend=torch.zeros_like(ends[..., :1])) + 1

    @torch.no_grad()
    def costs(self, gists: Gists) -> Int[Tensor, "N groups"]:
        """The cost of each group, in 256ths of a bit."""
        layers, prices = self.whole(), cost_table().to(gists.device)
        found = []
        for part in gists.split(_AT_ONCE[gists.device.type]):
            chosen = (part + LARGEST).long()[..., None]
            found.append(prices[self._tables(part, layers).gather(-1, chosen)[..., 0]])
        return torch.cat(found).unflatten(-1, (self.groups, -1)).sum(dim=-1)


def quantise_gist(numbers: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """Round to the nearest integers in [-7, 7]."""
    return round_through(numbers, -LARGEST, LARGEST)
