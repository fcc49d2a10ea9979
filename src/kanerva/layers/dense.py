"""Dense nets: deep linear ones with spectral normalisation (App. E), and one hidden layer."""

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

LAYERS = 3


def deep_linear(
    inputs: int, hidden: int, outputs: int, layers: int = LAYERS, spectral: bool = True
) -> nn.Sequential:
    """`layers` linear maps with nothing between them, each of spectral norm one if `spectral`.

    A product of linear maps is linear, but trains differently from one: the paper's choice for
    "all dense models such as our key network".
    """
    sizes = [inputs, *[hidden] * (layers - 1), outputs]
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    maps = [nn.Linear(a, b) for a, b in pairs]
    return nn.Sequential(*[spectral_norm(one) if spectral else one for one in maps])


def one_hidden(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """A hidden layer with SiLU between two linear maps."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
