"""What all latent variable models share: the bound, and everything that follows from its parts.

A model has a memory M, keys y and a readout z, with

    p(y) = N(0, 1),  p(z | M, y),  p(x | z)            the generative side, which sees X through M
    q(y | .),  q(z | x, M, y)                          the posteriors, which may see anything

It supplies an encoder, a decoder and the four abstract methods below. From them follow elbo,
left_out, permuted, importance weights, generate, recall and reconstruct.
"""

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.distributions import (
    DiagonalNormal,
    KeyPosterior,
    ReadDistribution,
    map_samples,
    no_keys,
)
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.base import (
    Handles,
    Images,
    LogWeights,
    MemoryModel,
    Near,
    Observed,
    all_but_one,
)
from kanerva.models.terms import ElboTerms, JointDensity
from kanerva.readout import Reading
from kanerva.seeding import Noise, normal
from kanerva.shapes import Episode, MemoryMap, PerImage, Readout

Features = Float[Tensor, "B T *features"]  # the encoder's output for each image
AnyKeys = Float[Tensor, "B T *key"]


class LatentModel(MemoryModel):
    """A model with latent variables M, y and z: see the top of this file."""

    encoder: nn.Module
    encodes_alone = True  # False: an image's features depend on the rest of its episode

    # What a model supplies

    @abstractmethod
    def write_maps(
        self, episode: Episode, features: Features, *, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        """Write whole episodes to M. If M is random, `sample=False` takes its mean."""

    @abstractmethod
    def key_posterior(self, features: Any, maps: MemoryMap) -> KeyPosterior:
        """q(y | .) of each image that reads these memories."""

    @abstractmethod
    def read_maps(self, maps: MemoryMap, keys: Any) -> ReadDistribution:
        """p(z | M, y)."""

    @abstractmethod
    def readout_posterior_at(self, features: Any, prior: Any) -> Any:
        """q(z | x, M, y), given p(z | M, y)."""

    def infer(
        self,
        features: Any,
        maps: MemoryMap,
        keys: AnyKeys,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> Reading:
        """Sample z of each image from its posterior, or take its mean; with p(z | M, y)."""
        prior = self.read_maps(maps, keys)
        posterior = self.readout_posterior_at(features, prior)
        readout = posterior.sample(generator) if sample else posterior.mean
        return Reading([readout], [prior], [posterior])  # pyright: ignore[reportArgumentType]

    def log_likelihood(self, readout: Readout, episode: Episode) -> PerImage:
        """ln p(x | z)."""
        return self.likelihood.log_prob(self.decoder(readout), episode)

    def write_episode(
        self, episode: Episode, features: Any, *, sample: bool = True, generator: Noise = None
    ) -> tuple[MemoryMap, KeyPosterior]:
        """Write whole episodes to M; return also q(y | .) of each image."""
        maps = self.write_maps(episode, features, sample=sample, generator=generator)
        maps = self.quantised(maps)
        return maps, self.key_posterior(features, maps)

    # The bound (§3.2)

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """The three terms of L_T (Eq. 4), for an episode in its own memory or in a given one.

        One sample of each latent; `sample=False` takes posterior means instead (not a bound).
        """
        episode = self.as_pixels(images)
        features = self.encoder(episode)
        if memory is None:
            maps, keys = self.write_episode(episode, features, sample=sample, generator=generator)
        else:
            maps = self.as_maps(self.require_memory(memory), images)
            keys = self.key_posterior(features, maps)
        terms = self.terms(episode, features, maps, keys, sample=sample, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    def terms(
        self,
        episode: Episode,
        features: Any,
        maps: MemoryMap,
        keys: KeyPosterior,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """L_T from its parts. The prior and posterior of z and the decoder use one key sample."""
        y = keys.sample(generator) if sample else keys.mean
        reading = self.infer(features, maps, y, sample=sample, generator=generator)
        return ElboTerms(
            log_likelihood=self.log_likelihood(reading.readout, episode),
            readout_kl=reading.kl,
            key_kl=keys.kl_to_prior(),
        )

    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Score each image under a memory written from the rest of its episode (a control).

        q may see anything, so its features of the image come from the whole episode.
        """
        episode = self.as_pixels(images)
        rest = all_but_one(episode.shape[1], episode.device)
        features = self.encoder(episode)
        if self.encodes_alone:
            others = features[:, rest].flatten(0, 1)  # (B T, T - 1, ...)
        else:
            others = torch.cat([self.encoder(one[rest]) for one in episode])
        maps, _ = self.write_episode(episode[:, rest].flatten(0, 1), others, generator=generator)
        single, own = (value.flatten(0, 1)[:, None] for value in (episode, features))
        terms = self.terms(single, own, maps, self.key_posterior(own, maps), generator=generator)
        return terms.view(tuple(images.shape[:-3]))

    def permuted(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Score each image with its neighbour's key (a control)."""
        if not self.remembers:
            raise UserError(f"{self.config.name} has no memory: there are no keys to exchange")
        episode = self.as_pixels(images)
        features = self.encoder(episode)
        maps, keys = self.write_episode(episode, features, generator=generator)
        rolled = map_samples(keys, lambda value: value.roll(1, dims=1))
        terms = self.terms(episode, features, maps, rolled, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        """Each call samples y and z: ln p(x, z, y | M) - ln q(z, y | X), with M fixed."""
        features = self.encoder(episode)
        maps, keys = self.write_episode(episode, features, generator=generator)

        def draw() -> PerImage:
            y = keys.sample(generator)
            reading = self.infer(features, maps, y, generator=generator)
            likelihood = self.log_likelihood(reading.readout, episode)
            return likelihood + reading.log_prior - reading.log_posterior - keys.log_ratio(y)

        return draw

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: AnyKeys, readout: Readout
    ) -> JointDensity:
        """ln p(x, z, y | M), factor by factor: the generative side, from M, y and z alone."""
        if self.is_exact:
            raise UserError(f"{self.config.name} has no z in its density: use elbo")
        return JointDensity(
            log_likelihood=self.log_likelihood(readout, episode),
            readout_log_prior=self.read_maps(maps, keys).log_prob(readout),
            key_log_prior=DiagonalNormal.standard_like(keys).log_prob(keys),
        )

    # Write and read (§3.3)

    def write(self, images: Images, *, generator: Noise = None) -> Memory:
        """Embed an episode and write it to M, in one pass."""
        if not self.remembers:
            raise UserError(f"{self.config.name} has no memory: nothing can be written")
        episode = self.as_pixels(images)
        maps, _ = self.write_episode(episode, self.encoder(episode), generator=generator)
        return self.signed(Memory(maps if images.ndim == 5 else maps[0]))

    def empty(self, batch: int | None = None) -> Memory:
        """Make a memory of zeros."""
        if not self.remembers:
            raise UserError(f"{self.config.name} has no memory: there is no empty one")
        lead = () if batch is None else (batch,)
        return self.signed(Memory(torch.zeros(*lead, *self.memory_shape(0), device=self.device)))

    def read(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"] | None = None,
        *,
        handles: Handles | None = None,
    ) -> ReadDistribution:
        """p(z | M, y) at keys, (B, T, L); B = 1 for one episode."""
        if handles is not None:
            raise UserError(
                f"{self.config.name} writes its memory as a whole: there are no handles"
            )
        if keys is None:
            raise UserError("keys say where to read: read(memory, keys)")
        return self.read_maps(*self.check_keys(memory, keys))

    # Generate (§3.4, Fig. 4)

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: Near | None = None,
        sample_pixels: bool = False,
        generator: Noise = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Sample keys from their prior, read, sample a readout, and decode its expected pixels on
        [0, 1]. A model that `replays` returns stored images.

        `near=(key, spread)` samples keys around one instead: y + spread * noise (§4.1.1).
        `sample_pixels=True` samples pixels too: 0 or 1, or levels k/255.
        """
        memory = self.require_memory(memory)
        self.check_samples(num_samples, near)
        lead = memory.map.shape[:1] if memory.is_batch else ()
        keys = normal((*lead, num_samples, *self.key_shape), generator, self.device)
        if near is not None:
            keys = near[0].to(self.device) + near[1] * keys
        return self.generate_at(memory, keys, sample_pixels=sample_pixels, generator=generator)

    @torch.no_grad()
    def generate_at(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"],
        *,
        sample_pixels: bool = False,
        generator: Noise = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Make a picture for each key: read, sample a readout, decode its expected pixels."""
        readout = self.read(memory, keys).sample(generator)
        if sample_pixels:
            images = self.sample_pixels(readout, generator)
        else:
            images = self.likelihood.mean(self.decoder(readout))
        return images if memory.is_batch else images[0]

    # Iterative read (§3.5, Fig. 5)

    @torch.no_grad()
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int | None = None,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
    ) -> Float[Tensor, "S *B T C H W"]:
        """Repeat with M fixed: infer a key from the last picture, read, decode. Returns every step.
        The encoder needs whole pictures, so `observed` is ignored.

        Eq. 7 samples Y* ~ q(Y | X-hat). By default we take the mean of each distribution instead,
        so that recall is deterministic. `sample=True` samples keys as printed.
        """
        if not self.recalls:
            raise UserError(
                f"{self.config.name} has no keys: nothing can be looked up and recalled"
            )
        maps = self.as_maps(memory, cue)

        def read(picture: Episode) -> Episode:
            posterior = self.key_posterior(self.encoder(picture), maps)
            keys = posterior.sample(generator) if sample else posterior.mean
            return self.likelihood.mean(self.decoder(self.read_maps(maps, keys).mean))

        return self.iterate_read(memory, cue, steps, read)

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Write, read at key means, decode the mean of q(z | x, M, y) (Fig. 5, training)."""
        episode = self.as_episodes(images)
        features = self.encoder(episode)
        maps, keys = self.write_episode(episode, features, sample=False)
        readout = self.infer(features, maps, keys.mean, sample=False).readout
        pixels = self.likelihood.mean(self.decoder(readout))
        return pixels if images.ndim == 5 else pixels[0]


class KeylessModel(LatentModel):
    """A model without keys: all images of an episode read the same, and none can be looked up."""

    recalls = has_keys = False

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (0,)

    def key_posterior(self, features: Features, maps: MemoryMap) -> DiagonalNormal:
        return no_keys(features)


class MemorylessModel(KeylessModel):
    """A model without a memory: each image is scored by itself."""

    remembers = False

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (0, 0, 0)

    def write_maps(
        self, episode: Episode, features: Features, *, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        """A map without numbers."""
        return features.new_zeros(len(features), *self.memory_shape(0))
