"""Candidates: which pictures have the largest inner products with a cue's queries.

Where masks are not given a cue has a query for each it may have had. Those of a binary cue differ
by what its pictures hold in a band at an edge, of which sums are kept: one product and a few
additions instead of a product for each mask.
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
    """`Pictures.features`, of pictures (C, H, W)."""

    vectors: Float[Tensor, "N features"]
    image: tuple[int, int, int]

    @cached_property
    def edges(self) -> tuple[Float[Tensor, "rows N"], Float[Tensor, "columns N"]]:
        """Sums of the first 0, 1, .. H rows, and of the first 0, 1, .. W columns."""
        each = self.vectors.view(len(self.vectors), *self.image).sum(dim=1)
        sums = [each.sum(dim=2).T.cumsum(dim=0), each.sum(dim=1).T.cumsum(dim=0)]
        down, across = (torch.cat([s.new_zeros(1, s.shape[1]), s]) for s in sums)
        return down, across


@dataclass(frozen=True)
class Candidates:
    """Rows of what is held and shifts of the cue, in pairs: all of them, or the best."""

    rows: Int[Tensor, " K"]
    shifts: Int[Tensor, " K"]

    @classmethod
    def rank(cls, cues: Sequence[Cue], features: Features, count: int) -> "list[Candidates]":
        """For each cue the `count` pairs with the largest inner products, for each mask."""
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
    """As `Cue.queries` has them: (2 x - 1) on a mask is that on everything, and the sum of what
    the picture has where the cue shows nothing."""
    down, across = features.edges
    queries = [2 * cue.picture.flatten() - 1 for cue in cues]
    inside = [n for n, cue in enumerate(cues) if len(_cut(cue.boxes[-1], features.image)) > 1]
    queries += [queries[n] * cues[n].masks[-1].flatten() for n in inside]  # the innermost box
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
    """Few queries are quicker this way round: the vectors are read once, in order."""
    if len(queries) <= 8:
        return (vectors @ queries.T).T.contiguous()
    return queries @ vectors.T


def _cut(box: Box, image: tuple[int, int, int]) -> list[int]:
    """The sides at which a box ends before the picture does."""
    whole = (0, image[1], 0, image[2])
    return [side for side, (at, edge) in enumerate(zip(box, whole, strict=True)) if at != edge]
