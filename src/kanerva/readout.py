"""Z, the readout: its posterior q(Z|X) and its learned prior p(Z|M-hat, Y) (§3.3, §3.5, App. E)."""

from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import (
    KppReadoutConfig,
    LinearReadoutConfig,
    PaperMemoryConfig,
    PaperReadoutConfig,
)
from kanerva.distributions import DiagonalNormal, PointMass, recoverable_clamp
from kanerva.layers.dense import deep_linear
from kanerva.layers.evonorm import EvoNormS0
from kanerva.layers.residual import residual_stack, zeroed
from kanerva.seeding import Noise
from kanerva.shapes import Blocks, Embedding, FeatureMaps, KinMaps, PerImage, Readout, Traces


class ReadoutPosterior(nn.Module):
    """q(Z|X): amortised, straight from the embedding ("stable top branch", Fig. 5)."""

    def __init__(self, config: LinearReadoutConfig, embedding: int) -> None:
        super().__init__()
        self.net = deep_linear(
            embedding, config.hidden, 2 * config.size, spectral=config.spectral_norm
        )

    def forward(self, embedding: Embedding) -> DiagonalNormal:
        return DiagonalNormal.from_network(self.net(embedding))


class ReadoutPrior(nn.Module):
    """p(Z|M-hat, Y): the K traces stacked on channels, a convolutional encoder, a projection.

    EvoNorm-S0 keeps statistics to one sample: a prior must see the episode through M alone.
    """

    def __init__(self, config: PaperReadoutConfig, memory: PaperMemoryConfig) -> None:
        super().__init__()
        width, side = config.prior_width, memory.block
        layers: list[nn.Module] = [
            nn.Conv2d(memory.reads * memory.channels, width, 3, padding=1),
            EvoNormS0(width),
        ]
        for _ in range(2):
            layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), EvoNormS0(2 * width)]
            width, side = 2 * width, (side + 1) // 2
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side**2, 2 * config.size))

    def forward(self, traces: Traces) -> DiagonalNormal:
        stacked = traces.flatten(2, 3).flatten(0, 1)  # (B T, K Cm, h, w)
        return DiagonalNormal.from_network(self.net(stacked).unflatten(0, traces.shape[:2]))


# kpp: a readout with a global and a spatial part, and a posterior that starts at the prior


Normals = list[DiagonalNormal] | list[PointMass]


@dataclass(frozen=True)
class Reading:
    """A readout in parts. Each has a value, a prior, and the distribution it was sampled from.

    Densities are computed on demand, because training needs only the divergence. `beside` is not a
    part of z: the decoder sees it as it is.
    """

    values: list[Tensor]
    priors: Normals
    sources: Normals  # q, or p if z was sampled from p
    beside: KinMaps | None = None

    @property
    def readout(self) -> Readout:
        """What the decoder sees."""
        beside = [] if self.beside is None else [self.beside]
        return torch.cat([value.flatten(2) for value in [*self.values, *beside]], dim=-1)

    @property
    def kl(self) -> PerImage:
        """KL[q(z|.) || p(z|M, y)]; zero if z was sampled from p."""
        pairs = zip(self.sources, self.priors, strict=True)
        each = [source.kl(prior) for source, prior in pairs]  # pyright: ignore[reportArgumentType]
        return torch.stack(each).sum(dim=0)

    @property
    def log_prior(self) -> PerImage:
        """ln p(z|M, y) at this sample."""
        return self._log_prob(self.priors)

    @property
    def log_posterior(self) -> PerImage:
        """ln q(z|.) at this sample; the same as `log_prior` if z was sampled from p."""
        return self._log_prob(self.sources)

    def _log_prob(self, normals: Normals) -> PerImage:
        pairs = zip(normals, self.values, strict=True)
        return torch.stack([normal.log_prob(value) for normal, value in pairs]).sum(dim=0)


_SURE = -8.0  # log standard deviation of the outline part: practically deterministic
_INSIDE = 0.999  # largest magnitude of a block's number for which tanh is inverted


def before_tanh(numbers: Tensor) -> Tensor:
    """Invert the writer's tanh on the numbers of a block, in float32."""
    return recoverable_clamp(numbers.float(), -_INSIDE, _INSIDE).atanh()


