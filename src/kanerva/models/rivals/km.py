"""The Kanerva machines: a memory that is a random matrix.

`km` (Wu, Wayne, Graves, Lillicrap 2018). The generative side is p(y) = N(0, 1), an address
w = f(y) A', p(z | y, M) = N(w M, sigma^2) and p(x | z). M is a latent variable too, with a learned
prior. `elbo` bounds E_q[-ln p(X | M)] / T, the conditional score in the papers' tables. It leaves
out KL[q(M | X) || p(M)] / T, which is `memory_kl`. Training minimises their sum, the whole bound on
-ln p(X) / T.

`dkm` is the dynamic Kanerva machine (Wu, Wayne, Gregor, Lillicrap 2018). p(w) = N(0, 1) over the K
rows, z = w M without noise, hence without KL(z), and p(x | z). q(w | x, M) is centred on the w that
explains the image's code best, which a ridge regression finds. `dkm-tsm` is the same with the
encoder of Kanerva++, where images see their neighbours.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import DkmConfig, KmConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, PointMass
from kanerva.encoder import EpisodeEncoder
from kanerva.layers.dense import one_hidden
from kanerva.memory.heap import Memory
from kanerva.models.base import Images
from kanerva.models.latent import LatentModel
from kanerva.models.rivals.matrix_normal import (
    Addresses,
    Codes,
    MatrixNormal,
    MatrixPrior,
    least_squares,
    posterior,
    solve_addresses,
)
from kanerva.seeding import Noise
from kanerva.shapes import Embedding, Episode, MemoryMap, PerImage

Vectors = Float[Tensor, "B T key"]  # y of km, w of dkm


class MatrixMachine(LatentModel):
    """What `km` and `dkm` share: an episode is written to a matrix normal, from which one M is
    sampled.

    That M, as a map (1, K, C), is all that p reads. Addresses for writing depend on means only,
    never on a sample that a read uses.
    """

    has_memory_kl = True
    config: KmConfig | DkmConfig
    encoder: EpisodeEncoder

    def __init__(self, config: KmConfig | DkmConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        self.encodes_alone = getattr(config.encoder, "shift", 0.0) == 0
        self.prior = MatrixPrior(config.rows)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.rows.width, outputs, height, width)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (1, self.config.rows.count, self.config.rows.width)

    @property
    def readout_shapes(self) -> list[list[int]]:
        return [[self.config.rows.width]]

    # What the two machines do differently

    @abstractmethod
    def codes(self, embedding: Embedding) -> Codes:
        """The code that is written for each image, in float32."""

    @abstractmethod
    def addresses(self, embedding: Embedding, codes: Codes) -> Addresses:
        """The address at which it is written, in float32."""

    def extra_loss(self, episode: Episode, embedding: Embedding) -> Float[Tensor, ""]:
        """A loss that training minimises in addition."""
        return torch.zeros((), device=embedding.device)

    # Write

    def matrix_posterior(self, embedding: Embedding) -> MatrixNormal:
        """q(M | X): the prior updated by Bayes' rule, in float32 also under mixed precision."""
        codes = self.codes(embedding)
        addresses = self.addresses(embedding, codes)
        with torch.autocast(codes.device.type, enabled=False):
            return posterior(self.prior(len(codes)), addresses, codes, self.prior.noise_variance)

    def sample_matrix(
        self, q: MatrixNormal, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        """Sample one M for each episode, R + U^1/2 noise; or take the mean R."""
        with torch.autocast(q.mean.device.type, enabled=False):
            memory = q.sample(generator) if sample else q.mean
        return memory[:, None]

    def write_maps(
        self, episode: Episode, features: Embedding, *, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        """M ~ q(M | X), sampled before anything else."""
        return self.sample_matrix(self.matrix_posterior(features), sample, generator)

    def empty(self, batch: int | None = None) -> Memory:
        """Make a memory to which nothing was written: the prior's mean R0."""
        maps = self.prior(batch or 1).mean[:, None].detach().clone()
        return self.signed(Memory(maps[0] if batch is None else maps))

    def memory_kl(self, images: Images, *, generator: Noise = None) -> PerImage:
        """KL[q(M | X) || p(M)] / T, the same for each image of an episode; deterministic."""
        episode = self.as_pixels(images)
        kl = self.matrix_kl(self.matrix_posterior(self.encoder(episode)))
        share = (kl / episode.shape[1])[:, None].expand(episode.shape[:2])
        return share if images.ndim == 5 else share[0]

    def matrix_kl(self, q: MatrixNormal) -> Float[Tensor, "B"]:  # noqa: F821
        """KL[q(M | X) || p(M)] of whole episodes."""
        with torch.autocast(q.mean.device.type, enabled=False):
            return q.kl(self.prior(len(q.mean)))

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The terms of the conditional bound; `auxiliary` has KL(M) / T, which completes it."""
        embedding = self.encoder(episode)
        q = self.matrix_posterior(embedding)
        maps = self.quantised(self.sample_matrix(q, generator=generator))
        keys = self.key_posterior(embedding, maps)
        outputs = self.terms(episode, embedding, maps, keys, generator=generator).by_name()
        auxiliary = self.extra_loss(episode, embedding)
        if self.config.rows.charge:
            auxiliary = auxiliary + self.matrix_kl(q).mean() / episode.shape[1]
        return outputs | {"auxiliary": auxiliary}


class KanervaMachine(MatrixMachine):
    """Addresses from learned keys: y ~ q(y | x), w = f(y) A', z ~ q(z | x, y, M)."""

    reconstructed = "reconstructed: written, then q(z|x, y, M)"
    config: KmConfig

    def __init__(self, config: KmConfig) -> None:
        super().__init__(config)
        rows, hidden, embedding = config.rows, config.keys.hidden, self.encoder.features
        self.code = nn.Linear(embedding, 2 * rows.width)
        # ours: one hidden layer each; the paper says "multi-layer perceptron"
        self.keys = one_hidden(embedding, hidden, 2 * rows.address)
        self.to_address = one_hidden(rows.address, hidden, rows.address)
        self.table = nn.Parameter(torch.randn(rows.count, rows.address))  # A', one row of M each

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (self.config.rows.address,)

    # Addresses and codes

    def weights(self, keys: Vectors) -> Addresses:
        """w = f(y) A': inner products of f(y) with K learned addresses of unit length."""
        pointer = self.to_address(keys)
        with torch.autocast(keys.device.type, enabled=False):
            return pointer.float() @ F.normalize(self.table, dim=-1).mT

    def bottom_up(self, embedding: Embedding) -> DiagonalNormal:
        """The distribution of an image's code, from the image alone."""
        return DiagonalNormal.from_network(self.code(embedding))

    def codes(self, embedding: Embedding) -> Codes:
        return self.bottom_up(embedding).mean

    def addresses(self, embedding: Embedding, codes: Codes) -> Addresses:
        """Addresses at key means: M must not reveal the key sample that a read uses."""
        return self.weights(DiagonalNormal.from_network(self.keys(embedding)).mean)

    def key_posterior(self, features: Embedding, maps: MemoryMap) -> DiagonalNormal:
        """q(y | x): it does not depend on the memory."""
        return DiagonalNormal.from_network(self.keys(features))

    # Read

    def traces(self, maps: MemoryMap, keys: Vectors) -> Codes:
        """w M, a weighted sum of rows."""
        addresses = self.weights(keys)
        with torch.autocast(maps.device.type, enabled=False):
            return addresses @ maps[:, 0].float()

    def read_maps(self, maps: MemoryMap, keys: Vectors) -> DiagonalNormal:
        """p(z | y, M) = N(w M, sigma^2)."""
        mean = self.traces(maps, keys)
        return DiagonalNormal(mean, (0.5 * self.prior.noise_variance.log()).expand_as(mean))

    def readout_posterior_at(self, features: Embedding, prior: DiagonalNormal) -> DiagonalNormal:
        """q(z | x, y, M): the product of the prior (top-down) and the image's own normal
        (bottom-up), so each counts by its precision (ours: in the paper a network combines them).
        Its KL falls to zero as the precision of the image's normal does."""
        image = self.bottom_up(features)
        top_down, bottom_up = (-2 * prior.log_std).exp(), (-2 * image.log_std).exp()  # precisions
        total = top_down + bottom_up
        mean = (top_down * prior.mean + bottom_up * image.mean) / total
        return DiagonalNormal(mean, -0.5 * total.log())


class DynamicKanervaMachine(MatrixMachine):
    """Addresses by least squares: w ~ N(argmin |z - w M|^2 + sigma^2 |w|^2, sigma_w^2)."""

    reconstructed = "reconstructed: the code decoded, the memory not used"
    writes_sequentially = True
    config: DkmConfig

    def __init__(self, config: DkmConfig) -> None:
        super().__init__(config)
        self.code = nn.Linear(self.encoder.features, config.rows.width)
        self.log_spread = nn.Parameter(torch.tensor(0.3).log())  # of w; the authors' value

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (self.config.rows.count,)

    # Addresses and codes

    def codes(self, embedding: Embedding) -> Codes:
        return self.code(embedding).float()

    def addresses(self, embedding: Embedding, codes: Codes) -> Addresses:
        """Solve for each address in the mean of the memory, and write its code before the next."""
        with torch.autocast(codes.device.type, enabled=False):
            prior, variance = self.prior(len(codes)), self.prior.noise_variance
            return solve_addresses(prior, codes, variance)  # pyright: ignore[reportCallIssue]

    def key_posterior(self, features: Embedding, maps: MemoryMap) -> DiagonalNormal:
        """q(w | x, M): q may see the image, so it solves for the address of its code in M.

        KL(w) = 1/2 [|w|^2 + K (sigma_w^2 - 1 - ln sigma_w^2)].
        """
        codes = self.codes(features)
        with torch.autocast(codes.device.type, enabled=False):
            mean = least_squares(maps[:, 0].float(), codes, self.prior.noise_variance)
        return DiagonalNormal(mean, self.log_spread.clamp(-7, 4).expand_as(mean))

    # Read

    def traces(self, maps: MemoryMap, keys: Vectors) -> Codes:
        """w M: the code that is decoded."""
        with torch.autocast(maps.device.type, enabled=False):
            return keys.float() @ maps[:, 0].float()

    def read_maps(self, maps: MemoryMap, keys: Vectors) -> PointMass:
        """z = w M, without noise: there is no KL(z)."""
        return PointMass(self.traces(maps, keys))

    def readout_posterior_at(self, features: Embedding, prior: PointMass) -> PointMass:
        return prior

    def extra_loss(self, episode: Episode, embedding: Embedding) -> Float[Tensor, ""]:
        """The authors' autoencoder loss, -ln p(x | z) at the codes: it trains the codes before they
        are written. For training only; no score includes it."""
        return -self.likelihood.log_prob(self.decoder(self.codes(embedding)), episode).mean()

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Decode the codes directly; `recall` with one step reads them from a memory."""
        codes = self.codes(self.encoder(self.as_episodes(images)))
        pixels = self.likelihood.mean(self.decoder(codes))
        return pixels if images.ndim == 5 else pixels[0]
