"""The networks of `kpp`, which `kpp-empty` shares: an encoder, a readout, a decoder."""

from abc import abstractmethod
from math import prod

from jaxtyping import Float
from torch import Tensor

from kanerva.config import KppConfig, KppEmptyConfig
from kanerva.decoder import SpatialDecoder
from kanerva.distributions import DiagonalNormal, KeyPosterior
from kanerva.encoder import SampleEncoder, quarter
from kanerva.models.latent import AnyKeys, LatentModel
from kanerva.readout import Reading, SpatialPrior, SpatialReadout
from kanerva.seeding import Noise
from kanerva.shapes import Blocks, Episode, FeatureMaps, MemoryMap, PerImage, Readout


class KppNetworks(LatentModel):
    """A spatial readout whose posterior is a residual of its prior, and a spatial decoder."""

    config: KppConfig | KppEmptyConfig
    encoder: SampleEncoder
    decoder: SpatialDecoder
    reads_kin = False  # whether the decoder sees what a memory tells of images that are not stored

    def __init__(self, config: KppConfig | KppEmptyConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        self.side = (quarter(height), quarter(width))  # of feature maps
        self.encoder = SampleEncoder(config.encoder, channels)

    def add_readout_and_decoder(self, trace: tuple[int, int, int], outline: bool) -> None:
        """Make both for traces of this shape. With `outline`, the trace is a part of z, and the
        decoder predicts pixels relative to the picture that it encodes."""
        config, features = self.config, self.encoder.features
        self.readout = SpatialReadout(config.readout, trace, features, self.side, outline)
        self.decoder = SpatialDecoder(
            config.decoder,
            config.readout,
            self.likelihood,
            config.image,
            prod(trace) if outline else 0,
            self.reads_kin,
        )

    @property
    def readout_shapes(self) -> list[list[int]]:
        return [list(shape) for shape in self.readout.shapes.values()]

    @abstractmethod
    def traces(self, maps: MemoryMap, keys: AnyKeys) -> Blocks:
        """The block that each key points at (Eq. 5)."""

    def read_maps(self, maps: MemoryMap, keys: AnyKeys) -> SpatialPrior:
        return SpatialPrior(self.readout, self.traces(maps, keys))

    def readout_posterior_at(self, features: FeatureMaps, prior: SpatialPrior) -> DiagonalNormal:
        raise NotImplementedError("z is inferred part by part: see infer")

    def infer(
        self,
        features: FeatureMaps,
        maps: MemoryMap,
        keys: AnyKeys,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> Reading:
        traces = self.traces(maps, keys)
        return self.readout(traces, features, sample=sample, generator=generator)

    def log_likelihood(self, readout: Readout, episode: Episode) -> PerImage:
        """ln p(x | z). If the decoder has a pixel context, each pixel is also conditioned on those
        before it."""
        return self.likelihood.log_prob(self.decoder(readout, episode), episode)

    def sample_pixels(self, readout: Readout, generator: Noise = None) -> Episode:
        """Sample pixels from p(x | z), one by one if the decoder has a pixel context."""
        return self.decoder.sample(readout, generator)

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The training objective; see `objective`."""
        episode = self.as_episodes(episode)
        features = self.encoder(episode)
        maps, keys = self.write_episode(episode, features, generator=generator)
        return self.objective(episode, features, maps, keys, generator)

    def objective(
        self,
        episode: Episode,
        features: FeatureMaps,
        maps: MemoryMap,
        keys: KeyPosterior,
        generator: Noise,
        *auxiliary: Float[Tensor, ""],
    ) -> dict[str, Tensor]:
        """The terms of the bound, and losses as `auxiliary`. If pixels see their neighbours, one of
        them is -ln p(x | z) of a sketch: without neighbours, and with z from the memory alone.
        Neighbours predict a pixel so well so early in training that the memory would stay unused.
        This z is sampled from p(z | M, y), as that of the bound is from q: at the mean, the decoder
        would recognise the sketch by its missing noise, and use the memory in that case only."""
        terms = self.terms(episode, features, maps, keys, generator=generator)
        losses = []
        if self.config.decoder.neighbours:
            readout = self.read_maps(maps, keys.mean).sample(generator)
            losses.append(-self.likelihood.log_prob(self.decoder(readout), episode).mean())
        losses += auxiliary
        return terms.by_name() | ({"auxiliary": sum(losses[1:], losses[0])} if losses else {})
