"""E = f_enc(X): the episode encoder (§3.3)."""

from torch import nn

from kanerva.config import EncoderConfig
from kanerva.layers.resnet import ResNet
from kanerva.shapes import Embedding, Episode


class EpisodeEncoder(nn.Module):
    """Embed each sample of an episode with its neighbours in view. Any T, a lone cue included."""

    def __init__(self, config: EncoderConfig, channels: int) -> None:
        super().__init__()
        self.net = ResNet(channels, config.width, config.blocks, config.shift)
        self.features = self.net.features  # D

    def forward(self, episode: Episode) -> Embedding:
        embedding = self.net(2 * episode.flatten(0, 1) - 1, length=episode.shape[1])
        return embedding.unflatten(0, episode.shape[:2])
