"""`vae`: no memory at all. p(z) = N(0, 1), p(x | z), q(z | x) (App. C).

What a memory must beat. It has the paper's encoder, without temporal shift, and its decoder.
"""

from torch import Tensor

from kanerva.config import VaeConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal
from kanerva.encoder import EpisodeEncoder
from kanerva.models.latent import MemorylessModel
from kanerva.readout import ReadoutPosterior
from kanerva.shapes import Embedding, MemoryMap


class Vae(MemorylessModel):
    """A variational autoencoder of the paper's encoder and decoder."""

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
        """N(0, 1), whatever else there is."""
        return DiagonalNormal.standard_like(
            keys.new_zeros(*keys.shape[:2], self.config.readout.size)
        )

    def readout_posterior_at(self, features: Embedding, prior: DiagonalNormal) -> DiagonalNormal:
        return self.readout_posterior(features)
