"""Cues: damaged images to recall from, noisy (§4.1) or partly hidden.

The paper does not give the strength of its noise; the defaults are ours.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Images = Float[Tensor, "*B T C H W"]
Cue = Callable[[Images, torch.Generator], Images]


def clean(images: Images, generator: torch.Generator) -> Images:
    """The image itself."""
    return images


def salt_pepper(images: Images, generator: torch.Generator, share: float = 0.1) -> Images:
    """A fraction of the pixels becomes black or white, with equal probability, in all channels."""
    one = images[..., :1, :, :]
    hit = torch.rand(one.shape, generator=generator, device=images.device) < share
    salt = torch.rand(one.shape, generator=generator, device=images.device).round()
    return torch.where(hit, salt, images)


def speckle(images: Images, generator: torch.Generator, std: float = 0.3) -> Images:
    """Multiplicative Gaussian noise: x + x * noise."""
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    return (images + images * std * noise).clamp(0, 1)


def poisson(images: Images, generator: torch.Generator, peak: float = 10.0) -> Images:
    """Shot noise: photon counts with `peak` expected at full brightness."""
    return (torch.poisson(images * peak, generator=generator) / peak).clamp(0, 1)


def lower_half_hidden(images: Images, generator: torch.Generator) -> Images:
    """Black out the lower half."""
    half = images.shape[-2] // 2
    return torch.cat([images[..., :half, :], torch.zeros_like(images[..., half:, :])], dim=-2)


NOISES = ("salt_pepper", "speckle", "poisson")  # §4.1
CUES: dict[str, Cue] = {
    f.__name__: f for f in (salt_pepper, speckle, poisson, lower_half_hidden, clean)
}


def observed(name: str, images: Images) -> Float[Tensor, "*B T H W"] | None:
    """Which pixels a cue of that name still shows, 1 or 0; None if all."""
    if name != "lower_half_hidden":
        return None
    seen = torch.ones_like(images[..., 0, :, :])
    seen[..., images.shape[-2] // 2 :, :] = 0
    return seen


def make_cue(name: str, images: Images, generator: torch.Generator) -> Images:
    """Make a cue by name."""
    return CUES[name](images, generator)
