"""Candidates: the pictures that have the largest inner products with a cue's queries.

If no mask is given, a cue has one query for each mask that it may have had. For a binary cue, the
inner products of these queries differ only by the sum of the picture over a band at an edge. These
sums are cached, so that one product and a few additions replace a product for each mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.memory.channels import Box
from kanerva.memory.evidence import FAINT, Cue


@dataclass(frozen=True)
class Features:
    """`Pictures.features`, with the shape (C, H, W) of the pictures."""

    vectors: Float[Tensor, "N features"]
    image: tuple[int, int, int]

    @cached_property
    def edges(self) -> tuple[Float[Tensor, "rows N"], Float[Tensor, "columns N"]]:
        """Sums of each picture over its first 0, 1, .. H rows, and first 0, 1, .. W columns."""
        each = self.vectors.view(len(self.vectors), *self.image).sum(dim=1)
        sums = [each.sum(dim=2).T.cumsum(dim=0), each.sum(dim=1).T.cumsum(dim=0)]
        down, across = (torch.cat([s.new_zeros(1, s.shape[1]), s]) for s in sums)
        return down, across


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
            products = _with_bands(cues, features)
        else:
            queries = [cue.queries() for cue in cues]
            each = _multiply(torch.cat(queries).flatten(0, 1), vectors)
            products = list(each.view(-1, shifts * number).split([len(q) for q in queries]))
        best = torch.cat(products).topk(count, dim=1).indices
        found = [one.unique() for one in best.split([len(one) for one in products])]
        return [cls(one % number, one // number) for one in found]


def _with_bands(cues: Sequence[Cue], features: Features) -> list[Float[Tensor, "groups N"]]:
    """Inner products with `Cue.queries`. The query (2 x - 1) restricted to a mask has the inner
    product of the whole query, plus the sum of the picture over the masked band: there x is 0."""
    down, across = features.edges
    queries = [2 * cue.picture.flatten() - 1 for cue in cues]
    # the last box is cut at several sides: its query gets a product of its own
    inside = [n for n, cue in enumerate(cues) if len(_cut(cue.boxes[-1], features.image)) > 1]
    queries += [queries[n] * cues[n].masks[-1].flatten() for n in inside]
    products = _multiply(torch.stack(queries), features.vectors)
    boxed = dict(zip(inside, products[len(cues) :], strict=True))
    found = []
    for n, (cue, whole) in enumerate(zip(cues, products[: len(cues)], strict=True)):
        groups = [whole * ((1 - f) / 2) + down[-1] * ((1 + f) / 2) for f in FAINT]
        for box in cue.boxes:
            top, bottom, left, right = box
            bands = [down[top], down[-1] - down[bottom], across[left], across[-1] - across[right]]
            cut = _cut(box, features.image)
            groups.append(boxed[n] if len(cut) > 1 else whole + bands[cut[0]] if cut else whole)
        found.append(torch.stack(groups))
    return found


def _multiply(
    queries: Float[Tensor, "queries features"], vectors: Float[Tensor, "N features"]
) -> Float[Tensor, "queries N"]:
    """queries @ vectors.T, transposed for few queries: the vectors are then read once, in order."""
    if len(queries) <= 8:
        return (vectors @ queries.T).T.contiguous()
    return queries @ vectors.T


def _cut(box: Box, image: tuple[int, int, int]) -> list[int]:
    """The sides (top, bottom, left, right as 0 to 3) at which a box is smaller than the picture."""
    whole = (0, image[1], 0, image[2])
    return [side for side, (at, edge) in enumerate(zip(box, whole, strict=True)) if at != edge]
