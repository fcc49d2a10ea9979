"""A model before the images it has written: keys, and the pictures that it reads at them.

`perturb`, `random_keys` and `vae_vs_kpp` ask the same models for pictures at keys of their choice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.distributions import as_normal
from kanerva.lab.harness import Lab
from kanerva.memory.heap import Memory
from kanerva.models import VAE, Kpp, KppPaper, MemoryModel
from kanerva.shapes import Episode, Readout

Latents = Float[Tensor, "B n *key"]  # keys, or a VAE's readouts: N(0, 1) a priori, all of them

MODELS: dict[str, tuple[str, str | None, int]] = {  # model, variant, and steps of the quick version
    "kpp-generate": ("kpp", "generate", 600),
    "kpp-paper": ("kpp-paper", None, 400),
    "vae": ("vae", None, 400),
}
GROUP = 32  # images among which the nearest is looked for: one memory of `kpp`


@dataclass(frozen=True)
class Scene:
    """A model that has written some images, if it can, and knows where each lies."""

    model: MemoryModel
    memory: Memory | None
    starts: Latents

    @property
    def key_shape(self) -> tuple[int, ...]:
        return tuple(self.starts.shape[2:])

    def readouts(self, keys: Latents, generator: torch.Generator | None = None) -> Readout:
        """z at keys: drawn where a generator is given, else its mean."""
        model = self.model
        if isinstance(model, VAE):
            return keys
        assert self.memory is not None
        maps = model.as_maps(self.memory)
        if isinstance(model, Kpp):
            drawn = generator is not None
            reading = model.readout(model.traces(maps, keys), sample=drawn, generator=generator)
            return reading.readout
        assert isinstance(model, KppPaper)
        prior = model.read_maps(maps, keys)
        return prior.mean if generator is None else prior.sample(generator)

    def pictures(self, keys: Latents, generator: torch.Generator | None = None) -> Episode:
        """The same as expected pixels."""
        return self.model.likelihood.mean(self.model.decoder(self.readouts(keys, generator)))

    def draw_keys(self, count: int, generator: torch.Generator) -> Latents:
        """`count` keys for each memory from their prior, N(0, 1)."""
        shape = (len(self.starts), count, *self.key_shape)
        return torch.randn(shape, generator=generator, device=self.starts.device)


def write_scene(model: MemoryModel, episodes: Episode, generator: torch.Generator) -> Scene:
    """Write whole episodes, and see where their images lie."""
    if isinstance(model, VAE):
        return Scene(model, None, model.readout_posterior(model.encoder(episodes)).mean)
    memory = model.write(episodes, generator=generator)
    if isinstance(model, Kpp):
        return Scene(model, memory, as_normal(memory.places))
    assert isinstance(model, KppPaper)
    return Scene(model, memory, model.key_posterior(model.encoder(episodes)).mean)


def train_for_scene(
    lab: Lab, name: str, models: dict[str, tuple[str, str | None, int]] = MODELS
) -> tuple[MemoryModel, int]:
    """One of `models`, and how many images it writes into a memory: a part of GROUP."""
    model, variant, steps = models[name]
    length = lab.config(model, variant).episode_length
    return lab.trained(model, variant, steps=steps), length if GROUP % length == 0 else GROUP


def is_binary(model: MemoryModel) -> bool:
    """Whether true pixels are black or white."""
    return model.config.likelihood.kind == "bernoulli"


def join(name: str, how: str) -> str:
    """A model's name, and what was done with it, if anything."""
    return ", ".join(filter(None, [name, how]))
