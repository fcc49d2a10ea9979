"""Shared measures: distance and sharpness of pictures, means and their errors."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

DEAD = 0.01  # a change of pixels on [0, 1] that is not visible
WORSE = 1.1  # factor: 10 % greyer, or 10 % weaker edges, counts as blurred
ERRORS = ("std", "se", "ci95", "error")  # names for the error of a mean in records

Estimate = dict[str, Any]  # mean, and one of ERRORS
Intervals = dict[str, Estimate]  # by name of a measure, with ci95


# Pictures


def rms(
    some: Float[Tensor, "*any n C H W"], others: Float[Tensor, "*any m C H W"]
) -> Float[Tensor, "*any n m"]:
    """Root mean square pixel distances from each of `some` pictures to each of `others`."""
    exact = "donot_use_mm_for_euclid_dist"  # else a picture's distance to itself is not 0
    distance = torch.cdist(some.flatten(-3), others.flatten(-3), compute_mode=exact)
    return distance / math.sqrt(math.prod(some.shape[-3:]))


def mean_distance(pictures: Float[Tensor, "*any n C H W"]) -> Float[Tensor, "*any"]:
    """The mean distance between two of n pictures."""
    count = pictures.shape[-4]
    return rms(pictures, pictures).sum(dim=(-2, -1)) / (count * (count - 1))


def greyness(pictures: Float[Tensor, "*any C H W"]) -> Float[Tensor, "*any"]:
    """The mean of 4 p (1 - p): 0 if all pixels are black or white, 1 if all are grey."""
    return (4 * pictures * (1 - pictures)).flatten(-3).mean(-1)


def sharpness(
    pictures: Float[Tensor, "*any C H W"], binary: bool
) -> dict[str, Float[Tensor, "*any"]]:
    """`edges`: the mean difference between neighbouring pixels. `grey`, for binary images only:
    greyness."""
    down, across = (pictures.diff(dim=axis).abs().flatten(-3).mean(-1) for axis in (-2, -1))
    values = {"edges": (down + across) / 2}
    return values | {"grey": greyness(pictures)} if binary else values


def is_blurred(now: Intervals, before: Intervals) -> bool:
    """Whether pictures are clearly greyer than before. If they are not binary, whether their edges
    are clearly weaker."""
    low, high = (before["grey"], now["grey"]) if "grey" in now else (now["edges"], before["edges"])
    return high["mean"] > max(WORSE * low["mean"], low["mean"] + low["ci95"] + high["ci95"])


# Means


def estimate(values: Float[Tensor, "n"], error: str = "se") -> Estimate:  # noqa: F821
    """A mean and its standard error, for independent values. `error` is the key of the error in
    records; for `ci95` it is half the width of a 95 % interval instead."""
    values = values.double()
    spread = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": values.mean().item(), error: 1.96 * spread if error == "ci95" else spread}


def over_memories(values: Float[Tensor, " n"], each: int) -> Float[Tensor, " memories"]:
    """The mean of each memory's values. Pictures of one memory are alike, so that as independent
    values they would make errors too small."""
    return values.unflatten(0, (-1, each)).mean(dim=1)


def interval(values: Float[Tensor, " n"]) -> Estimate:
    """A mean and half the width of its 95 % interval."""
    return estimate(values, "ci95")


def error_of(value: Estimate) -> float | None:
    """The error of a mean under any of its names; None if it has none."""
    return next((value[name] for name in ERRORS if value.get(name) is not None), None)


def pm(value: Estimate | None, digits: int = 3, scale: float = 1.0) -> str:
    """Format as 12.34 ±0.05; as 12.34 without an error; as a dash for None."""
    if value is None:
        return "-"
    text, error = f"{scale * value['mean']:.{digits}f}", error_of(value)
    return text if error is None else f"{text} ±{scale * error:.{digits}f}"


def clearly_lower(difference: Estimate) -> bool:
    """Whether a mean difference is significantly above zero: by 1.96 standard errors."""
    return difference["mean"] > 1.96 * difference["se"]
