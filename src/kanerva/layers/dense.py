"""Dense nets: deep linear ones with spectral normalisation (App. E), and one hidden layer."""

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

LAYERS = 3


def deep_linear(inputs: int, hidden: int, outputs: int, layers: int = LAYERS) -> nn.Sequential:
    """`layers` linear maps with nothing between them, each of spectral norm one.

    A product of linear maps is linear, but trains differently from one: the paper's choice for
    "all dense models such as our key network".
    """
    sizes = [inputs, *[hidden] * (layers - 1), outputs]
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return nn.Sequential(*[spectral_norm(nn.Linear(a, b)) for a, b in pairs])


def one_hidden(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """A hidden layer with SiLU between two linear maps."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
