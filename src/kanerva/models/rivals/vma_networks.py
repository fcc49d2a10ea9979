"""The parts of `vma`: templates, discrete addresses over them, gradient estimators for a bound with
a discrete latent, and the networks that read a template."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kanerva.config import VmaConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, as_normal, as_uniform
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.layers.dense import one_hidden
from kanerva.memory.heap import Memory
from kanerva.models.base import Handles, MemoryModel
from kanerva.readout import Reading
from kanerva.seeding import Noise, normal, uniform
from kanerva.shapes import DecoderOutput, Embedding, MemoryMap, Readout

_SHARPEST = math.log(100.0)  # ours: the largest log of the learned scale of cosines
_PIXEL_BITS: dict[str, int] = {"bernoulli": 1, "logistic_mixture": 8}  # per pixel and channel

Addresses = Int[Tensor, "B N"]
LogChances = Float[Tensor, "B N M"]  # log-probabilities over M templates, for each image
Hidden = Bool[Tensor, "T M"]  # True: the template is hidden from the image
PerDraw = Float[Tensor, "k B T"]  # a number for each of k samples


def vimco(log_weights: PerDraw, log_chances: PerDraw) -> Float[Tensor, "B T"]:
    """ln (1/k) sum_i w_i, with an unbiased gradient of its expectation (Mnih & Rezende 2016).

    w_i = p(x, z_i, a_i) / q(z_i, a_i) can be differentiated through z_i, but not through the choice
    of a_i. So ln q(a_i) is multiplied by what sample i adds to the bound: the bound minus a
    baseline, in which w_i is replaced by the geometric mean of the other weights. The baseline does
    not depend on sample i, so the estimate is unbiased.
    """
    k = len(log_weights)
    if k < 2:
        raise UserError(f"VIMCO compares samples with each other: it needs at least 2, got {k}")
    bound = log_weights.logsumexp(dim=0) - math.log(k)
    fixed = log_weights.detach()
    diagonal = torch.eye(k, dtype=torch.bool, device=fixed.device)[:, :, None, None]  # samples i, j
    others = torch.where(diagonal, 0.0, fixed).sum(dim=1) / (k - 1)
    baseline = torch.where(diagonal, others[:, None], fixed).logsumexp(dim=1) - math.log(k)
    score = ((bound.detach() - baseline) * log_chances).sum(dim=0)
    return bound + score - score.detach()


def one_sample(log_weights: PerDraw, log_chances: PerDraw) -> Float[Tensor, "B T"]:
    """The mean of ln w_i, with an unbiased gradient of its expectation, the one-sample bound:
    ln q(a_i) is multiplied by how much better sample i is than the others."""
    k = len(log_weights)
    fixed = log_weights.detach()
    score = ((fixed - fixed.mean(dim=0)) / (k - 1) * log_chances).sum(dim=0)
    return log_weights.mean(dim=0) + score - score.detach()


def expected(log_chances: LogChances, values: LogChances) -> Float[Tensor, "B N"]:
    """The sum over templates of q(a) times a value; 0 where q(a) is 0, also for infinite values."""
    chances = log_chances.exp()
    return torch.where(chances > 0, chances * values, 0.0).sum(dim=-1)


def categorical_kl(q: LogChances, p: LogChances) -> Float[Tensor, "B N"]:
    """KL[q(a) || p(a)]. A template that is hidden from both adds nothing (0 ln 0/0 = 0)."""
    known = ~q.isneginf()
    return expected(q, torch.where(known, q, 0.0) - torch.where(known, p, 0.0))


def sample_addresses(log_chances: LogChances, generator: Noise) -> Addresses:
    """Sample one address for each row: the argmax of ln q(a) + Gumbel noise."""
    noise = uniform(tuple(log_chances.shape), generator, log_chances.device).clamp(min=1e-30)
    return (log_chances - (-noise.log()).log()).argmax(dim=-1)


def at(addresses: Addresses, values: LogChances) -> Float[Tensor, "B N"]:
    """The value at each address. Not a gather: this has a deterministic gradient."""
    chosen = addresses[..., None] == torch.arange(values.shape[-1], device=values.device)
    return torch.where(chosen, values, 0.0).sum(dim=-1)


@dataclass(frozen=True)
class Templates:
    """The contents of a memory: images, and their embeddings."""

    pixels: Float[Tensor, "B M C H W"]
    embedding: Float[Tensor, "B M D"]

    def __len__(self) -> int:
        return self.pixels.shape[1]

    def at(self, addresses: Addresses) -> "Templates":
        """The template at each address. Embeddings are selected by a matrix product, whose gradient
        is deterministic."""
        index = addresses[..., None, None, None].expand(-1, -1, *self.pixels.shape[2:])
        pixels = self.pixels.gather(1, index)
        chosen = addresses[..., None] == torch.arange(len(self), device=addresses.device)
        return Templates(pixels, chosen.to(self.embedding.dtype) @ self.embedding)

    def only(self, a: int, length: int) -> "Templates":
        """Template `a`, repeated for all images of an episode."""
        pixels = self.pixels[:, a : a + 1].expand(-1, length, -1, -1, -1)
        return Templates(pixels, self.embedding[:, a : a + 1].expand(-1, length, -1))


def own_hidden(length: int, device: torch.device) -> Hidden:
    """Hide the own template of every second image, starting with the second."""
    hidden = torch.eye(length, dtype=torch.bool, device=device)
    odd = torch.arange(length, device=device) % 2 == 1
    return hidden & odd[:, None]


def hide(scores: LogChances, hidden: Hidden | None) -> LogChances:
    """Set the scores of hidden templates to -inf."""
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


class TemplateModel(MemoryModel):
    """The factors of `vma`'s p and q: a memory of templates, an address, and z and x given it."""

    has_keys = False
    config: VmaConfig

    def __init__(self, config: VmaConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        readout, hidden = config.readout, config.keys.hidden
        self.encoder = EpisodeEncoder(config.encoder, channels)
        features = self.encoder.features
        self.score = one_hidden(features, hidden, 1)
        self.query, self.key = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.key.load_state_dict(self.query.state_dict())  # initially, equal images match
        self.log_scale = nn.Parameter(torch.full((1,), math.log(10.0)))
        self.prior = one_hidden(features, readout.hidden, 2 * readout.size)
        self.posterior = one_hidden(2 * features, readout.hidden, 2 * readout.size)
        outputs = self.likelihood.outputs(channels)
        self.told = nn.Linear(features, readout.size)
        self.decoder = Decoder(config.decoder, 2 * readout.size, outputs + 1, height, width)
        self.copied = nn.Conv2d(channels, outputs, 3, padding=1)

    @property
    def key_shape(self) -> tuple[int, ...]:
        """One number, which `addresses_of` maps to a template."""
        return (1,)

    # The memory: templates, verbatim

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        channels, height, width = self.config.image
        return (length * channels, height, width)

    def memory_bits(self, length: int, dtype: str = "float32") -> float:
        """1 bit for each binary pixel, else 8 per channel. Templates are stored exactly, so `dtype`
        and `memory_dtype` have no effect."""
        return float(math.prod(self.memory_shape(length)) * _PIXEL_BITS[self.config.likelihood])

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse maps of another image size; any number of templates is accepted."""
        channels, height, width = self.config.image
        if shape[1:] != (height, width) or shape[0] == 0 or shape[0] % channels:
            raise UserError(
                f"this model's memories are (templates * {channels}, {height}, {width}), "
                f"got {shape}"
            )

    def images_of(self, maps: MemoryMap) -> Float[Tensor, "B M C H W"]:
        """The images that a memory holds."""
        return maps.unflatten(1, (-1, self.config.image[0]))

    def templates(self, maps: MemoryMap) -> Templates:
        """The images of a memory with their embeddings: all that p sees."""
        pixels = self.images_of(maps)
        return Templates(pixels, self.encoder(pixels))

    def addresses_of(self, keys: Float[Tensor, "B N 1"], count: int) -> Addresses:
        """The template that each key points at: N(0, 1) is cut into `count` equal parts."""
        place = (as_uniform(keys[..., 0]) + 1) / 2
        return (place * count).long().clamp(0, count - 1)

    def keys_of(self, addresses: Addresses, count: int) -> Float[Tensor, "B N 1"]:
        """The key at the middle of each address's part; the inverse of `addresses_of`."""
        return as_normal((2 * addresses[..., None] + 1) / count - 1)

    def read(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"] | None = None,
        *,
        handles: Handles | None = None,
    ) -> DiagonalNormal:
        """p(z | m_a) for the templates that keys point at; or handles, which are their indices."""
        held = self.templates(self.as_maps(memory))
        if (keys is None) == (handles is None):
            raise UserError("say where to read: keys, or handles")
        if keys is not None:
            addresses = self.addresses_of(self.check_keys(memory, keys)[1], len(held))
        else:
            addresses = torch.as_tensor(handles, device=self.device).view(len(held.pixels), -1)
            if bool(((addresses < 0) | (addresses >= len(held))).any()):
                raise UserError("this memory does not hold all of these handles")
        return self.readout_prior(held.at(addresses))

    # The address

    def address_prior(
        self, held: Templates, count: int, hidden: Hidden | None = None
    ) -> LogChances:
        """ln p(a | M), a softmax over a score of each template, for `count` images. It is the same
        for all images, except for hidden templates."""
        with torch.autocast(self.device.type, enabled=False):
            scores = self.score(held.embedding.float())[..., 0]
        return hide(scores[:, None].expand(-1, count, -1), hidden).log_softmax(dim=-1)

    def address_posterior(
        self, seen: Embedding, held: Templates, hidden: Hidden | None = None
    ) -> LogChances:
        """ln q(a | x, M): a softmax over scaled cosines of an image's query and templates' keys."""
        with torch.autocast(self.device.type, enabled=False):
            queries = F.normalize(self.query(seen.float()), dim=-1)
            keys = F.normalize(self.key(held.embedding.float()), dim=-1)
            alike = self.log_scale.clamp(max=_SHARPEST).exp() * (queries @ keys.mT)
        return hide(alike, hidden).log_softmax(dim=-1)

    # z and x, given the template of each image

    def readout_prior(self, read: Templates) -> DiagonalNormal:
        """p(z | m_a)."""
        return DiagonalNormal.from_network(self.prior(read.embedding))

    def infer(
        self, seen: Embedding, read: Templates, noise: Float[Tensor, "B T L"] | None
    ) -> Reading:
        """z from q(z | x, m_a) at this noise, or its mean if None; with both q and p(z | m_a).

        q is a residual of p: mean = mu_p + sigma_p * delta, std = sigma_p * exp(rho).
        """
        prior = self.readout_prior(read)
        both = torch.cat([seen, read.embedding], dim=-1)
        residual = DiagonalNormal.from_network(self.posterior(both))
        mean, log_std = prior.mean + prior.std * residual.mean, prior.log_std + residual.log_std
        posterior = DiagonalNormal(mean, log_std)
        readout = mean if noise is None else mean + posterior.std * noise
        return Reading([readout], [prior], [posterior])

    def decode(self, readout: Readout, read: Templates) -> DecoderOutput:
        """p(x | z, m_a): decode z and the template's embedding, and add the template's pixels,
        multiplied by a gate, which is the last map of the decoder."""
        context = self.told(read.embedding)  # `told`: the name in saved weights
        output = self.decoder(torch.cat([readout, context.to(readout.dtype)], dim=-1))
        pixels, gate = output[:, :, :-1], output[:, :, -1:]
        copied = self.copied(2 * read.pixels.flatten(0, 1) - 1).unflatten(0, readout.shape[:2])
        return pixels + gate * copied

    def _noise(self, batch: int, count: int, generator: Noise) -> Tensor:
        return normal((batch, count, self.config.readout.size), generator, self.device)
