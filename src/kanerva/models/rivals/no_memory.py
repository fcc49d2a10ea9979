"""Baselines for a memory: the paper's encoder and decoder without one.

`vae` is a plain VAE (App. C): p(z) = N(0, 1), p(x | z), q(z | x), without temporal shift.

`no-memory` is the paper's ablation (§4.2). A dense network computes the readout's prior from the
episode's pooled embedding; it is as large as writer, key network and readout prior together. The
pooled embedding counts as memory: the bound is on -ln p(x | mean_t E). A prior computed from a
sample's own embedding would only bound -ln p(x_t | e_t), which can be 0.
"""

import math

import torch
from torch import Tensor, nn

from kanerva.config import NoMemoryConfig, VaeConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal
from kanerva.encoder import EpisodeEncoder
from kanerva.memory.keys import KeyNetwork
from kanerva.memory.writers import PooledWriter
from kanerva.models.latent import KeylessModel, MemorylessModel
from kanerva.readout import Reading, ReadoutPosterior, ReadoutPrior
from kanerva.seeding import Noise
from kanerva.shapes import Embedding, Episode, MemoryMap


class Vae(MemorylessModel):
    """A variational autoencoder with the paper's encoder and decoder."""

    reconstructed = "reconstructed: q(z|x)"
    config: VaeConfig
    encoder: EpisodeEncoder

    def __init__(self, config: VaeConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        self.readout_posterior = ReadoutPosterior(config.readout, self.encoder.features)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.readout.size, outputs, height, width)

    def read_maps(self, maps: MemoryMap, keys: Tensor) -> DiagonalNormal:
        """N(0, 1): it does not depend on anything."""
        return DiagonalNormal.standard_like(
            keys.new_zeros(*keys.shape[:2], self.config.readout.size)
        )

    def readout_posterior_at(self, features: Embedding, prior: DiagonalNormal) -> DiagonalNormal:
        return self.readout_posterior(features)


def replaced_parameters(config: NoMemoryConfig, embedding: int) -> int:
    """The number of parameters that the memory of `kpp-paper` has: writer, keys and reads."""
    with torch.device("meta"):
        parts = [
            PooledWriter(config.memory, embedding),
            KeyNetwork(config.keys, embedding, config.memory.reads),
            ReadoutPrior(config.readout, config.memory),
        ]
    return sum(p.numel() for part in parts for p in part.parameters())


def dense_net(inputs: int, outputs: int, parameters: int) -> nn.Sequential:
    """Three layers with SiLU between, with the width that gives about `parameters` parameters."""
    # (inputs + 1) h + (h + 1) h + (h + 1) outputs = parameters
    b = inputs + 2 + outputs
    hidden = max(1, round((math.sqrt(b * b + 4 * max(parameters - outputs, 1)) - b) / 2))
    sizes = [inputs, hidden, hidden, outputs]
    layers: list[nn.Module] = []
    for a, c in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(a, c), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class NoMemory(KeylessModel):
    """Context without a memory: one vector for each episode, in which nothing can be looked up.
    With `encoder.shift` an image sees its neighbours, as in `kpp-paper`."""

    reconstructed = "reconstructed: q(z|x)"
    config: NoMemoryConfig
    encoder: EpisodeEncoder

    def __init__(self, config: NoMemoryConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        self.encodes_alone = config.encoder.shift == 0
        embedding = self.encoder.features
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        size = replaced_parameters(config, embedding)
        self.readout_prior = dense_net(embedding, 2 * config.readout.size, size)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.readout.size, outputs, height, width)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (1, 1, self.encoder.features)

    def write_maps(
        self, episode: Episode, features: Embedding, *, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        """The episode's pooled embedding: all that p sees of it."""
        return features.mean(dim=1)[:, None, None].float()

    def prior(self, maps: MemoryMap) -> DiagonalNormal:
        """p(z | pooled embedding), (B, 1, L): the same for all images of an episode."""
        return DiagonalNormal.from_network(self.readout_prior(maps[:, 0]))

    def read_maps(self, maps: MemoryMap, keys: Tensor) -> DiagonalNormal:
        """`prior`, expanded to every image: there are no keys."""
        prior, count = self.prior(maps), (-1, keys.shape[1], -1)
        return DiagonalNormal(prior.mean.expand(count), prior.log_std.expand(count))

    def readout_posterior_at(self, features: Embedding, prior: DiagonalNormal) -> DiagonalNormal:
        return self.readout_posterior(features)

    def infer(
        self,
        features: Embedding,
        maps: MemoryMap,
        keys: Tensor,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> Reading:
        """The same as in `LatentModel`, without copying the prior for every image."""
        posterior = self.readout_posterior(features)
        readout = posterior.sample(generator) if sample else posterior.mean
        return Reading([readout], [self.prior(maps)], [posterior])
