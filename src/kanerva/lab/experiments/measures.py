"""Measures that experiments share: distance and sharpness of pictures, means and their errors."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

DEAD = 0.01  # a change of pixels on [0, 1] that nobody sees
WORSE = 1.1  # greyer, or fewer edges, by a tenth counts as blurred
ERRORS = ("std", "se", "ci95", "error")  # what records call the error of a mean

Estimate = dict[str, Any]  # mean, and one of ERRORS
Intervals = dict[str, Estimate]  # by name of a measure, with ci95


# Pictures


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


def greyness(pictures: Float[Tensor, "*any C H W"]) -> Float[Tensor, "*any"]:
    """The mean of 4 p (1 - p): 0 where all pixels are black or white, 1 where all are grey."""
    return (4 * pictures * (1 - pictures)).flatten(-3).mean(-1)


def sharpness(
    pictures: Float[Tensor, "*any C H W"], binary: bool
) -> dict[str, Float[Tensor, "*any"]]:
    """`edges`: the mean difference between neighbouring pixels. `grey`, where true pixels are
    black or white: how little p is as sure as they are."""
    down, across = (pictures.diff(dim=axis).abs().flatten(-3).mean(-1) for axis in (-2, -1))
    found = {"edges": (down + across) / 2}
    return found | {"grey": greyness(pictures)} if binary else found


def is_blurred(now: Intervals, before: Intervals) -> bool:
    """Greyer than before, beyond the error; where pixels are not binary, with fewer edges."""
    low, high = (before["grey"], now["grey"]) if "grey" in now else (now["edges"], before["edges"])
    return high["mean"] > max(WORSE * low["mean"], low["mean"] + low["ci95"] + high["ci95"])


# Means


def estimate(values: Float[Tensor, "n"], error: str = "se") -> Estimate:  # noqa: F821
    """A mean and its standard error, taking values as independent, under one of the names that
    records have for it; `ci95` is half of a 95 % interval."""
    values = values.double()
    spread = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": values.mean().item(), error: 1.96 * spread if error == "ci95" else spread}


def interval(values: Float[Tensor, " n"]) -> Estimate:
    """A mean and half of its 95 % interval."""
    return estimate(values, "ci95")


def error_of(found: Estimate) -> float | None:
    """The error of a mean, by whatever name; None where it has none."""
    return next((found[name] for name in ERRORS if found.get(name) is not None), None)


def pm(found: Estimate | None, digits: int = 3, scale: float = 1.0) -> str:
    """12.34 ±0.05; 12.34 where there is no error; a dash where there is nothing."""
    if found is None:
        return "-"
    text, error = f"{scale * found['mean']:.{digits}f}", error_of(found)
    return text if error is None else f"{text} ±{scale * error:.{digits}f}"


def clearly_lower(difference: Estimate) -> bool:
    """Whether a mean difference is above zero beyond chance: by 1.96 standard errors."""
    return difference["mean"] > 1.96 * difference["se"]
