"""`vae`: no memory at all. p(z) = N(0, 1), p(x | z), q(z | x) (App. C).

    samples = model.generate(None, 64)
    terms = model.elbo(images)                  # a bound on -ln p(x), each image by itself

What a memory must beat. It has the paper's encoder, without temporal shift, and its decoder.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.config import ModelConfig
from kanerva.decoder import Decoder
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.base import ElboTerms, Images, MemoryModel, Weigh
from kanerva.readout import ReadoutPosterior
from kanerva.shapes import Episode, PerImage


class VAE(MemoryModel):
    """A variational autoencoder of the paper's encoder and decoder."""

    remembers = recalls = has_keys = False
    reconstructed = "reconstructed: q(z|x)"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        self.readout_posterior = ReadoutPosterior(config.readout, self.encoder.features)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.readout.size, outputs, height, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (0,)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (0, 0, 0)

    # The bound, samples

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """ln p(x|z) and KL[q(z|x) || N(0, 1)] of each image; there is no key to charge."""
        if memory is not None:
            raise UserError("vae has no memory: score images without one")
        episode = self.as_pixels(images)
        posterior = self.readout_posterior(self.encoder(episode))
        readout = posterior.sample(generator) if sample else posterior.mean
        kl = posterior.kl_to_prior()
        terms = ElboTerms(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_kl=kl,
            key_kl=torch.zeros_like(kl),
        )
        return terms if images.ndim == 5 else terms[0]

    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """ln p(x, z) - ln q(z | x), draw by draw."""
        posterior = self.readout_posterior(self.encoder(episode))

        def draw() -> PerImage:
            readout = posterior.sample(generator)
            likelihood = self.likelihood.log_prob(self.decoder(readout), episode)
            return likelihood - posterior.log_ratio(readout)

        return draw

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "*key"], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Episode | Float[Tensor, "T C H W"]:
        """Draw z from its prior and decode its expected pixels. `memory` is None."""
        if memory is not None or near is not None:
            raise UserError("vae has no memory and no keys: generate(None, num_samples)")
        if num_samples < 1:
            raise UserError(f"num_samples must be at least 1, got {num_samples}")
        shape = (1, num_samples, self.config.readout.size)
        readout = torch.randn(shape, generator=generator, device=self.device)
        return self.likelihood.mean(self.decoder(readout))[0]

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Decode the mean of q(z|x)."""
        posterior = self.readout_posterior(self.encoder(self.as_episodes(images)))
        pixels = self.likelihood.mean(self.decoder(posterior.mean))
        return pixels if images.ndim == 5 else pixels[0]

    def left_out(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """An image costs the same whatever else there is."""
        return self.elbo(images, generator=generator)

    # What it has no notion of

    def _none(self, what: str) -> UserError:
        return UserError(f"vae has no memory: {what}")

    def traces(self, maps: Tensor, keys: Tensor) -> Tensor:
        raise self._none("there is nothing to read")

    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory:
        raise self._none("nothing can be written")

    def empty(self, batch: int | None = None) -> Memory:
        raise self._none("there is no empty one")

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
        raise self._none("nothing can be recalled")

    def permuted(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        raise self._none("there are no keys to exchange")
