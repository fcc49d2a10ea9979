"""Kanerva++ (Ramapuram, Wu, Kalousis 2021), section 3 of the paper as code.

A memory's life in four calls:

    memory = model.write(images)                # an episode becomes one small map
    steps = model.recall(memory, noisy)         # read it back, again and again
    samples = model.generate(memory, 64)        # look where keys from the prior point
    terms = model.elbo(images)                  # how well the memory explains the episode, in nats

The generative side is p(y) = N(0, 1), p(z | M, y) from the blocks of M that y points at, and
p(x | z). It sees an episode through M only: no embedding, index or batch statistic passes by.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.config import ModelConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, mapped
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.memory.blocks import read_blocks
from kanerva.memory.heap import Memory
from kanerva.memory.keys import KeyNetwork, window
from kanerva.memory.writers import PooledWriter
from kanerva.models.base import ElboTerms, Images, JointDensity, MemoryModel, Weigh, all_but_one
from kanerva.readout import ReadoutPosterior, ReadoutPrior
from kanerva.shapes import Embedding, Episode, Keys, MemoryMap, PerImage, Readout, Traces


class KppPaper(MemoryModel):
    """The paper's model, `kpp-paper`: pooled writer, Gaussian keys, vector readout."""

    reconstructed = "reconstructed: q(z|x), the memory not used"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        embedding = self.encoder.features
        self.writer = PooledWriter(config.memory, embedding)
        self.key_posterior = KeyNetwork(config.keys, embedding, config.memory.reads)
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        self.readout_prior = ReadoutPrior(config.readout, config.memory)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.readout.size, outputs, height, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (self.config.memory.reads, 3)

    # M-hat and the readout prior (Eq. 5, App. E)

    def traces(self, maps: MemoryMap, keys: Keys) -> Traces:
        """K blocks for each key, cut out of the memory (Eq. 5)."""
        return read_blocks(maps, window(keys), self.config.memory.block)

    def read_maps(self, maps: MemoryMap, keys: Keys) -> DiagonalNormal:
        """What the blocks that keys point at say of the readout: its prior."""
        return self.readout_prior(self.traces(maps, keys))

    # The bound (§3.2)

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """The three terms of L_T (Eq. 4), given the episode's own memory or another.

        One sample of each latent; `sample=False` takes posterior means instead (not a bound).
        """
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        maps = (
            self.settled(self.writer(embedding)) if memory is None else self.as_maps(memory, images)
        )
        terms = self.terms(episode, embedding, maps, sample=sample, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    def terms(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """L_T from its parts: q from the embedding, p from the memory."""
        return self._terms(
            episode, embedding, maps, self.key_posterior(embedding), sample, generator
        )

    def _terms(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        q_keys: DiagonalNormal,
        sample: bool,
        generator: torch.Generator | None,
    ) -> ElboTerms:
        q_readout = self.readout_posterior(embedding)
        keys = q_keys.sample(generator) if sample else q_keys.mean
        readout = q_readout.sample(generator) if sample else q_readout.mean
        return ElboTerms(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_kl=q_readout.kl(self.read_maps(maps, keys)),
            key_kl=q_keys.kl(DiagonalNormal.standard_like(keys)),
        )

    # Write (§3.3, Fig. 3)

    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory:
        """Embed the episode, pool it, write M = f_mem(f_enc(X)): one deterministic pass, for
        which no noise is drawn."""
        maps = self.settled(self.writer(self.encoder(self.as_episodes(images))))
        return Memory(maps if images.ndim == 5 else maps[0])

    # Generate (§3.4, Fig. 4)

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "K 3"], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Draw keys from their prior, read, draw a readout, decode its expected pixels.

        `near=(key, spread)` draws keys around one instead: y + spread * noise (§4.1.1).
        """
        memory = self.given(memory)
        maps, keys = self.prior_keys(memory, num_samples, near, generator)
        readout = self.read_maps(maps, keys).sample(generator)
        images = self.likelihood.mean(self.decoder(readout))
        return images if memory.is_batch else images[0]

    # Read, and iterative read (§3.5, Fig. 5)

    def read(self, memory: Memory, keys: Float[Tensor, "*B T K 3"]) -> DiagonalNormal:
        """The learned prior p(Z | M-hat, Y), (B, T, L); B = 1 for one episode."""
        maps, keys = self.as_maps(memory), keys if keys.ndim == 4 else keys[None]
        if keys.shape[0] != len(maps) or keys.shape[2] != self.config.memory.reads:
            raise UserError(f"keys {tuple(keys.shape)} do not fit memory {tuple(maps.shape)}")
        return self.read_maps(maps, keys)

    @torch.no_grad()
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
        """Hold M; infer a key from the last picture, read there, decode, again: every step.
        The key network sees whole pictures: it has no use for `observed`.

        Eq. 7 draws Y* ~ q(Y | X-hat); by default we take the mean of each distribution, so that
        recalling is a function of memory and cue. `sample=True` draws keys as printed.
        """
        maps = self.as_maps(memory, cue)

        def read(picture: Episode) -> Episode:
            posterior = self.key_posterior(self.encoder(picture))
            keys = posterior.sample(generator) if sample else posterior.mean
            readout = self.read_maps(maps, keys).mean
            return self.likelihood.mean(self.decoder(readout))

        return self.again(memory, cue, steps, read)

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Decode the mean of q(Z|X), Fig. 5's training branch: the memory takes no part in it."""
        embedding = self.encoder(self.as_episodes(images))
        pixels = self.likelihood.mean(self.decoder(self.readout_posterior(embedding).mean))
        return pixels if images.ndim == 5 else pixels[0]

    # For scores: densities, importance weights, a control

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: Keys, readout: Readout
    ) -> JointDensity:
        """ln p(x, z, y | M): everything the generative side says, from M, y and z alone."""
        return JointDensity(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_log_prior=self.read_maps(maps, keys).log_prob(readout),
            key_log_prior=DiagonalNormal.standard_like(keys).log_prob(keys),
        )

    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """ln p(x, z, y | M) - ln q(z, y | X), draw by draw: their log-mean-exp is IWAE's bound."""
        embedding = self.encoder(episode)
        maps = self.settled(self.writer(embedding))
        q_keys, q_readout = self.key_posterior(embedding), self.readout_posterior(embedding)

        def draw() -> PerImage:
            keys, readout = q_keys.sample(generator), q_readout.sample(generator)
            joint = self.joint(episode, maps, keys, readout)
            return joint.total - q_keys.log_prob(keys) - q_readout.log_prob(readout)

        return draw

    def left_out(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image scored under a memory written from the rest of its episode (a control).

        q may see anything, so it stays that of the whole episode; only M changes.
        """
        episode = self.as_pixels(images)
        batch, length = episode.shape[:2]
        rest = all_but_one(length, episode.device)
        maps = [self.settled(self.writer(self.encoder(one[rest]))) for one in episode]
        maps = torch.cat(maps)  # (B T, ...)
        alone = self.encoder(episode).flatten(0, 1)[:, None]  # (B T, 1, D)
        terms = self.terms(episode.flatten(0, 1)[:, None], alone, maps, generator=generator)
        shape = (batch, length) if images.ndim == 5 else (length,)
        return terms.view(shape)

    def permuted(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image read at its neighbour's key (a control)."""
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        rolled = mapped(self.key_posterior(embedding), lambda value: value.roll(1, dims=1))
        maps = self.settled(self.writer(embedding))
        terms = self._terms(episode, embedding, maps, rolled, True, generator)
        return terms if images.ndim == 5 else terms[0]

    def empty(self, batch: int | None = None) -> Memory:
        """A memory of zeros."""
        lead = () if batch is None else (batch,)
        return Memory(torch.zeros(*lead, *self.config.memory.shape, device=self.device))
