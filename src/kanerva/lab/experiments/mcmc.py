"""Markov chains: random-walk and Langevin Metropolis, and how many draws a chain amounts to."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Points = Float[Tensor, "chains D"]
Density = Callable[[Points], Float[Tensor, " chains"]]  # ln pi, up to a constant


@dataclass(frozen=True)
class Chains:
    """What chains visited after their warm-up."""

    keys: Float[Tensor, "S chains D"]
    accepted: Bool[Tensor, "S chains"]
    step: Float[Tensor, " chains"]

    @property
    def acceptance(self) -> float:
        return self.accepted.float().mean().item()


def log_density_and_slope(
    density: Density, keys: Points
) -> tuple[Float[Tensor, " chains"], Points]:
    """ln pi and its gradient, chain by chain."""
    with torch.enable_grad():
        at = keys.detach().requires_grad_(True)
        value = density(at)
        (gradient,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), gradient


def run_chains(
    density: Density,
    start: Points,
    *,
    langevin: bool,
    step: float,
    steps: int,
    warmup: int,
    goal: float | None,
    generator: torch.Generator,
) -> Chains:
    """Random-walk Metropolis, or Langevin's with its Metropolis correction, all chains at once.

    A proposal is y + step * noise, for Langevin y + step^2 / 2 * slope + step * noise. With a
    `goal` each chain fits its step to that acceptance while it warms up; then steps are fixed, so
    what is kept is a Markov chain with limit pi.
    """

    def evaluate(keys: Points) -> tuple[Tensor, Tensor]:
        if langevin:
            return log_density_and_slope(density, keys)
        with torch.no_grad():
            return density(keys), torch.zeros_like(keys)

    here = start
    value, drift = evaluate(here)
    size = torch.full_like(value, step)
    kept, accepted = [], []
    for turn in range(warmup + steps):
        noise = torch.randn(here.shape, generator=generator, device=here.device)
        wide = size[:, None]
        there = here + wide**2 / 2 * drift + wide * noise
        new_value, new_drift = evaluate(there)
        back = (here - there - wide**2 / 2 * new_drift) / wide  # the noise that would lead back
        ratio = new_value - value + (noise.square() - back.square()).sum(dim=1) / 2
        chance = torch.rand(ratio.shape, generator=generator, device=ratio.device)
        yes = chance.log() < ratio
        here = torch.where(yes[:, None], there, here)
        value, drift = (
            torch.where(yes, new_value, value),
            torch.where(yes[:, None], new_drift, drift),
        )
        if turn >= warmup:
            kept.append(here)
            accepted.append(yes)
        elif goal is not None:
            size = size * ((ratio.exp().clamp(max=1).nan_to_num() - goal) / (turn + 1) ** 0.6).exp()
    return Chains(torch.stack(kept), torch.stack(accepted), size)


def effective_sample_size(series: Float[Tensor, "S chains"]) -> Float[Tensor, " chains"]:
    """How many independent draws tell as much as a chain: S over its autocorrelation time, summed
    up to where two neighbouring lags are negative together (Geyer 1992)."""
    length = len(series)
    centred = series.double() - series.double().mean(dim=0)
    padded = torch.fft.rfft(centred, n=2 * length, dim=0)
    lags = torch.fft.irfft(padded.abs().square(), n=2 * length, dim=0)[:length]
    lags = lags / lags[:1].clamp(min=1e-12)
    pairs = lags[: length // 2 * 2].unflatten(0, (-1, 2)).sum(dim=1)
    first = (pairs > 0).long().cumprod(dim=0)
    time = (2 * (pairs * first).sum(dim=0) - 1).clamp(min=1)
    moved = (series != series[:1]).any(dim=0)  # a chain that never did counts as one draw
    return torch.where(moved, length / time, 1.0).to(series.dtype)
