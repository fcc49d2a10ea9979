"""`dkm`, the Dynamic Kanerva Machine (Wu, Wayne, Gregor, Lillicrap 2018): addresses are solved for.

The generative side is p(w) = N(0, 1) over the K rows, z = w M and p(x | z): no noise on z, so no
KL(z). q(w | x, M) is centred on the w that explains the image's code best, a ridge regression.
`dkm-tsm` is the same with the encoder of Kanerva++, whose images see their neighbours.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import DkmConfig
from kanerva.distributions import DiagonalNormal, PointMass
from kanerva.models.base import Images
from kanerva.models.rivals.km import MatrixMachine, Vectors
from kanerva.models.rivals.matrix_normal import Addresses, Codes, least_squares, searched
from kanerva.shapes import Embedding, Episode, MemoryMap


class DynamicKanervaMachine(MatrixMachine):
    """Addresses by least squares: w ~ N(argmin |z - w M|^2 + sigma^2 |w|^2, sigma_w^2)."""

    reconstructed = "reconstructed: the code decoded, the memory not used"
    writes_sequentially = True
    config: DkmConfig

    def __init__(self, config: DkmConfig) -> None:
        super().__init__(config)
        self.code = nn.Linear(self.encoder.features, config.rows.width)
        self.log_spread = nn.Parameter(torch.tensor(0.3).log())  # of w; where the authors' starts

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (self.config.rows.count,)

    # Addresses and codes

    def codes(self, embedding: Embedding) -> Codes:
        return self.code(embedding).float()

    def addresses(self, embedding: Embedding, codes: Codes) -> Addresses:
        """Each solved from the mean of the memory as it stands, written before the next."""
        with torch.autocast(codes.device.type, enabled=False):
            prior, variance = self.prior(len(codes)), self.prior.noise_variance
            return searched(prior, codes, variance)  # pyright: ignore[reportCallIssue]

    def key_posterior(self, features: Embedding, maps: MemoryMap) -> DiagonalNormal:
        """q(w | x, M): q may see the image, and it looks for its code in M.

        KL(w) = 1/2 [|w|^2 + K (sigma_w^2 - 1 - ln sigma_w^2)].
        """
        codes = self.codes(features)
        with torch.autocast(codes.device.type, enabled=False):
            mean = least_squares(maps[:, 0].float(), codes, self.prior.noise_variance)
        return DiagonalNormal(mean, self.log_spread.clamp(-7, 4).expand_as(mean))

    # Read

    def traces(self, maps: MemoryMap, keys: Vectors) -> Codes:
        """w M: the code that the decoder is given."""
        with torch.autocast(maps.device.type, enabled=False):
            return keys.float() @ maps[:, 0].float()

    def read_maps(self, maps: MemoryMap, keys: Vectors) -> PointMass:
        """z = w M, without noise: there is no KL(z)."""
        return PointMass(self.traces(maps, keys))

    def readout_posterior_at(self, features: Embedding, prior: PointMass) -> PointMass:
        return prior

    def extra_loss(self, episode: Episode, embedding: Embedding) -> Float[Tensor, ""]:
        """The authors' autoencoder loss, -ln p(x | z) of the codes themselves: it teaches what is
        to be stored before anything is. Training only; no score has it."""
        return -self.likelihood.log_prob(self.decoder(self.codes(embedding)), episode).mean()

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Decode the codes themselves; `recall` with one step reads them from a memory."""
        codes = self.codes(self.encoder(self.as_episodes(images)))
        pixels = self.likelihood.mean(self.decoder(codes))
        return pixels if images.ndim == 5 else pixels[0]
