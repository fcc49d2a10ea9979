"""Shared by experiments on reading: baselines without training, iterative reading, its errors."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from kanerva.lab.harness import Pixels
from kanerva.models.base import MemoryModel
from kanerva.shapes import Episode, PerPixel

Written = Float[Tensor, "B R C H W"]  # the images written to each episode's memory
_AT_ONCE = 256  # images that a model processes together


# Baselines


def median_filter(images: Pixels) -> Pixels:
    """The median of each pixel and its eight neighbours; the border is padded by replication."""
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2).median(dim=-1).values


def squared_distances(
    pictures: Episode, written: Written, observed: PerPixel | None = None
) -> Float[Tensor, "B T R"]:
    """Mean squared pixel distance from each picture to each written image of its episode. If
    `observed` is given, the mean is over the pixels where it is 1."""
    ones = torch.ones_like(pictures[:, :, 0]) if observed is None else observed
    seen = ones[:, :, None].expand_as(pictures).flatten(2).double()
    a, b = pictures.flatten(2).double(), written.flatten(2).double()
    squares = (seen * a * a).sum(-1, keepdim=True) - 2 * (seen * a) @ b.mT + seen @ (b * b).mT
    return (squares / seen.sum(-1, keepdim=True)).clamp(min=0).float()


def nearest(written: Written, cue: Episode, observed: PerPixel | None = None) -> Episode:
    """The written image whose visible pixels are nearest to the cue's."""
    best = squared_distances(cue, written, observed).argmin(dim=-1)
    return torch.stack([images[which] for images, which in zip(written, best, strict=True)])


def hopfield(
    written: Written,
    cue: Episode,
    *,
    beta: float,
    steps: int = 1,
    observed: PerPixel | None = None,
) -> Episode:
    """The modern Hopfield update, xi <- X softmax(beta X^T xi) (Ramsauer et al. 2020, Eq. 3).

    Pixels are scaled to [-1, 1], where all black-and-white images have the same norm; on [0, 1]
    images with more ink would attract more. In the first step hidden pixels of the cue are ignored.
    """
    stored, state = 2 * written.flatten(2) - 1, 2 * cue - 1
    if observed is not None:
        state = state * observed[:, :, None]
    state = state.flatten(2)
    for _ in range(steps):
        state = (beta * state @ stored.mT).softmax(dim=-1) @ stored
    return (state.unflatten(2, cue.shape[2:]) + 1) / 2


# Iterative reading


@torch.no_grad()
def recall_every_step(
    model: MemoryModel,
    images: Pixels,
    cues: Pixels,
    length: int,
    *,
    steps: int,
    noise: torch.Generator,
    observed: Float[Tensor, "n H W"] | None = None,
    other_episode: bool = False,
) -> Float[Tensor, "S n C H W"]:
    """Write images in episodes of `length`, and recall each from its cue; return every step.

    With `other_episode`, read the previous episode's memory, which does not contain the image.
    """
    written, cued = images.unflatten(0, (-1, length)), cues.unflatten(0, (-1, length))
    if other_episode:
        written = written.roll(1, dims=0)
    seen = None if observed is None else observed.unflatten(0, (-1, length))
    recalled, several = [], max(1, _AT_ONCE // length)
    for start in range(0, len(written), several):
        part = slice(start, start + several)
        memory = model.write(written[part], generator=noise)
        visible = None if seen is None else seen[part]
        pictures = model.recall(memory, cued[part], steps=steps, observed=visible)
        recalled.append(pictures.flatten(1, 2))
    return torch.cat(recalled, dim=1)


def nearest_is_own(pictures: Episode, written: Episode) -> Bool[Tensor, "B T"]:
    """Whether image t is the written image nearest to picture t. Ties count as true."""
    distance = squared_distances(pictures, written)
    own = distance.diagonal(dim1=1, dim2=2)
    return own <= distance.min(dim=-1).values + 1e-7


def mean_square_error(
    pictures: Float[Tensor, "*S n C H W"], images: Pixels
) -> Float[Tensor, "*S n"]:
    """Mean squared pixel error of each picture."""
    return (pictures - images).square().flatten(-3).mean(dim=-1)
