"""`kpp-bits-empty`: the baseline of `kpp-bits`, the same networks without a memory.

    terms = model.elbo(images)                  # -ln p(x) itself, image by image

p(x) is the pixel code without a gist. The other networks are those of `kpp-empty`; their bound,
with pixels independent given z, is `independent_terms`.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.config import KppBitsEmptyConfig
from kanerva.memory.heap import Memory
from kanerva.memory.pixel_code import PixelCode
from kanerva.models.base import Images, LogWeights, Near, all_but_one
from kanerva.models.kpp_empty import KppEmpty
from kanerva.models.terms import ElboTerms
from kanerva.seeding import Noise
from kanerva.shapes import Episode


class KppBitsEmpty(KppEmpty):
    """`kpp-bits` without a memory."""

    is_exact = True
    config: KppBitsEmptyConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: KppBitsEmptyConfig) -> None:
        super().__init__(config)
        self.pixel_code = PixelCode.of(config.code, math.prod(self.block), config.image)

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The bound with independent pixels; as `auxiliary`, the pixel code's -ln p(x)."""
        episode = self.as_episodes(episode)
        features = self.encoder(episode)
        maps, keys = self.write_episode(episode, features, generator=generator)
        pixels = episode[:, :, 0]
        nothing = self._nothing(pixels.shape[:2].numel()).unflatten(0, pixels.shape[:2])
        nats = self.pixel_code.mean_nats(nothing, pixels)
        return self.objective(episode, features, maps, keys, generator, nats)

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """-ln p(x), exact: nothing is sampled."""
        if memory is not None:
            self.require_memory(memory)
        episode = self.as_pixels(images)
        pixels = episode.flatten(0, 2)
        found = self.pixel_code.log_probs(self._nothing(len(pixels)), pixels).sum(dim=1)
        score = found.view(images.shape[:-3])
        return ElboTerms(score, torch.zeros_like(score), torch.zeros_like(score))

    def independent_terms(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """The bound of `kpp-empty`, with pixels independent given z."""
        return super().elbo(images, generator=generator)

    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """The same as `elbo`: without a memory, the rest of an episode does not matter."""
        all_but_one(self.as_pixels(images).shape[1], self.device)  # refuses episodes of one image
        return self.elbo(images)

    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        terms = self.elbo(episode)
        return lambda: terms.elbo

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
        """Sample z from p(z) and decode its expected pixels; or, with `sample_pixels`, sample
        pixels one by one from the pixel code."""
        if not sample_pixels:
            return super().generate(memory, num_samples, near=near, generator=generator)
        self.require_memory(memory)
        self.check_samples(num_samples, near)
        return self.pixel_code.sample(self._nothing(num_samples), generator)[:, None]

    def _nothing(self, count: int) -> Float[Tensor, "N D"]:
        """The traces of free cells."""
        return torch.zeros(count, math.prod(self.block), device=self.device)
