"""Keys: where in memory a sample looks. q(Y|X), and how a key becomes a window (§3.3, App. A)."""

from torch import nn

from kanerva.config import KeyConfig
from kanerva.distributions import DiagonalNormal, as_uniform
from kanerva.layers.dense import deep_linear
from kanerva.shapes import Embedding, Keys, Windows


def window(keys: Keys) -> Windows:
    """Squash a key to (scale, x, y) on [-1, 1], the range App. A gives.

    2 * Phi(y) - 1 makes a key from p(Y) = N(0, 1) uniform over that range: the prior favours no
    region of the memory. A negative scale reads a block mirrored.
    """
    return as_uniform(keys)


class KeyNetwork(nn.Module):
    """q(Y|X) = N(mu_key(E), sigma_key(E)^2): K heads of three numbers for each sample (Eq. 6)."""

    def __init__(self, config: KeyConfig, embedding: int, reads: int) -> None:
        super().__init__()
        self.reads = reads
        self.net = deep_linear(embedding, config.hidden, 2 * reads * 3)

    def forward(self, embedding: Embedding) -> DiagonalNormal:
        flat = DiagonalNormal.from_network(self.net(embedding))
        shape = (self.reads, 3)
        return DiagonalNormal(flat.mean.unflatten(-1, shape), flat.log_std.unflatten(-1, shape))
