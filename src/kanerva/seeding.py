"""Random streams by name: each draw is a function of (seed, names), never of what ran before it,
nor of how many processes share a batch."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor


def derive_seed(*names: int | str) -> int:
    """A 63-bit seed from a path of names, as in `derive_seed(seed, "binarize", epoch)`."""
    digest = hashlib.sha256("/".join(str(name) for name in names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(*names: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator of its own for one purpose."""
    return torch.Generator(device=device).manual_seed(derive_seed(*names))


# Noise for the episodes of a batch. Where several processes share one, each draws the noise of the
# whole and keeps that of its own episodes: a run is the same on one device and on many.

_share = (0, 1)  # this process, of how many


@contextmanager
def sharing(rank: int, world: int) -> Iterator[None]:
    """Within, this process's batches are part `rank` of `world` equal ones."""
    global _share
    before, _share = _share, (rank, world)
    try:
        yield
    finally:
        _share = before


def uniform(
    shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device | str
) -> Float[Tensor, "*shape"]:
    """Uniform on [0, 1); the first dimension counts episodes."""
    return _drawn(torch.rand, shape, generator, device)


def normal(
    shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device | str
) -> Float[Tensor, "*shape"]:
    """From N(0, 1); the first dimension counts episodes."""
    return _drawn(torch.randn, shape, generator, device)


def _drawn(
    draw: Callable[..., Tensor],
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    device: torch.device | str,
) -> Tensor:
    rank, world = _share
    count = shape[0]
    whole = draw((world * count, *shape[1:]), generator=generator, device=device)
    return whole if world == 1 else whole[rank * count : (rank + 1) * count]
