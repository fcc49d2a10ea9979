"""Diagonal normals over latents, with densities and divergences in nats per image."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.seeding import Noise, normal, uniform
from kanerva.shapes import PerImage

Latent = Float[Tensor, "B T *event"]
_LOG_STD_RANGE = (-7.0, 4.0)  # ours: keeps a KL finite when a network runs away


class RecoverableClamp(torch.autograd.Function):
    """Clamp x to a range, but let through gradients that lead back inside.

    With plain `clamp` a number that has left the range gets no gradient and never returns: a
    posterior would stay at its narrowest for good.
    """

    @staticmethod
    def forward(ctx, x: Tensor, low: float, high: float) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(x)
        ctx.ends = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001
        (x,), (low, high), (slope,) = ctx.saved_tensors, ctx.ends, grad_outputs
        outward = ((x < low) & (slope > 0)) | ((x > high) & (slope < 0))
        return slope.masked_fill(outward, 0.0), None, None


def recoverable_clamp(x: Tensor, low: float, high: float) -> Tensor:
    """`RecoverableClamp`, called like `clamp`."""
    return RecoverableClamp.apply(x, low, high)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class DiagonalNormal:
    """N(mean, diag std^2); every dimension after (B, T) is one event.

    Parameters are float32 whatever the precision of the network that made them, so densities and
    divergences are float32 too.
    """

    mean: Latent
    log_std: Latent

    @classmethod
    def from_network(cls, output: Float[Tensor, "B T *two_l"], dim: int = -1) -> "DiagonalNormal":
        """Split a network's last layer into mean and log standard deviation."""
        mean, log_std = output.float().chunk(2, dim=dim)
        return cls(mean, recoverable_clamp(log_std, *_LOG_STD_RANGE))

    @classmethod
    def standard_like(cls, latent: Latent) -> "DiagonalNormal":
        """N(0, 1), the key prior p(Y) (§3.4)."""
        zeros = torch.zeros_like(latent, dtype=torch.float32)
        return cls(zeros, zeros)

    @property
    def std(self) -> Latent:
        return self.log_std.exp()

    def sample(self, generator: Noise = None) -> Latent:
        """mean + std * noise. The paper prints sigma^2 * noise (§3.3); a normal scales by sigma."""
        noise = normal(tuple(self.mean.shape), generator, self.mean.device)
        return self.mean + self.std * noise

    def log_prob(self, value: Latent) -> PerImage:
        """Log-density, summed over the event."""
        z = (value.float() - self.mean) * (-self.log_std).exp()
        return (-0.5 * (z.square() + math.log(2 * math.pi)) - self.log_std).flatten(2).sum(-1)

    def kl(self, other: "DiagonalNormal") -> PerImage:
        """KL[self || other] in closed form, summed over the event."""
        log_ratio = self.log_std - other.log_std
        shift = (self.mean - other.mean) * (-other.log_std).exp()
        kl = 0.5 * ((2 * log_ratio).exp() + shift.square() - 1) - log_ratio
        return kl.flatten(2).sum(-1)

    def kl_to_prior(self) -> PerImage:
        """KL[self || N(0, 1)]."""
        return self.kl(DiagonalNormal.standard_like(self.mean))

    def log_ratio(self, value: Latent) -> PerImage:
        """ln q(value) - ln N(value; 0, 1)."""
        return self.log_prob(value) - DiagonalNormal.standard_like(value).log_prob(value)


@dataclass(frozen=True)
class ConfinedNormal:
    """N(0, 1) truncated to a box: p(y | y in the box). Such a key says which box, and no more.

    The box lies in quantile space, where 2 Phi(y) - 1 is uniform on [-1, 1]: its middle is
    `centre`, its half widths are `half`. Its prior mass is the product of its half widths. So the
    divergence from N(0, 1) is exactly -ln(mass), and so is the log-ratio of the densities at every
    point inside. If p does not distinguish between several boxes, `mass` may be their total.
    """

    centre: Latent
    half: Latent
    mass: PerImage

    @property
    def mean(self) -> Latent:
        """The middle of the box, as a key."""
        return as_normal(self.centre)

    def sample(self, generator: Noise = None) -> Latent:
        chance = 2 * uniform(tuple(self.centre.shape), generator, self.centre.device) - 1
        return as_normal(self.centre + self.half * chance)

    def kl_to_prior(self) -> PerImage:
        """KL[self || N(0, 1)]: exactly the nats it takes to name the box."""
        return -self.mass.log()

    def log_ratio(self, value: Latent) -> PerImage:
        """ln q(value) - ln p(value): the same everywhere inside the box."""
        return -self.mass.log()


@dataclass(frozen=True)
class PointMass:
    """A deterministic latent, as `dkm` reads it. It has no density, and its KL is zero."""

    mean: Latent

    def sample(self, generator: Noise = None) -> Latent:
        return self.mean

    def log_prob(self, value: Latent) -> PerImage:
        return self.mean.new_zeros(self.mean.shape[:2])

    def kl(self, other: "PointMass") -> PerImage:
        return self.mean.new_zeros(self.mean.shape[:2])


@runtime_checkable
class ReadDistribution(Protocol):
    """p(z | M, y) of any model."""

    @property
    def mean(self) -> Latent: ...

    def sample(self, generator: Noise = None) -> Latent: ...

    def log_prob(self, value: Latent) -> PerImage: ...


KeyPosterior = DiagonalNormal | ConfinedNormal


def no_keys(features: Latent) -> DiagonalNormal:
    """The key posterior of a model without keys: zero dimensions, zero KL."""
    nothing = torch.zeros(*features.shape[:2], 0, device=features.device)
    return DiagonalNormal(nothing, nothing)


Distribution = TypeVar("Distribution", bound=DiagonalNormal | ConfinedNormal)


def map_samples(distribution: Distribution, function: Callable[[Tensor], Tensor]) -> Distribution:
    """Apply `function` to every parameter, to reorder or reshape the samples."""
    changed = {name: function(value) for name, value in vars(distribution).items()}
    return replace(distribution, **changed)


def as_uniform(key: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """2 Phi(y) - 1: makes N(0, 1) uniform on [-1, 1]."""
    return (key * 0.5**0.5).erf()


def as_normal(point: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The inverse of `as_uniform`, finite at the ends."""
    return point.float().clamp(-1 + 1e-6, 1 - 1e-6).erfinv() * 2**0.5
