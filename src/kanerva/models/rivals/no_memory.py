"""`no-memory`: the paper's ablation (§4.2). The readout's prior comes from the episode's pooled
embedding by a dense net as large as writer, key network and readout prior together.

    memory = model.write(images)                # the pooled embedding: all p sees of an episode
    samples = model.generate(memory, 64)
    terms = model.elbo(images)

The pooled embedding counts as memory: p(z | mean_t E) bounds -ln p(x | that vector). A prior made
from a sample's own embedding would bound -ln p(x_t | e_t) only, whose floor is 0.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import ModelConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.memory.keys import KeyNetwork
from kanerva.memory.writers import PooledWriter
from kanerva.models.base import ElboTerms, Images, JointDensity, MemoryModel, Weigh, all_but_one
from kanerva.readout import ReadoutPosterior, ReadoutPrior
from kanerva.shapes import Embedding, Episode, MemoryMap, PerImage, Readout


def replaced_parameters(config: ModelConfig, embedding: int) -> int:
    """How many the memory of `kpp-paper` has: its writer, its keys, its reads."""
    with torch.device("meta"):
        parts = [
            PooledWriter(config.memory, embedding),
            KeyNetwork(config.keys, embedding, config.memory.reads),
            ReadoutPrior(config.readout, config.memory),
        ]
    return sum(p.numel() for part in parts for p in part.parameters())


def dense_net(inputs: int, outputs: int, parameters: int) -> nn.Sequential:
    """Three layers with SiLU between, as wide as gives so many parameters."""
    # (inputs + 1) h + (h + 1) h + (h + 1) outputs = parameters
    b = inputs + 2 + outputs
    hidden = max(1, round((math.sqrt(b * b + 4 * max(parameters - outputs, 1)) - b) / 2))
    sizes = [inputs, hidden, hidden, outputs]
    layers: list[nn.Module] = []
    for a, c in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(a, c), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class NoMemory(MemoryModel):
    """Context without a memory: one vector for an episode, and nothing to look up in it."""

    recalls = has_keys = False
    reconstructed = "reconstructed: q(z|x)"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        embedding = self.encoder.features
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        size = replaced_parameters(config, embedding)
        self.readout_prior = dense_net(embedding, 2 * config.readout.size, size)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.readout.size, outputs, height, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (0,)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (1, 1, self.encoder.features)

    def traces(self, maps: MemoryMap, keys: Float[Tensor, "B T 0"]) -> Float[Tensor, "B T D"]:
        """The same vector for every image: keys say nothing."""
        return maps[:, 0].expand(-1, keys.shape[1], -1)

    def prior(self, maps: MemoryMap) -> DiagonalNormal:
        """p(z | pooled embedding), (B, 1, L): one for all images of an episode."""
        return DiagonalNormal.from_network(self.readout_prior(maps[:, 0]))

    # The bound

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """ln p(x|z) and KL[q(z|x) || p(z | pooled embedding)]; there is no key to charge."""
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        maps = self.pooled(embedding) if memory is None else self.as_maps(memory, images)
        terms = self.terms(episode, embedding, maps, sample=sample, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    def pooled(self, embedding: Embedding) -> MemoryMap:
        """All that p sees of an episode."""
        return self.settled(embedding.mean(dim=1)[:, None, None].float())

    def terms(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        posterior = self.readout_posterior(embedding)
        readout = posterior.sample(generator) if sample else posterior.mean
        kl = posterior.kl(self.prior(maps))
        return ElboTerms(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_kl=kl,
            key_kl=torch.zeros_like(kl),
        )

    # Write, generate

    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory:
        """The episode's pooled embedding."""
        maps = self.pooled(self.encoder(self.as_episodes(images)))
        return Memory(maps if images.ndim == 5 else maps[0])

    def empty(self, batch: int | None = None) -> Memory:
        """A vector of zeros."""
        lead = () if batch is None else (batch,)
        return Memory(torch.zeros(*lead, *self.memory_shape(0), device=self.device))

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "*key"], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Draw z from the episode's prior and decode its expected pixels."""
        memory = self.given(memory)
        if near is not None:
            raise UserError("no-memory has no keys: there is nothing to be near to")
        if num_samples < 1:
            raise UserError(f"num_samples must be at least 1, got {num_samples}")
        prior = self.prior(self.as_maps(memory))
        count = (-1, num_samples, -1)
        drawn = DiagonalNormal(prior.mean.expand(count), prior.log_std.expand(count))
        images = self.likelihood.mean(self.decoder(drawn.sample(generator)))
        return images if memory.is_batch else images[0]

    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int = 10,
        sample: bool = False,
        observed: Float[Tensor, "*B T H W"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S *B T C H W"]:
        raise UserError("no-memory has no keys: nothing can be looked up and recalled")

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Decode the mean of q(z|x)."""
        posterior = self.readout_posterior(self.encoder(self.as_episodes(images)))
        pixels = self.likelihood.mean(self.decoder(posterior.mean))
        return pixels if images.ndim == 5 else pixels[0]

    # For scores

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: Float[Tensor, "B T 0"], readout: Readout
    ) -> JointDensity:
        """ln p(x, z | pooled embedding), from that vector and z alone."""
        log_prior = self.prior(maps).log_prob(readout)
        return JointDensity(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_log_prior=log_prior,
            key_log_prior=torch.zeros_like(log_prior),
        )

    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """ln p(x, z | pooled embedding) - ln q(z | x), draw by draw."""
        embedding = self.encoder(episode)
        maps, posterior = self.pooled(embedding), self.readout_posterior(embedding)
        keys = embedding.new_zeros(*embedding.shape[:2], 0)

        def draw() -> PerImage:
            readout = posterior.sample(generator)
            joint = self.joint(episode, maps, keys, readout)
            return joint.total - posterior.log_prob(readout)

        return draw

    def left_out(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image under the pooled embedding of the rest of its episode (a control)."""
        episode = self.as_pixels(images)
        batch, length = episode.shape[:2]
        rest = all_but_one(length, episode.device)
        embedding = self.encoder(episode)  # without temporal shift: each image by itself
        maps = self.pooled(embedding[:, rest].flatten(0, 1))
        alone = embedding.flatten(0, 1)[:, None]
        terms = self.terms(episode.flatten(0, 1)[:, None], alone, maps, generator=generator)
        shape = (batch, length) if images.ndim == 5 else (length,)
        return terms.view(shape)

    def permuted(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """There are no keys to exchange: the bound itself."""
        return self.elbo(images, generator=generator)
