"""Discrete addresses over templates, for `vma`: their distributions, estimators of the gradient
of a bound that chooses among them, and the templates themselves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.seeding import Noise, uniform

Addresses = Int[Tensor, "B N"]
LogChances = Float[Tensor, "B N M"]  # ln of a distribution over M templates, for each image
Hidden = Bool[Tensor, "T M"]  # True: a template that an image must do without
PerDraw = Float[Tensor, "k B T"]


def vimco(log_weights: PerDraw, log_chances: PerDraw) -> Float[Tensor, "B T"]:
    """ln (1/k) sum_i w_i, with the gradient of its expectation (Mnih & Rezende 2016).

    w_i = p(x, z_i, a_i) / q(z_i, a_i) may be differentiated through z_i; choosing a_i may not, so
    ln q(a_i) is weighted by what draw i adds to the bound. What it would have been without: w_i
    replaced by the geometric mean of the others, which draw i has no part in, hence no bias.
    """
    k = len(log_weights)
    if k < 2:
        raise UserError(f"VIMCO compares draws with each other: it needs at least 2, got {k}")
    bound = log_weights.logsumexp(dim=0) - math.log(k)
    fixed = log_weights.detach()
    itself = torch.eye(k, dtype=torch.bool, device=fixed.device)[:, :, None, None]  # draw i, j
    others = torch.where(itself, 0.0, fixed).sum(dim=1) / (k - 1)
    without = torch.where(itself, others[:, None], fixed).logsumexp(dim=1) - math.log(k)
    score = ((bound.detach() - without) * log_chances).sum(dim=0)
    return bound + score - score.detach()


def one_sample(log_weights: PerDraw, log_chances: PerDraw) -> Float[Tensor, "B T"]:
    """The mean of ln w_i, with the gradient of its expectation, the bound that scores estimate:
    ln q(a_i) is weighted by how much better draw i is than the others."""
    k = len(log_weights)
    fixed = log_weights.detach()
    score = ((fixed - fixed.mean(dim=0)) / (k - 1) * log_chances).sum(dim=0)
    return log_weights.mean(dim=0) + score - score.detach()


def expected(log_chances: LogChances, values: LogChances) -> Float[Tensor, "B N"]:
    """The sum over templates of q(a) times a value; what cannot be chosen counts for nothing."""
    chances = log_chances.exp()
    return torch.where(chances > 0, chances * values, 0.0).sum(dim=-1)


def categorical_kl(q: LogChances, p: LogChances) -> Float[Tensor, "B N"]:
    """KL[q(a) || p(a)]. A template hidden from both costs nothing (0 ln 0/0)."""
    known = ~q.isneginf()
    return expected(q, torch.where(known, q, 0.0) - torch.where(known, p, 0.0))


def sample_addresses(log_chances: LogChances, generator: Noise) -> Addresses:
    """One address for each row: the largest of ln q(a) + Gumbel noise."""
    noise = uniform(tuple(log_chances.shape), generator, log_chances.device).clamp(min=1e-30)
    return (log_chances - (-noise.log()).log()).argmax(dim=-1)


def at(addresses: Addresses, values: LogChances) -> Float[Tensor, "B N"]:
    """The number that stands at each address; its gradient is the same on every run."""
    chosen = addresses[..., None] == torch.arange(values.shape[-1], device=values.device)
    return torch.where(chosen, values, 0.0).sum(dim=-1)


@dataclass(frozen=True)
class Templates:
    """What a memory holds: images, and the embeddings that are made of them."""

    pixels: Float[Tensor, "B M C H W"]
    embedding: Float[Tensor, "B M D"]

    def __len__(self) -> int:
        return self.pixels.shape[1]

    def at(self, addresses: Addresses) -> "Templates":
        """Those at some addresses, one for each. Embeddings as a product: the gradient of that is
        the same on every run."""
        index = addresses[..., None, None, None].expand(-1, -1, *self.pixels.shape[2:])
        pixels = self.pixels.gather(1, index)
        chosen = addresses[..., None] == torch.arange(len(self), device=addresses.device)
        return Templates(pixels, chosen.to(self.embedding.dtype) @ self.embedding)

    def only(self, a: int, length: int) -> "Templates":
        """One of them for all images of an episode."""
        pixels = self.pixels[:, a : a + 1].expand(-1, length, -1, -1, -1)
        return Templates(pixels, self.embedding[:, a : a + 1].expand(-1, length, -1))


def own_hidden(length: int, device: torch.device) -> Hidden:
    """Every second image must do without its own template; a lone image keeps it."""
    hidden = torch.eye(length, dtype=torch.bool, device=device)
    odd = torch.arange(length, device=device) % 2 == 1
    return hidden & odd[:, None]


def hide(scores: LogChances, hidden: Hidden | None) -> LogChances:
    """Scores with hidden templates out of reach."""
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def repeat_episodes(times: int) -> Callable[[Tensor], Tensor]:
    """An episode so many times over, one after the other: (B, T, ...) to (B, times T, ...)."""
    return lambda value: value.repeat(1, times, *[1] * (value.ndim - 2))
