"""`kpp-paper`: Kanerva++ as printed (§3). Read this beside the paper.

    memory = model.write(images)                # embed, pool, M = f_mem(E): one pass (Fig. 3)
    samples = model.generate(memory, 64)        # sample keys from N(0, 1), read, decode (Fig. 4)
    steps = model.recall(memory, noisy)         # iterative reading (Fig. 5)
    terms = model.elbo(images)                  # L_T, term by term (Eq. 4)

The samples X of an episode are embedded, each with its neighbours in view, E = f_enc(X), and pooled
into one memory M. Each sample has K keys. A key cuts one block out of M by a spatial transformer,
and the K blocks determine the prior of the readout, p(Z | M-hat, Y). The decoder sees only Z.
"""

from kanerva.config import KppPaperConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal
from kanerva.encoder import EpisodeEncoder
from kanerva.memory.blocks import read_blocks
from kanerva.memory.keys import KeyNetwork, window
from kanerva.memory.writers import PooledWriter
from kanerva.models.latent import LatentModel
from kanerva.readout import ReadoutPosterior, ReadoutPrior
from kanerva.seeding import Noise
from kanerva.shapes import Embedding, Episode, Keys, MemoryMap, Traces


class KppPaper(LatentModel):
    """Pooled writer, Gaussian keys, vector readout."""

    reconstructed = "reconstructed: q(z|x), the memory not used"
    config: KppPaperConfig
    encoder: EpisodeEncoder

    def __init__(self, config: KppPaperConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.encoder = EpisodeEncoder(config.encoder, channels)
        self.encodes_alone = config.encoder.shift == 0
        embedding = self.encoder.features
        self.writer = PooledWriter(config.memory, embedding)
        self.key_network = KeyNetwork(config.keys, embedding, config.memory.reads)
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        self.readout_prior = ReadoutPrior(config.readout, config.memory)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, config.readout.size, outputs, height, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (self.config.memory.reads, 3)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return self.config.memory.shape

    def write_maps(
        self, episode: Episode, features: Embedding, *, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        """M = f_mem(f_enc(X)): deterministic (Fig. 3)."""
        return self.writer(features)

    def key_posterior(self, features: Embedding, maps: MemoryMap) -> DiagonalNormal:
        """q(Y|X) (Eq. 6): it does not depend on the memory."""
        return self.key_network(features)

    def traces(self, maps: MemoryMap, keys: Keys) -> Traces:
        """K blocks for each sample, one for each key, cut out of the memory (Eq. 5)."""
        return read_blocks(maps, window(keys), self.config.memory.block)

    def read_maps(self, maps: MemoryMap, keys: Keys) -> DiagonalNormal:
        """p(Z | M-hat, Y), computed from the blocks that keys point at."""
        return self.readout_prior(self.traces(maps, keys))

    def readout_posterior_at(self, features: Embedding, prior: DiagonalNormal) -> DiagonalNormal:
        """q(Z|X): it does not depend on the memory."""
        return self.readout_posterior(features)