class SpatialReadout(nn.Module):
    """p(z | M, y) from a trace, and q(z | x, M, y) from trace and sample (an extension of §3.3).

    z has a global part g of `size` numbers and a spatial part s of `channels` maps of a quarter of
    the image's side: p(z|.) = p(g | trace) p(s | g, trace). q is parametrised relative to the
    prior, in units of its standard deviation:

        mean = mu_p + sigma_p * delta,   std = sigma_p * exp(rho),   delta = rho = 0 at first

    So KL z starts at zero and grows only by what the sample adds to its block. With an outline, z
    has a third part: the trace itself before its tanh, with the same fixed variance in q and p.
    """

    def __init__(
        self,
        config: KppReadoutConfig,
        trace: tuple[int, int, int],
        features: int,
        side: tuple[int, int],
        outline: bool = False,
    ) -> None:
        super().__init__()
        self.side = side
        width, places = config.prior_width, side[0] * side[1]
        self.lift = nn.Linear(prod(trace), width * places)  # trace to quarter-size maps
        self.body = residual_stack(width, 1)
        self.embed = nn.Conv2d(features, width, 1)  # the sample's features, for q
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.p, self.q = nn.ModuleDict(), nn.ModuleDict()
        if config.size:
            self.shapes["global"] = (config.size,)
            self.p["global"] = nn.Sequential(
                nn.Flatten(), nn.Linear(width * places, 2 * config.size)
            )
            self.q["global"] = nn.Sequential(
                nn.Flatten(), zeroed(nn.Linear(2 * width * places, 2 * config.size))
            )
        if config.size and config.channels:
            self.tell = nn.Linear(config.size, width * places)  # conditions s on g
        if config.channels:
            self.shapes["spatial"] = (config.channels, *side)
            self.p["spatial"] = nn.Sequential(
                residual_stack(width, 1), nn.SiLU(), nn.Conv2d(width, 2 * config.channels, 1)
            )
            self.q["spatial"] = nn.Sequential(
                nn.Conv2d(2 * width, width, 1),
                residual_stack(width, 1),
                nn.SiLU(),
                zeroed(nn.Conv2d(width, 2 * config.channels, 1)),
            )
        if outline:
            self.shapes["outline"] = (prod(trace),)

    def forward(
        self,
        traces: Blocks,
        maps: FeatureMaps | None = None,
        *,
        beside: KinMaps | None = None,
        readout: Readout | None = None,
        sample: bool = True,
        generator: Noise = None,
    ) -> Reading:
        """Compute the parts in order. z comes from q if the sample's `maps` are given, else from p.

        `readout` sets z instead of sampling it. `sample=False` takes the mean of each part.
        `beside` holds maps that are added to the trace's own, and that the decoder sees too.
        """
        lead = traces.shape[:2]
        context = self.spread(traces)
        if beside is not None:
            context = context + beside.flatten(0, 1)
        context = self.body(context)
        seen = None if maps is None else self.embed(maps.flatten(0, 1))
        sizes = [prod(shape) for shape in self.shapes.values()]
        fixed = [None] * len(sizes)
        if readout is not None:
            fixed = readout[..., : sum(sizes)].split(sizes, dim=-1)
        values, priors, sources = [], [], []
        for (part, shape), value in zip(self.shapes.items(), fixed, strict=True):
            if part == "outline":
                mean = before_tanh(traces.flatten(2))
                prior = DiagonalNormal(mean, torch.full_like(mean, _SURE))
            else:
                output = self.p[part](context).unflatten(0, lead)
                prior = DiagonalNormal.from_network(output, dim=2)
            source = prior
            if seen is not None and part != "outline":
                output = self.q[part](torch.cat([context, seen], dim=1)).unflatten(0, lead)
                source = self._posterior(DiagonalNormal.from_network(output, dim=2), prior)
            if value is not None:
                value = value.unflatten(-1, shape)
            else:
                value = source.sample(generator) if sample else source.mean
            values.append(value)
            priors.append(prior)
            sources.append(source)
            if part == "global" and "spatial" in self.shapes:
                from_global = self.tell(value.flatten(0, 1))
                context = context + from_global.unflatten(-1, context.shape[1:])
        return Reading(values, priors, sources, beside)

    def spread(self, traces: Blocks) -> Float[Tensor, "N width Hq Wq"]:
        """Traces as quarter-size maps."""
        return self.lift(traces.flatten(0, 1).flatten(1)).unflatten(-1, (-1, *self.side))

    def _posterior(self, change: DiagonalNormal, prior: DiagonalNormal) -> DiagonalNormal:
        """q from the network's output, which is relative to the prior (see the class)."""
        mean = prior.mean + prior.std * change.mean
        return DiagonalNormal(mean, prior.log_std + change.log_std)


@dataclass(frozen=True)
class SpatialPrior:
    """p(z | M, y) of `kpp`, part by part: the spatial part depends on the global one."""

    readout: SpatialReadout
    traces: Blocks
    beside: KinMaps | None = None

    @property
    def mean(self) -> Readout:
        """The mean of each part, given the means of the parts before it."""
        return self.readout(self.traces, beside=self.beside, sample=False).readout

    def sample(self, generator: Noise = None) -> Readout:
        return self.readout(self.traces, beside=self.beside, generator=generator).readout

    def log_prob(self, value: Readout) -> PerImage:
        return self.readout(self.traces, beside=self.beside, readout=value).log_prior
