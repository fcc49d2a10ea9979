"""Named random streams. Each sample depends only on (seed, names), not on what ran before it or on
how many processes share a batch."""

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.errors import UserError


def derive_seed(*names: int | str) -> int:
    """A 63-bit seed from a path of names, as in `derive_seed(seed, "binarize", epoch)`."""
    digest = hashlib.sha256("/".join(str(name) for name in names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(*names: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """A separate generator for one purpose, seeded by a path of names."""
    return torch.Generator(device=device).manual_seed(derive_seed(*names))


class Share:
    """This process's part of the noise of a batch that several processes share.

    Each process draws the noise of the whole batch from torch's global generator and keeps that of
    its own episodes, so a run is the same on one device and on many. It is a plain class because
    module wrappers take dataclasses apart.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


class Same:
    """The same noise for every episode, from a generator: a result depends on its own episode
    alone."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator


Noise: TypeAlias = torch.Generator | Share | Same | None
"""The source of random numbers: a generator, a share of torch's global one, or (None) that one."""


def uniform(
    shape: tuple[int, ...], noise: Noise, device: torch.device | str
) -> Float[Tensor, "*shape"]:
    """Uniform on [0, 1); the first dimension counts episodes."""
    return _draw(torch.rand, shape, noise, device)


def normal(
    shape: tuple[int, ...], noise: Noise, device: torch.device | str
) -> Float[Tensor, "*shape"]:
    """From N(0, 1); the first dimension counts episodes."""
    return _draw(torch.randn, shape, noise, device)


def _draw(
    draw: Callable[..., Tensor],
    shape: tuple[int, ...],
    noise: Noise,
    device: torch.device | str,
) -> Tensor:
    if isinstance(noise, int):
        raise UserError(
            f"generator is a torch.Generator, such as torch.Generator().manual_seed({noise})"
        )
    if isinstance(noise, Same):
        return draw((1, *shape[1:]), generator=noise.generator, device=device).expand(shape)
    if not isinstance(noise, Share):
        return draw(shape, generator=noise, device=device)
    count = shape[0]
    whole = draw((noise.world * count, *shape[1:]), device=device)
    return whole[noise.rank * count : (noise.rank + 1) * count]


def as_generator(noise: Noise) -> torch.Generator | None:
    """The generator to pass to torch's functions. For use outside training, where no batch is
    shared between processes."""
    return noise if isinstance(noise, torch.Generator) else None
