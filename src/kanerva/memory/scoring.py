"""ln p(cue | picture) of many pictures and cues, summed over every mask and channel.

Pictures and cues are quantised to few values per pixel. A score then depends only on how often
each pair of values occurs, so one histogram serves all channels. Binary cues share one table of
scores, so many of them are scored at once, and one histogram also serves all masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from kanerva.memory.channels import Channel, wrapped
from kanerva.memory.evidence import (
    RESIDUALS,
    SHADES,
    Cue,
    Pictures,
    binary_table,
    look_up,
    to_levels,
)

_BORDER = 0.01  # p(ink) outside the frame
_CHUNK, _COUNTS = 512, 2**20  # pictures, and counts of their levels, at once
_ROUNDING = 5e-6  # nats for each pixel: largest error of a binary cue's factored table


class Scorer:
    """Scores pictures as what some cues may show."""

    def __init__(self, cues: Sequence[Cue]) -> None:
        self.cues, first = cues, cues[0]
        binary = first.binary and all(
            cue.seen.kind == "binary" and cue.channels == first.channels for cue in cues
        )
        self._batch = _Binary.of(cues) if binary else _Batch.of(cues) if len(cues) == 1 else None

    def __call__(
        self,
        pictures: Pictures,
        owner: Int[Tensor, " K"] | None = None,
        shifts: Int[Tensor, " K"] | None = None,
    ) -> Float[Tensor, " K"]:
        """ln p(cue | picture k, moved by shift k) of cue `owner[k]`, or of the first. The pixels
        that a shift brings in from outside the frame are taken to be blank."""
        device = pictures.levels.device
        if owner is None:
            owner = torch.zeros(len(pictures), dtype=torch.long, device=device)
        if self._batch is not None:
            rows = torch.arange(len(owner), device=device).split(self._batch.chunk)
            parts = [(pictures[r], owner[r], None if shifts is None else shifts[r]) for r in rows]
            return torch.cat([self._batch.score(*part) for part in parts])
        score = torch.empty(len(owner), device=device)
        for n in owner.unique().tolist():  # each has its own table
            rows = (owner == n).nonzero()[:, 0]
            own = None if shifts is None else shifts[rows]
            score[rows] = log_evidence(self.cues[n], pictures[rows], own)
        return score


def log_evidence(
    cue: Cue, pictures: Pictures, shifts: Int[Tensor, " K"] | None = None
) -> Float[Tensor, " K"]:
    """ln p(cue | picture k, moved by shift k)."""
    return Scorer([cue])(pictures, None, shifts)


def _log_sum_exp(values: Float[Tensor, "channels K"]) -> Float[Tensor, " K"]:
    """logsumexp over channels. Terms below e^-80 of the largest count as e^-80: floats below 1e-38
    are many times slower to compute."""
    top = values.amax(dim=0)
    return (values - top).clamp_(min=-80).exp_().sum(dim=0).log_() + top


def _moved(values: Tensor, shifts: list[tuple[int, int]], dim: int) -> Tensor:
    """Values (.., H, W) under every shift, along a new dimension."""
    if shifts == [(0, 0)]:
        return values.unsqueeze(dim)
    return torch.stack([values.roll(shift, (-2, -1)) for shift in shifts], dim)


def _all_masks(cues: Sequence[Cue]) -> Bool[Tensor, "cues masks H W"]:
    """The masks of each cue; nothing is visible beyond its last mask."""
    most = max(len(cue.masks) for cue in cues)
    if all(len(cue.masks) == most for cue in cues):
        return torch.stack([cue.masks for cue in cues])
    masks = cues[0].masks.new_zeros(len(cues), most, *cues[0].masks.shape[1:])
    for own, cue in zip(masks, cues, strict=True):
        own[: len(cue.masks)] = cue.masks
    return masks


def _log_chances(cues: Sequence[Cue]) -> Float[Tensor, "masks cues"]:
    """The prior of each mask of each cue; -inf beyond a cue's last mask."""
    chances = cues[0].chances.new_zeros(len(cues), max(len(cue.masks) for cue in cues))
    for own, cue in zip(chances, cues, strict=True):
        own[: len(cue.masks)] = cue.chances
    return chances.T.log()


