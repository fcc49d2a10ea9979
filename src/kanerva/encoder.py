"""E = f_enc(X): the episode encoder (§3.3)."""

import torch.nn.functional as F
from torch import nn

from kanerva.config import KppEncoderConfig, ResNetConfig
from kanerva.layers.residual import NormSiLU, residual_stack
from kanerva.layers.resnet import ResNet
from kanerva.shapes import Embedding, Episode, FeatureMaps

_BLOCKS = (2, 2, 2, 2)  # residual blocks of each stage: a ResNet-18


class EpisodeEncoder(nn.Module):
    """Embed each sample of an episode, with temporal shift from its neighbours. Any T, also 1."""

    def __init__(self, config: ResNetConfig, channels: int) -> None:
        super().__init__()
        shift = getattr(config, "shift", 0.0)  # only some models' encoders have one
        self.net = ResNet(channels, config.width, _BLOCKS, shift)
        self.features = self.net.features  # D

    def forward(self, episode: Episode) -> Embedding:
        embedding = self.net(2 * episode.flatten(0, 1) - 1, length=episode.shape[1])
        return embedding.unflatten(0, episode.shape[:2])


class SampleEncoder(nn.Module):
    """`kpp`'s encoder: map each sample separately to feature maps of a quarter of its side.

    It has no temporal shift and no batch statistics. What is written for a sample depends on that
    sample alone, so that others can be written and freed.
    """

    def __init__(self, config: KppEncoderConfig, channels: int) -> None:
        super().__init__()
        width = config.width
        self.features = 2 * width  # D
        self.net = nn.Sequential(
            nn.PixelUnshuffle(2),  # pixels as channels: half the side without loss
            nn.Conv2d(4 * channels, width, 3, padding=1),
            residual_stack(width, config.depth),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            residual_stack(2 * width, config.depth),
            NormSiLU(1, 2 * width),
        )

    def forward(self, episode: Episode) -> FeatureMaps:
        images = 2 * episode.flatten(0, 1) - 1
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % 4, 0, -height % 4))
        return self.net(images).unflatten(0, episode.shape[:2])


def quarter(side: int) -> int:
    """A quarter of an image's side, rounded up."""
    return -(-side // 4)
