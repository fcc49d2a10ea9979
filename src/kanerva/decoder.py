"""p(X|Z): the conv-transpose decoder (App. E)."""

from math import ceil

from torch import nn

from kanerva.config import DecoderConfig
from kanerva.layers.evonorm import EvoNormS0
from kanerva.shapes import DecoderOutput, Readout

_NARROWEST = 16  # ours: feature maps are halved per layer, but not below this


class Decoder(nn.Module):
    """Readout to likelihood parameters: project, double the side `layers` times, crop."""

    def __init__(
        self, config: DecoderConfig, readout: int, outputs: int, height: int, width: int
    ) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.start = (ceil(height / 2**config.layers), ceil(width / 2**config.layers))
        self.project = nn.Linear(readout, config.base * self.start[0] * self.start[1])
        maps, layers = config.base, [EvoNormS0(config.base)]
        for _ in range(config.layers):
            fewer = max(maps // 2, _NARROWEST)
            layers += [nn.ConvTranspose2d(maps, fewer, 4, stride=2, padding=1), EvoNormS0(fewer)]
            maps = fewer
        self.stack = nn.Sequential(*layers, nn.Conv2d(maps, outputs, 3, padding=1))

    def forward(self, readout: Readout) -> DecoderOutput:
        maps = self.project(readout.flatten(0, 1)).unflatten(-1, (-1, *self.start))
        pixels = self.stack(maps)
        top = (pixels.shape[-2] - self.height) // 2
        left = (pixels.shape[-1] - self.width) // 2
        pixels = pixels[..., top : top + self.height, left : left + self.width]
        return pixels.unflatten(0, readout.shape[:2])
