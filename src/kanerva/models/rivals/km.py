"""`km`, the Kanerva Machine (Wu, Wayne, Graves, Lillicrap 2018): a memory that is a random matrix.

    memory = model.write(images)                # Bayes' rule: q(M | X), and one M drawn from it
    steps = model.recall(memory, noisy)         # an address from the picture, a read, a picture
    samples = model.generate(memory, 64)        # addresses from the prior
    terms = model.elbo(images)                  # given one M ~ q(M | X) for the whole episode

The generative side is p(y) = N(0, 1), an address w = f(y) A', p(z | y, M) = N(w M, sigma^2) and
p(x | z). Its M is a latent too, with a learned prior. `elbo` bounds E_q[-ln p(X | M)] / T, the
conditional score of the papers' tables, and leaves KL[q(M | X) || p(M)] / T to `memory_kl`;
training minimises both, which is the whole bound on -ln p(X) / T.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import ModelConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, mapped
from kanerva.encoder import EpisodeEncoder
from kanerva.memory.heap import Memory
from kanerva.models.base import ElboTerms, Images, JointDensity, MemoryModel, Weigh, all_but_one
from kanerva.models.rivals.matrix_normal import (
    Addresses,
    Codes,
    MatrixNormal,
    MatrixPrior,
    posterior,
)
from kanerva.shapes import Embedding, Episode, MemoryMap, PerImage, Readout

Vectors = Float[Tensor, "B T key"]  # y of km, w of dkm


class MatrixMachine(MemoryModel):
    """What `km` and `dkm` share: an episode written into a matrix normal, one M drawn from it.

    That M, as a map (1, K, C), is all that p reads. Where an episode is written depends on means
    alone, never on a sample that a read uses.
    """

    has_memory_kl = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        self.prior = MatrixPrior(config.rows)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.rows.width, outputs, height, width)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return (1, self.config.rows.count, self.config.rows.width)

    # What the two machines do each in its own way

    @abstractmethod
    def codes(self, embedding: Embedding) -> Codes:
        """What is written of each image, in float32."""

    @abstractmethod
    def addresses(self, embedding: Embedding, codes: Codes) -> Addresses:
        """Where it is written, in float32."""

    @abstractmethod
    def key_posterior(self, embedding: Embedding, maps: MemoryMap) -> DiagonalNormal:
        """Where each image reads: q of its key."""

    @abstractmethod
    def terms_at(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        q_keys: DiagonalNormal,
        *,
        sample: bool,
        generator: torch.Generator | None,
    ) -> ElboTerms:
        """The bound where keys have this posterior."""

    @abstractmethod
    def log_weight(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        q_keys: DiagonalNormal,
        generator: torch.Generator | None,
    ) -> PerImage:
        """ln p(x, latents | M) - ln q(latents) at one draw."""

    def extra(self, episode: Episode, embedding: Embedding) -> Float[Tensor, ""]:
        """What else training minimises."""
        return torch.zeros((), device=embedding.device)

    # Write

    def written(self, embedding: Embedding) -> MatrixNormal:
        """q(M | X): the prior after Bayes' rule, in float32 whatever the networks' precision."""
        codes = self.codes(embedding)
        addresses = self.addresses(embedding, codes)
        with torch.autocast(codes.device.type, enabled=False):
            return posterior(self.prior(len(codes)), addresses, codes, self.prior.noise_variance)

    def drawn(
        self, q: MatrixNormal, sample: bool = True, generator: torch.Generator | None = None
    ) -> MemoryMap:
        """One M for each episode, R + U^1/2 noise; or R itself."""
        with torch.autocast(q.mean.device.type, enabled=False):
            memory = q.sample(generator) if sample else q.mean
        return self.settled(memory[:, None])

    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory:
        """Draw M ~ q(M | X), as `elbo` does before it draws anything else."""
        q = self.written(self.encoder(self.as_episodes(images)))
        maps = self.drawn(q, True, generator)
        return Memory(maps if images.ndim == 5 else maps[0])

    def empty(self, batch: int | None = None) -> Memory:
        """What nothing was written to: the prior's mean R0."""
        maps = self.prior(batch or 1).mean[:, None].detach().clone()
        return Memory(maps[0] if batch is None else maps)

    def memory_kl(self, images: Images, *, generator: torch.Generator | None = None) -> PerImage:
        """KL[q(M | X) || p(M)] / T, the same for each image of an episode. No noise is drawn."""
        episode = self.as_pixels(images)
        kl = self.memory_cost(self.written(self.encoder(episode)))
        share = (kl / episode.shape[1])[:, None].expand(episode.shape[:2])
        return share if images.ndim == 5 else share[0]

    def memory_cost(self, q: MatrixNormal) -> Float[Tensor, "B"]:  # noqa: F821
        """KL[q(M | X) || p(M)] of whole episodes."""
        with torch.autocast(q.mean.device.type, enabled=False):
            return q.kl(self.prior(len(q.mean)))

    # The bound

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """A bound on -ln p(x | M) at one M ~ q(M | X), or at a memory given.

        `sample=False` takes the mean of everything, M included (not a bound).
        """
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        if memory is None:
            maps = self.drawn(self.written(embedding), sample, generator)
        else:
            maps = self.as_maps(memory, images)
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
        """The bound from its parts: q from the embedding, p from the memory."""
        q_keys = self.key_posterior(embedding, maps)
        return self.terms_at(episode, embedding, maps, q_keys, sample=sample, generator=generator)

    def forward(self, episode: Episode) -> dict[str, Tensor]:
        """The terms of the conditional bound; KL(M) / T, which makes it whole, as `auxiliary`."""
        embedding = self.encoder(episode)
        q = self.written(embedding)
        outputs = self.terms(episode, embedding, self.drawn(q)).by_name()
        auxiliary = self.extra(episode, embedding)
        if self.config.rows.charge:
            auxiliary = auxiliary + self.memory_cost(q).mean() / episode.shape[1]
        return outputs | {"auxiliary": auxiliary}

    # For scores: importance weights, controls

    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """ln p(x, z, y | M) - ln q(z, y | X, M), draw by draw, all at one M ~ q(M | X)."""
        embedding = self.encoder(episode)
        maps = self.drawn(self.written(embedding), True, generator)
        q_keys = self.key_posterior(embedding, maps)
        return lambda: self.log_weight(episode, embedding, maps, q_keys, generator)

    def left_out(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image under a memory written from the rest of its episode (a control).

        q may see anything, so its view of the image stays that of the whole episode.
        """
        episode = self.as_pixels(images)
        batch, length = episode.shape[:2]
        rest = all_but_one(length, episode.device)
        others = torch.cat([self.encoder(one[rest]) for one in episode])  # (B T, T - 1, D)
        maps = self.drawn(self.written(others), True, generator)
        alone = self.encoder(episode).flatten(0, 1)[:, None]  # (B T, 1, D)
        terms = self.terms(episode.flatten(0, 1)[:, None], alone, maps, generator=generator)
        shape = (batch, length) if images.ndim == 5 else (length,)
        return terms.view(shape)

    def permuted(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image read at its neighbour's key (a control)."""
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        maps = self.drawn(self.written(embedding), True, generator)
        rolled = mapped(self.key_posterior(embedding, maps), lambda value: value.roll(1, dims=1))
        terms = self.terms_at(episode, embedding, maps, rolled, sample=True, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    # For users: iterative reading

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
        """Hold M; find where the last picture lies, read w M there, decode it, again: every step.

        What is decoded is the memory's word alone, not mixed with the picture's own code. Keys are
        the means of their posteriors unless `sample`. Whole pictures are encoded: `observed` is of
        no use here.
        """
        maps = self.as_maps(memory, cue)

        def read(picture: Episode) -> Episode:
            q_keys = self.key_posterior(self.encoder(picture), maps)
            keys = q_keys.sample(generator) if sample else q_keys.mean
            return self.likelihood.mean(self.decoder(self.traces(maps, keys)))

        return self.again(memory, cue, steps, read)


class KanervaMachine(MatrixMachine):
    """Addresses from learned keys: y ~ q(y | x), w = f(y) A', z ~ q(z | x, y, M)."""

    reconstructed = "reconstructed: written, then q(z|x, y, M)"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        rows, hidden, embedding = config.rows, config.keys.hidden, self.encoder.features
        self.code = nn.Linear(embedding, 2 * rows.width)
        # ours: one hidden layer each; the paper says "multi-layer perceptron"
        self.keys = nn.Sequential(
            nn.Linear(embedding, hidden), nn.SiLU(), nn.Linear(hidden, 2 * rows.address)
        )
        self.to_address = nn.Sequential(
            nn.Linear(rows.address, hidden), nn.SiLU(), nn.Linear(hidden, rows.address)
        )
        self.table = nn.Parameter(torch.randn(rows.count, rows.address))  # A', one row of M each

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (self.config.rows.address,)

    # Addresses and codes

    def weights(self, keys: Vectors) -> Addresses:
        """w = f(y) A': how well a key fits each of K learned addresses of unit length."""
        pointer = self.to_address(keys)
        with torch.autocast(keys.device.type, enabled=False):
            return pointer.float() @ F.normalize(self.table, dim=-1).mT

    def bottom_up(self, embedding: Embedding) -> DiagonalNormal:
        """What the image alone says of its code."""
        return DiagonalNormal.from_network(self.code(embedding))

    def codes(self, embedding: Embedding) -> Codes:
        return self.bottom_up(embedding).mean

    def addresses(self, embedding: Embedding, codes: Codes) -> Addresses:
        """At key means: M must not tell which key sample a read draws."""
        return self.weights(DiagonalNormal.from_network(self.keys(embedding)).mean)

    def key_posterior(self, embedding: Embedding, maps: MemoryMap) -> DiagonalNormal:
        """q(y | x): the memory has no say in it."""
        return DiagonalNormal.from_network(self.keys(embedding))

    # Read

    def traces(self, maps: MemoryMap, keys: Vectors) -> Codes:
        """w M, a mix of rows."""
        addresses = self.weights(keys)
        with torch.autocast(maps.device.type, enabled=False):
            return addresses @ maps[:, 0].float()

    def read_maps(self, maps: MemoryMap, keys: Vectors) -> DiagonalNormal:
        """p(z | y, M) = N(w M, sigma^2)."""
        mean = self.traces(maps, keys)
        return DiagonalNormal(mean, (0.5 * self.prior.noise_variance.log()).expand_as(mean))

    def readout_posterior(self, seen: DiagonalNormal, prior: DiagonalNormal) -> DiagonalNormal:
        """q(z | x, y, M): top-down and bottom-up, each weighed by its precision (ours: the paper
        gives both to a network). Its KL falls to zero as the image's own word gets unsure."""
        sure, surer = (-2 * prior.log_std).exp(), (-2 * seen.log_std).exp()
        total = sure + surer
        mean = (sure * prior.mean + surer * seen.mean) / total
        return DiagonalNormal(mean, -0.5 * total.log())

    def terms_at(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        q_keys: DiagonalNormal,
        *,
        sample: bool,
        generator: torch.Generator | None,
    ) -> ElboTerms:
        keys = q_keys.sample(generator) if sample else q_keys.mean
        prior = self.read_maps(maps, keys)
        q_readout = self.readout_posterior(self.bottom_up(embedding), prior)
        readout = q_readout.sample(generator) if sample else q_readout.mean
        return ElboTerms(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_kl=q_readout.kl(prior),
            key_kl=q_keys.kl_to_prior(),
        )

    def log_weight(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        q_keys: DiagonalNormal,
        generator: torch.Generator | None,
    ) -> PerImage:
        keys = q_keys.sample(generator)
        q_readout = self.readout_posterior(self.bottom_up(embedding), self.read_maps(maps, keys))
        readout = q_readout.sample(generator)
        joint = self.joint(episode, maps, keys, readout)
        return joint.total - q_keys.log_prob(keys) - q_readout.log_prob(readout)

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: Vectors, readout: Readout
    ) -> JointDensity:
        """ln p(x, z, y | M): everything the generative side says, from M, y and z alone."""
        return JointDensity(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_log_prior=self.read_maps(maps, keys).log_prob(readout),
            key_log_prior=DiagonalNormal.standard_like(keys).log_prob(keys),
        )

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "*key"], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Draw keys from their prior, read, draw a code, decode its expected pixels.

        `near=(key, spread)` draws keys around one instead: y + spread * noise.
        """
        memory = self.given(memory)
        maps, keys = self.prior_keys(memory, num_samples, near, generator)
        readout = self.read_maps(maps, keys).sample(generator)
        images = self.likelihood.mean(self.decoder(readout))
        return images if memory.is_batch else images[0]

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Write the episode, read it at key means, decode the mean of q(z | x, y, M); M = R."""
        embedding = self.encoder(self.as_episodes(images))
        maps = self.drawn(self.written(embedding), sample=False)
        prior = self.read_maps(maps, self.key_posterior(embedding, maps).mean)
        readout = self.readout_posterior(self.bottom_up(embedding), prior).mean
        pixels = self.likelihood.mean(self.decoder(readout))
        return pixels if images.ndim == 5 else pixels[0]
