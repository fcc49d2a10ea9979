"""Z, the readout: its posterior q(Z|X) and its learned prior p(Z|M-hat, Y) (§3.3, §3.5, App. E)."""

from torch import nn

from kanerva.config import MemoryConfig, ReadoutConfig
from kanerva.distributions import DiagonalNormal
from kanerva.layers.dense import deep_linear
from kanerva.layers.evonorm import EvoNormS0
from kanerva.shapes import Embedding, Traces


class ReadoutPosterior(nn.Module):
    """q(Z|X): amortised, straight from the embedding ("stable top branch", Fig. 5)."""

    def __init__(self, config: ReadoutConfig, embedding: int) -> None:
        super().__init__()
        self.net = deep_linear(embedding, config.hidden, 2 * config.size, config.layers)

    def forward(self, embedding: Embedding) -> DiagonalNormal:
        return DiagonalNormal.from_network(self.net(embedding))


class ReadoutPrior(nn.Module):
    """p(Z|M-hat, Y): the K traces stacked on channels, a convolutional encoder, a projection.

    EvoNorm-S0 keeps statistics to one sample: a prior must see the episode through M alone.
    """

    def __init__(self, config: ReadoutConfig, memory: MemoryConfig) -> None:
        super().__init__()
        width, side = config.prior_width, memory.block
        layers: list[nn.Module] = [
            nn.Conv2d(memory.reads * memory.channels, width, 3, padding=1),
            EvoNormS0(width),
        ]
        for _ in range(2):
            layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), EvoNormS0(2 * width)]
            width, side = 2 * width, (side + 1) // 2
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side**2, 2 * config.size))

    def forward(self, traces: Traces) -> DiagonalNormal:
        stacked = traces.flatten(2, 3).flatten(0, 1)  # (B T, K Cm, h, w)
        return DiagonalNormal.from_network(self.net(stacked).unflatten(0, traces.shape[:2]))