@lru_cache(maxsize=16)
def _factors(
    channels: tuple[Channel, ...],
) -> list[tuple[Float[Tensor, "r levels"], Float[Tensor, "channels r"]]]:
    """The table of a binary cue as products of two small matrices, for pixels 0 and 1: scores of a
    hundred channels are smooth functions of a level, so ten numbers give all of them."""
    found = []
    for each in binary_table(channels).double().view(2, 256, -1):
        left, sizes, right = torch.linalg.svd(each, full_matrices=False)
        left = left * sizes
        rank = next(
            r
            for r in range(1, len(sizes) + 1)
            if r == len(sizes) or (left[:, :r] @ right[:r] - each).abs().max() <= _ROUNDING
        )
        found.append((left[:, :rank].T.float().contiguous(), right[:rank].T.float().contiguous()))
    return found


@dataclass(frozen=True)
class _Binary:
    """Binary cues of binary pictures. Pixels with the same value that are visible under the same
    masks form a cell. One histogram for each cell serves all masks; the score of a mask is the sum
    over its cells. With the masks of `possible_boxes` there are nine cells of blank pixels, and one
    of ink."""

    like: Cue  # any one of the cues
    cells: Int[Tensor, "cues shifts C H W"]  # the last cell is visible under no mask
    members: list[Float[Tensor, "masks _"]]  # for pixels 0 and 1: 1 if visible under a mask
    log_chances: Float[Tensor, "masks cues"]

    @classmethod
    def of(cls, cues: Sequence[Cue]) -> "_Binary":
        like, log_chances = cues[0], _log_chances(cues)
        most = len(log_chances)
        bit = torch.arange(most, device=like.masks.device)[:, None]
        bits = (_all_masks(cues).int() << bit[..., None]).sum(dim=1, dtype=torch.int32)
        kinds = torch.stack([cue.seen.codes.int() for cue in cues]) << most
        kinds = torch.where(bits[:, None] == 0, 2 << most, kinds | bits[:, None])
        present = torch.bincount(kinds.flatten(), minlength=(2 << most) + 1) > 0
        present[-1] = False
        cell = (present.cumsum(0) - 1).int()
        cell[-1] = present.sum()
        members = [
            ((of.nonzero()[:, 0] >> bit) & 1).float() for of in present[:-1].split(1 << most)
        ]
        return cls(like, _moved(look_up(cell, kinds), like.shifts, 1), members, log_chances)

    @property
    def chunk(self) -> int:
        """Pictures scored at once."""
        cells = sum(own.shape[1] for own in self.members)  # 0 if nothing is visible
        return min(_CHUNK, max(16, _COUNTS // (256 * max(1, cells))))

    def score(
        self, pictures: Pictures, owner: Int[Tensor, " K"], shifts: Int[Tensor, " K"] | None
    ) -> Float[Tensor, " K"]:
        """Count the levels in each cell, and multiply the counts by the factored table."""
        at = torch.zeros_like(owner) if shifts is None else shifts
        levels = _levels_inside(pictures, self.like, None if shifts is None else at)
        number, sizes = len(levels), [own.shape[1] for own in self.members]
        starts = torch.arange(number, device=owner.device, dtype=torch.int32) * 256
        cells = self.cells.flatten(0, 1).index_select(0, owner * len(self.like.shifts) + at)
        bins = cells * (256 * number) + levels + starts[:, None, None, None]
        bins = bins.flatten().long()
        counts = torch.zeros((sum(sizes) + 1) * 256 * number, device=owner.device)
        counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=counts.dtype))
        each = self.like.log_prior[:, None]
        parts = counts.view(-1, number * 256).split([*sizes, 1])
        factors = _factors(self.like.channels)
        for own, part, (left, right) in zip(self.members, parts, factors, strict=False):
            sums = left.to(part) @ part.view(-1, 256).T  # (r, cells K)
            sums = own @ sums.view(len(left), own.shape[1], number)  # (r, masks, K)
            each = each + right.to(part) @ sums.flatten(1)  # (channels, masks K)
        by_mask = _log_sum_exp(each).view(-1, number)
        return (by_mask + self.log_chances[:, owner]).logsumexp(dim=0)


