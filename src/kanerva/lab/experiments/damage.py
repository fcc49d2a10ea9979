"""Shared by experiments on finding: damaged cues, and the calibration of answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kanerva.lab.harness import Figures, Pixels
from kanerva.memory.search import Hits
from kanerva.store.store import Store

Shares = np.ndarray  # probabilities of answers, on [0, 1]
BINS = 15


def box(
    size: Sequence[int], rows: Sequence[float | int], columns: Sequence[float | int] = (0, 1)
) -> Float[Tensor, "H W"]:
    """A mask: 1 inside the given fractions of the rows and columns, else 0."""
    seen = torch.zeros(*size)
    (top, bottom), (left, right) = (
        [round(share * side) for share in shares]
        for shares, side in zip((rows, columns), size, strict=True)
    )
    seen[top:bottom, left:right] = 1
    return seen


def salt_pepper(images: Pixels, share: float, noise: torch.Generator) -> Pixels:
    hit = torch.rand(images.shape, generator=noise) < share
    return torch.where(hit, torch.rand(images.shape, generator=noise).round(), images)


def gaussian(images: Pixels, std: float, noise: torch.Generator) -> Pixels:
    return images + std * torch.randn(images.shape, generator=noise)


def folded(images: Pixels, std: float, noise: torch.Generator) -> Pixels:
    """Add Gaussian noise, take the absolute value, and clip at 1. This is `gaussian_perturb_image`
    of Universal Hopfield Networks (functions.py)."""
    return gaussian(images, std, noise).abs().clamp(0, 1)


def moved(images: Pixels, down: int, right: int) -> Pixels:
    """Shift images; pixels from outside are black."""
    height, width = images.shape[-2:]
    rolled = images.roll((down, right), (-2, -1))
    rows, columns = torch.arange(height) - down, torch.arange(width) - right
    inside = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))
    return rolled * inside


def find_all(store: Store, cues: Pixels, **options: Any) -> list[Hits]:
    """`store.find` for several cues."""
    results = store.find(cues, **options)
    assert isinstance(results, list)
    return results


def nearest_visible(
    held: Float[Tensor, "N D"], cues: Float[Tensor, "n D"], seen: Float[Tensor, "*any D"]
) -> Int[Tensor, " n"]:
    """The row with the least squared error on visible pixels, for each cue. `seen` is one mask for
    all cues, or one for each."""
    products = (2 * cues * seen) @ held.T - torch.atleast_2d(seen) @ held.square().T
    return products.argmax(dim=1)


def nearest_alone(
    held: Float[np.ndarray, "N D"], cue: Float[np.ndarray, " D"], seen: Float[np.ndarray, " D"]
) -> int:
    """The same for one cue in numpy: the search without a library that times are compared with."""
    return int((held @ (2 * cue * seen) - (held * held) @ seen).argmax())


def reliability(probabilities: Shares, right: Bool[np.ndarray, " n"]) -> list[Figures]:
    """Bin answers by their probability: count, mean probability and share of right answers."""
    at = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    rows = []
    for n in range(BINS):
        if (mine := at == n).any():
            mean, share = float(probabilities[mine].mean()), float(right[mine].mean())
            rows.append({"count": int(mine.sum()), "said": mean, "right": share})
    return rows


def calibration_error(bins: list[Figures]) -> float:
    """The expected calibration error (ECE): |mean probability - share right|, averaged over
    answers."""
    total = sum(row["count"] for row in bins)
    return sum(row["count"] * abs(row["said"] - row["right"]) for row in bins) / total


def error_by_chance(probabilities: Shares) -> float:
    """The mean ECE of perfectly calibrated answers with these probabilities: finite samples alone
    give this much."""
    chance = np.random.default_rng(0)
    errors = [
        calibration_error(
            reliability(probabilities, chance.random(len(probabilities)) < probabilities)
        )
        for _ in range(100)
    ]
    return float(np.mean(errors))


def percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
