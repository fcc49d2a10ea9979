"""Candidates: the pictures that have the largest inner products with a cue's queries.

If no mask is given, a cue has one query for each mask that it may have had. For a binary cue x, all
of them have the same inner product with x, and differ only by the sum of the picture over a band at
an edge. These sums are cached, so that one product and a few additions replace a product for each
mask. Pixels before the first and after the last that any query uses are not multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.memory.channels import Box
from kanerva.memory.evidence import FAINT, Cue

_CUES = 16  # cues whose sums are ranked at once: more of them would not fit into a cache


@dataclass(frozen=True)
class Features:
    """`Pictures.features`, with the shape (C, H, W) of the pictures."""

    vectors: Float[Tensor, "N features"]
    image: tuple[int, int, int]

    @cached_property
    def bands(self) -> Float[Tensor, "rows N"]:
        """What is added to twice the inner product of a picture with x (`_with_bands`): minus its
        sum without its first 0, 1, .. H rows; minus the sum of these rows; both for columns; then a
        multiple of its whole sum for each weight of `FAINT`."""
        each = self.vectors.view(len(self.vectors), *self.image).sum(dim=1)
        parts = []
        for sums in (each.sum(dim=2), each.sum(dim=1)):
            first = F.pad(sums.cumsum(dim=1), (1, 0)).T
            parts += [first - first[-1], -first]
        whole = each.sum(dim=(1, 2))
        return torch.cat([*parts, *(whole[None] * (2 * f / (1 - f)) for f in FAINT)])


@dataclass(frozen=True)
class Candidates:
    """Pairs of a stored picture (its row) and a shift of the cue (its index): all, or the best."""

    rows: Int[Tensor, " K"]
    shifts: Int[Tensor, " K"]

    @classmethod
    def rank(cls, cues: Sequence[Cue], features: Features, count: int) -> "list[Candidates]":
        """For each cue, the `count` pairs with the largest inner products of each query group."""
        vectors, shifts = features.vectors, len(cues[0].shifts)
        number = len(vectors)
        if number * shifts <= count:
            every = torch.arange(number * shifts, device=vectors.device)
            return [cls(every % number, every // number)] * len(cues)
        if shifts == 1 and all(cue.has_bands for cue in cues):
            return [
                cls(rows, torch.zeros_like(rows)) for rows in _with_bands(cues, features, count)
            ]
        queries = [cue.queries() for cue in cues]
        products = _multiply(torch.cat(queries).flatten(0, 1), vectors).view(-1, shifts * number)
        best = products.topk(count, dim=1).indices.split([len(query) for query in queries])
        found = [one.unique() for one in best]
        return [cls(one % number, one // number) for one in found]


def _with_bands(cues: Sequence[Cue], features: Features, count: int) -> list[Int[Tensor, " K"]]:
    """The `count` rows with the largest inner products with each of `Cue.queries`. With x = 0 in a
    masked band, the query (2 x - 1) restricted to a mask gives twice the product with x, minus the
    sum over the mask. The query x + f (1 - x) of `FAINT` is 2 x + 2 f / (1 - f), up to a factor."""
    height, width = features.image[1:]
    starts = 0, height + 1, 2 * height + 2, 2 * height + width + 3  # in `bands`, of the four sides
    faint = [2 * height + 2 * width + 4 + n for n in range(len(FAINT))]
    pictures = [cue.picture.flatten() for cue in cues]
    # the last box may be cut at several sides: then its query gets a product of its own
    inside = [n for n, cue in enumerate(cues) if len(_cut(cue.boxes[-1], features.image)) > 1]
    queries = pictures + [(pictures[n] - 0.5) * cues[n].masks[-1].flatten() for n in inside]
    products = _multiply(torch.stack(queries), features.vectors)
    boxed = dict(zip(inside, products[len(cues) :], strict=True))
    most = len(FAINT) + max(len(cue.boxes) for cue in cues)
    sums = products.new_empty(min(_CUES, len(cues)) * most, len(features.vectors))
    found, sizes = [], []
    for n, cue in enumerate(cues):
        rows = faint.copy()
        for box in cue.boxes[: len(cue.boxes) - (n in boxed)]:
            side = (*_cut(box, features.image), 0)[0]  # the whole cue: a band of no rows
            rows.append(starts[side] + box[side])
        own = sums[sum(sizes) :]
        for row, group in zip(rows, own[: len(rows)], strict=True):
            torch.add(features.bands[row], products[n], alpha=2, out=group)
        if n in boxed:
            own[len(rows)] = boxed[n]
        sizes.append(len(rows) + (n in boxed))
        if len(sizes) == _CUES or n == len(cues) - 1:
            best = sums[: sum(sizes)].topk(count, dim=1).indices
            found += [one.unique() for one in best.split(sizes)]
            sizes = []
    return found


def _multiply(
    queries: Float[Tensor, "queries features"], vectors: Float[Tensor, "N features"]
) -> Float[Tensor, "queries N"]:
    """queries @ vectors.T, without the pixels that no query uses at the start and at the end. A few
    queries that use most pixels are multiplied in the other order: the vectors are then read once,
    without gaps."""
    used = queries.any(dim=0).nonzero()
    if not len(used):
        return queries.new_zeros(len(queries), len(vectors))
    first, end = int(used[0]), int(used[-1]) + 1
    if len(queries) <= 8 and 2 * (end - first) > queries.shape[1]:
        return (vectors @ queries.T).T.contiguous()
    return queries[:, first:end] @ vectors[:, first:end].T


def _cut(box: Box, image: tuple[int, int, int]) -> list[int]:
    """The sides (top, bottom, left, right as 0 to 3) at which a box is smaller than the picture."""
    whole = (0, image[1], 0, image[2])
    return [side for side, (at, edge) in enumerate(zip(box, whole, strict=True)) if at != edge]
