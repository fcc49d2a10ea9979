"""What `vma` is made of: templates, discrete addresses over them, estimators of the gradient of a
bound that chooses among them, and the networks that read one."""

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

_SHARPEST = math.log(100.0)  # ours: of the learned scale of cosines
_WHOLE: dict[str, int] = {"bernoulli": 1, "logistic_mixture": 8}  # bits of a channel's pixel

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


class TemplateModel(MemoryModel):
    """What p and q of `vma` are made of: a memory of templates, an address, z and x given one."""

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
        self.key.load_state_dict(self.query.state_dict())  # like finds like from the first step
        self.log_scale = nn.Parameter(torch.full((1,), math.log(10.0)))
        self.prior = one_hidden(features, readout.hidden, 2 * readout.size)
        self.posterior = one_hidden(2 * features, readout.hidden, 2 * readout.size)
        outputs = self.likelihood.outputs(channels)
        self.told = nn.Linear(features, readout.size)
        self.decoder = Decoder(config.decoder, 2 * readout.size, outputs + 1, height, width)
        self.copied = nn.Conv2d(channels, outputs, 3, padding=1)

    @property
    def key_shape(self) -> tuple[int, ...]:
        """One number: the quantile of a template in the list. See `addresses_of`."""
        return (1,)

    # The memory: templates, verbatim

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        channels, height, width = self.config.image
        return (length * channels, height, width)

    def memory_bits(self, length: int, dtype: str = "float32") -> float:
        """Pixels as they are: 1 bit each where they are 0 or 1, else 8. There is nothing to round,
        so `dtype` and `memory_dtype` change nothing."""
        return float(math.prod(self.memory_shape(length)) * _WHOLE[self.config.likelihood])

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Memories of any number of templates serve."""
        channels, height, width = self.config.image
        if shape[1:] != (height, width) or shape[0] == 0 or shape[0] % channels:
            raise UserError(
                f"this model's memories are (templates * {channels}, {height}, {width}), "
                f"got {shape}"
            )

    def images_of(self, maps: MemoryMap) -> Float[Tensor, "B M C H W"]:
        """A memory as the images that it holds."""
        return maps.unflatten(1, (-1, self.config.image[0]))

    def templates(self, maps: MemoryMap) -> Templates:
        """The same, embedded: all that p sees."""
        pixels = self.images_of(maps)
        return Templates(pixels, self.encoder(pixels))

    def addresses_of(self, keys: Float[Tensor, "B N 1"], count: int) -> Addresses:
        """The template each key points at: N(0, 1) cut into `count` equal parts."""
        place = (as_uniform(keys[..., 0]) + 1) / 2
        return (place * count).long().clamp(0, count - 1)

    def keys_of(self, addresses: Addresses, count: int) -> Float[Tensor, "B N 1"]:
        """The key in the middle of a template's part."""
        return as_normal((2 * addresses[..., None] + 1) / count - 1)

    def read(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"] | None = None,
        *,
        handles: Handles | None = None,
    ) -> DiagonalNormal:
        """p(z | m_a) at the templates that keys point at, or that handles number."""
        held = self.templates(self.as_maps(memory))
        if (keys is None) == (handles is None):
            raise UserError("say where to read: keys, or handles")
        if keys is not None:
            addresses = self.addresses_of(self.check_keys(memory, keys)[1], len(held))
        else:
            addresses = torch.as_tensor(handles, device=self.device).view(len(held.pixels), -1)
            if bool(((addresses < 0) | (addresses >= len(held))).any()):
                raise UserError("a handle given is not held by this memory")
        return self.readout_prior(held.at(addresses))

    # The address

    def address_prior(
        self, held: Templates, count: int, hidden: Hidden | None = None
    ) -> LogChances:
        """ln p(a | M), a softmax over a score of each template, for so many images: the same for
        all that may read the same templates."""
        with torch.autocast(self.device.type, enabled=False):
            scores = self.score(held.embedding.float())[..., 0]
        return hide(scores[:, None].expand(-1, count, -1), hidden).log_softmax(dim=-1)

    def address_posterior(
        self, seen: Embedding, held: Templates, hidden: Hidden | None = None
    ) -> LogChances:
        """ln q(a | x, M): by how alike an image's query and a template's key are."""
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
        """q(z | x, m_a) beside p(z | m_a), and z at this noise; at q's mean for None.

        mean = mu_p + sigma_p * delta, std = sigma_p * exp(rho): q says how an image differs.
        """
        prior = self.readout_prior(read)
        both = torch.cat([seen, read.embedding], dim=-1)
        said = DiagonalNormal.from_network(self.posterior(both))
        mean, log_std = prior.mean + prior.std * said.mean, prior.log_std + said.log_std
        posterior = DiagonalNormal(mean, log_std)
        readout = mean if noise is None else mean + posterior.std * noise
        return Reading([readout], [prior], [posterior])

    def decode(self, readout: Readout, read: Templates) -> DecoderOutput:
        """p(x | z, m_a): z and the template's embedding, and its pixels as far as a map of the
        decoder's lets them through."""
        told = self.told(read.embedding)
        output = self.decoder(torch.cat([readout, told.to(readout.dtype)], dim=-1))
        pixels, gate = output[:, :, :-1], output[:, :, -1:]
        copied = self.copied(2 * read.pixels.flatten(0, 1) - 1).unflatten(0, readout.shape[:2])
        return pixels + gate * copied

    def _noise(self, batch: int, count: int, generator: Noise) -> Tensor:
        return normal((batch, count, self.config.readout.size), generator, self.device)