def _levels_inside(
    pictures: Pictures, like: Cue, at: Int[Tensor, " K"] | None
) -> Int[Tensor, "K C H W"]:
    """The levels of binary pictures, of a blank border where a shift brings in other pixels."""
    levels = pictures.levels.int() >> like.coarse
    if at is None:
        return levels
    outside = torch.stack([wrapped(like.masks[0], s) for s in like.shifts])[at]
    border = int(to_levels(torch.tensor(_BORDER).logit())) >> like.coarse
    return torch.where(outside[:, None], border, levels)


@dataclass(frozen=True)
class _Batch:
    """Cues that share a table: their pixels and masks, under every shift."""

    like: Cue  # any one of them
    pixels: Shaped[Tensor, "cues shifts C H W"]  # indices of values (binary pictures), or values
    masks: Bool[Tensor, "masks cues shifts H W"]
    log_chances: Float[Tensor, "masks cues"]
    chunk = _CHUNK

    @classmethod
    def of(cls, cues: Sequence[Cue]) -> "_Batch":
        like, log_chances = cues[0], _log_chances(cues)
        pixels = [cue.seen.codes.int() if like.binary else cue.picture for cue in cues]
        masks = _moved(_all_masks(cues).transpose(0, 1), like.shifts, 2)
        return cls(like, _moved(torch.stack(pixels), like.shifts, 1), masks, log_chances)

    def score(
        self, pictures: Pictures, owner: Int[Tensor, " K"], shifts: Int[Tensor, " K"] | None
    ) -> Float[Tensor, " K"]:
        """For each mask, count the pairs of values in a histogram and multiply it by the table."""
        table = self.like.table
        at = torch.zeros_like(owner) if shifts is None else shifts
        pairs = self._pairs(pictures, owner, at, shifts is not None)
        bins, count = len(table), len(pairs) * len(table)
        rows = torch.arange(len(pairs), device=pairs.device, dtype=pairs.dtype) * bins
        pairs = pairs + rows[:, None, None, None]
        scores, alone = [], len(self.masks[0]) == 1 and shifts is None
        for masks, log_chances in zip(~self.masks, self.log_chances, strict=True):
            hidden = masks[0, 0] if alone else masks[owner, at][:, None]
            kept = pairs.masked_fill(hidden, count).flatten()  # hidden pixels share one extra bin
            counts = torch.bincount(kept, minlength=count + 1)[:count].view(-1, bins)
            each = torch.addmm(self.like.log_prior, counts.float(), table)
            scores.append(_log_sum_exp(each.T) + (log_chances if alone else log_chances[owner]))
        return torch.stack(scores).logsumexp(dim=0)

    def _pairs(
        self, pictures: Pictures, owner: Int[Tensor, " K"], at: Int[Tensor, " K"], moved: bool
    ) -> Int[Tensor, "K C H W"]:
        """The row of the table for each pixel's pair of cue and picture."""
        x, like = self.pixels[owner, at], self.like
        if like.binary:
            levels = _levels_inside(pictures, like, at if moved else None)
            return x * (256 >> like.coarse) + levels
        levels = pictures.levels.int()
        residual, shade = x - levels / 255, torch.full_like(levels, 2)
        if like.folded:
            shade += 2 * (SHADES * x).int().clamp(0, SHADES - 1) + (residual >= 0)
        shade = torch.where(x == 0, 0, torch.where(x == 1, 1, shade))
        distance = (residual.abs() / like.farthest).clamp(max=1).sqrt()
        return (shade * RESIDUALS + (distance * (RESIDUALS - 1)).round()).int()
