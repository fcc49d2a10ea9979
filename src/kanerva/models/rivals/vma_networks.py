"""The networks of `vma`: a memory that is a list of templates; p and q of reading one of them."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import VmaConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, as_normal, as_uniform
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.layers.dense import one_hidden
from kanerva.memory.heap import Memory
from kanerva.models.base import Handles, MemoryModel
from kanerva.models.rivals.templates import (
    Addresses,
    Hidden,
    LogChances,
    Templates,
    hide,
)
from kanerva.readout import Reading
from kanerva.seeding import Noise, normal
from kanerva.shapes import DecoderOutput, Embedding, MemoryMap, Readout

_SHARPEST = math.log(100.0)  # ours: of the learned scale of cosines
_WHOLE: dict[str, int] = {"bernoulli": 1, "logistic_mixture": 8}  # bits of a channel's pixel


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
