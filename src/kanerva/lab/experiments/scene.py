"""A model with the images it has written: keys, and the pictures that it reads at keys.

Shared by `perturb`, `random_keys` and `vae_vs_kpp`, which read pictures at keys of their choice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.distributions import as_normal
from kanerva.lab.harness import Lab
from kanerva.memory.heap import Memory
from kanerva.models.base import MemoryModel
from kanerva.models.latent import LatentModel
from kanerva.shapes import Episode, Readout

Latents = Float[Tensor, "B n *key"]  # keys, or a VAE's readouts; the prior of both is N(0, 1)

MODELS = {  # label: model and variant
    "kpp-generate": ("kpp", "generate"),
    "kpp-paper": ("kpp-paper", None),
    "vae": ("vae", None),
}
GROUP = 32  # images among which the nearest is searched: an episode of `kpp`


@dataclass(frozen=True)
class Scene:
    """A model, the memory it has written (None for a VAE), and the keys of the written images."""

    model: MemoryModel
    memory: Memory | None
    starts: Latents

    @property
    def key_shape(self) -> tuple[int, ...]:
        return tuple(self.starts.shape[2:])

    def readouts(self, keys: Latents, generator: torch.Generator | None = None) -> Readout:
        """z at keys: a sample if a generator is given, else its mean."""
        if self.memory is None:  # the latents are readouts themselves
            return keys
        prior = self.model.read(self.memory, keys)
        return prior.mean if generator is None else prior.sample(generator)

    def pictures(self, keys: Latents, generator: torch.Generator | None = None) -> Episode:
        """Expected pixels at keys."""
        return self.model.likelihood.mean(self.model.decoder(self.readouts(keys, generator)))

    def draw_keys(self, count: int, generator: torch.Generator) -> Latents:
        """Sample `count` keys for each memory from their prior, N(0, 1)."""
        shape = (len(self.starts), count, *self.key_shape)
        return torch.randn(shape, generator=generator, device=self.starts.device)


def write_scene(model: MemoryModel, episodes: Episode, generator: torch.Generator) -> Scene:
    """Write whole episodes, and find the keys of their images."""
    assert isinstance(model, LatentModel)
    if not model.remembers:
        features = model.encoder(episodes)
        maps, keys = model.write_episode(episodes, features)
        return Scene(model, None, model.infer(features, maps, keys.mean, sample=False).readout)
    memory = model.write(episodes, generator=generator)
    if model.has_blocks:
        return Scene(model, memory, as_normal(memory.places))
    keys = model.key_posterior(model.encoder(episodes), model.as_maps(memory))
    return Scene(model, memory, keys.mean)


def train_for_scene(lab: Lab, name: str) -> tuple[MemoryModel, int]:
    """One of MODELS, trained, and how many images it writes to a memory. GROUP is a multiple."""
    length = lab.config(*MODELS[name]).episode_length
    return lab.trained(*MODELS[name]), length if GROUP % length == 0 else GROUP


def is_binary(model: MemoryModel) -> bool:
    """Whether true pixels are black or white."""
    return model.config.likelihood == "bernoulli"


def join(name: str, how: str) -> str:
    """A model's name, and how pictures were made, if given."""
    return ", ".join(filter(None, [name, how]))
