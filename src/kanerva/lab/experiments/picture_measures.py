"""Measures of pictures: how far apart, how sharp; and their means with a 95 % interval."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

DEAD = 0.01  # a change of pixels on [0, 1] that nobody sees
WORSE = 1.1  # greyer, or fewer edges, by a tenth counts as blurred

Intervals = dict[str, dict[str, float]]  # name of a measure: mean and ci95


def rms(
    some: Float[Tensor, "*any n C H W"], others: Float[Tensor, "*any m C H W"]
) -> Float[Tensor, "*any n m"]:
    """Distances between each of some pictures and each of others: root mean square over pixels."""
    exact = "donot_use_mm_for_euclid_dist"  # the other way a picture is not at 0 from itself
    distance = torch.cdist(some.flatten(-3), others.flatten(-3), compute_mode=exact)
    return distance / math.sqrt(math.prod(some.shape[-3:]))


def mean_distance(pictures: Float[Tensor, "*any n C H W"]) -> Float[Tensor, "*any"]:
    """The mean distance between two of n pictures."""
    count = pictures.shape[-4]
    return rms(pictures, pictures).sum(dim=(-2, -1)) / (count * (count - 1))


def sharpness(
    pictures: Float[Tensor, "*any C H W"], binary: bool
) -> dict[str, Float[Tensor, "*any"]]:
    """`edges`: the mean difference between neighbouring pixels. `grey`, where true pixels are
    black or white: the mean of 4 p (1 - p), 0 where p is as sure as they are, 1 where all grey."""
    down = pictures.diff(dim=-2).abs().flatten(-3).mean(-1)
    across = pictures.diff(dim=-1).abs().flatten(-3).mean(-1)
    found = {"edges": (down + across) / 2}
    return (
        found | {"grey": (4 * pictures * (1 - pictures)).flatten(-3).mean(-1)} if binary else found
    )


def is_blurred(now: Intervals, before: Intervals) -> bool:
    """Greyer than before, beyond the error; where pixels are not binary, with fewer edges."""
    low, high = (before["grey"], now["grey"]) if "grey" in now else (now["edges"], before["edges"])
    return high["mean"] > max(WORSE * low["mean"], low["mean"] + low["ci95"] + high["ci95"])


def interval(values: Float[Tensor, " n"]) -> dict[str, float]:
    """A mean, and the half width of its 95 % interval, taking values as independent."""
    half = 1.96 * values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": values.mean().item(), "ci95": half}
