"""p(cue | picture): what a cue tells of each picture, summed over all that may have happened to it.

A picture is kept as one byte for each pixel. So is a cue: then a score depends only on how often
each pair of bytes occurs, and one histogram serves all channels. Binary cues share one table of
scores, so many of them are scored at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from kanerva.memory.channels import (
    Box,
    Channel,
    Mask,
    Noise,
    Picture,
    Seen,
    corner_colour,
    possible_boxes,
    possible_channels,
    possible_masks,
    possible_shifts,
    wrapped,
)

Levels = UInt8[Tensor, "N C H W"]
_STEEP, _HALF = 3.4657, 127  # asinh(16): logits farthest 32, and are finest near 0
_BORDER = 0.01  # of ink beyond the frame
_CHUNK = 512  # pictures compared at once: a histogram of each is held
# What a blank pixel counts against ink where pixels may be hidden one by one, few or most. ours
FAINT = (-0.25, -0.04)
FOLDED = (0.5, 1.0)  # strengths of folded noise that 8-bit pictures are ranked for. ours
_UNHELD = 0.14  # least distance of an 8-bit image from those held, root mean square. ours
_RESIDUALS = 64  # bins of |cue - mean|, for 8-bit pictures
_SHADES = 8  # of a cue between black and white, where noise was folded


def to_levels(logits: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """Logits of binary pixels as bytes: 2 sinh(a k), k = -127 .. 127."""
    steps = (logits.float() / 2).asinh() * (_HALF / _STEEP)
    return (steps.round().clamp(-_HALF, _HALF) + _HALF).to(torch.uint8)


def to_logits(levels: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """What `to_levels` was given, to within 1.4 % or 0.03."""
    return 2 * ((levels.float() - _HALF) * (_STEEP / _HALF)).sinh()


@lru_cache(maxsize=1)
def _fine_levels() -> UInt8[Tensor, " steps"]:
    steps = torch.arange(2**16, dtype=torch.float64) / (2**16 - 1)
    return to_levels(steps.logit(eps=1e-6))


def _levels_of_means(means: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """Expected binary pixels as bytes, by a table."""
    return _fine_levels().to(means.device)[(means * (2**16 - 1)).round().int()]


@lru_cache(maxsize=8)
def _blur(side: int) -> Float[Tensor, "side side"]:
    """A binomial filter of five pixels along one side; beyond the edge the picture goes on as it
    is there."""
    filter = torch.zeros(side, side)
    rows = torch.arange(side)
    for step, weight in zip(range(-2, 3), (1, 4, 6, 4, 1), strict=True):
        filter[rows, (rows + step).clamp(0, side - 1)] += weight / 16
    return filter


@dataclass(frozen=True)
class Pictures:
    """What blocks were decoded to, a byte for each pixel: logits where pixels are binary, else
    means."""

    levels: Levels
    binary: bool

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, rows: Int[Tensor, " n"]) -> "Pictures":
        return Pictures(self.levels[rows], self.binary)

    @cached_property
    def means(self) -> Float[Tensor, "N C H W"]:
        """Expected pixels on [0, 1]."""
        if not self.binary:
            return self.levels.float() / 255
        table = to_logits(torch.arange(256, device=self.levels.device)).sigmoid()
        return table[self.levels.int()]

    @cached_property
    def features(self) -> Float[Tensor, "N features"]:
        """What the inner product is with: means, and where pixels are not binary their squares."""
        flat = self.means.flatten(1)
        return flat if self.binary else torch.cat([flat, flat.square()], dim=1)

    def blurred(self, owner: Int[Tensor, " N"] | None = None) -> "Pictures":
        """What is like these, but none of them: as kernels of a density over pictures. `owner`
        numbers the cue that each is compared with; those of one cue share a mean picture."""
        down, across = (_blur(side).to(self.levels.device) for side in self.levels.shape[-2:])
        soft = self.means
        for _ in range(1 if self.binary else 4):  # 8-bit pictures are themselves soft
            soft = down @ soft @ across.T
        usual = self.means.mean(dim=0)
        if owner is not None:
            count = torch.bincount(owner).clamp(min=1)[:, None, None, None]
            sums = usual.new_zeros(len(count), *usual.shape).index_add(0, owner, self.means)
            usual = (sums / count)[owner]
        soft = 0.97 * soft + 0.03 * usual  # ours: best for unheld digits
        if self.binary:
            return Pictures(_levels_of_means(soft), True)
        return Pictures((soft * 255).round().to(torch.uint8), False)


@dataclass(frozen=True)
class Cue:
    """One cue, and all that may have happened to it."""

    picture: Picture
    seen: Seen
    masks: Bool[Tensor, "masks H W"]
    chances: Float[Tensor, " masks"]  # a priori
    boxes: list[Box]  # the same masks, where they are not given
    channels: tuple[Channel, ...]
    shifts: list[tuple[int, int]]
    binary: bool  # the pictures it is compared with

    @classmethod
    def of(
        cls, picture: Picture, observed: Mask | None, noise: Noise, shifts: int, binary: bool
    ) -> "Cue":
        blank = picture.new_zeros(len(picture)) if binary else corner_colour(picture)
        boxes = {} if observed is not None else possible_boxes(picture, blank)
        masks, chances = possible_masks(picture, observed, boxes)
        seen = Seen.of(picture, masks.any(dim=0))
        channels = possible_channels(noise, observed is not None, seen.kind, residual=not binary)
        moves = possible_shifts(shifts)
        return cls(picture, seen, masks, chances, list(boxes), channels, moves, binary)

    @property
    def has_bands(self) -> bool:
        """Its queries differ by sums of pictures over bands alone."""
        two = self.binary and self.seen.kind == "binary"
        return two and bool(self.boxes) and any(channel.hidden for channel in self.channels)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether black pixels of an 8-bit cue may be hidden ones, here and there."""
        black = (self.picture == 0).all(dim=0).any()
        return bool(black) and any(channel.hidden for channel in self.channels)

    def queries(self) -> Float[Tensor, "groups shifts features"]:
        """Vectors whose inner product with `Pictures.features` ranks: one group for each mask,
        and one for pixels hidden here and there."""
        return torch.stack([self._queries(shift) for shift in self.shifts], dim=1)

    def _queries(self, shift: tuple[int, int]) -> Float[Tensor, "groups features"]:
        inside = ~wrapped(self.masks[0], shift)
        masks = self.masks.roll(shift, (1, 2)) & inside
        if not self.binary:
            x = self.picture.roll(shift, (1, 2))
            if self.has_gaps:
                masks = torch.cat([masks, ((x != 0).any(dim=0) & inside)[None]])
            seen = masks[:, None].expand(-1, len(x), -1, -1).float()
            groups = [torch.cat([(2 * x * seen).flatten(1), -seen.flatten(1)], dim=1)]
            if self.folded:
                for s in FOLDED:
                    each = _parabolas(s).to(x.device)[(64 * x).round().long().clamp(0, 64)]
                    groups.append((each * seen[0, ..., None]).movedim(-1, 0).reshape(1, -1))
            return torch.cat(groups)
        strengths = [1.0] if self.seen.kind in ("binary", "plain") else [0.3, 1.0]
        ratios = [self.seen.log_ratios(Channel(gaussian=s)).roll(shift, (1, 2)) for s in strengths]
        groups = [(ratio * mask).flatten() for ratio in ratios for mask in masks]
        if any(channel.hidden for channel in self.channels):
            groups += [(ratios[-1].clamp(min=f) * inside).flatten() for f in FAINT]
        return torch.stack(groups)

    @cached_property
    def loose(self) -> "Cue":
        """The same cue compared with kernels. 8-bit pictures are known to within a residual: an
        image that is not held is taken to be farther from all of them than that."""
        if self.binary:
            return self
        least = [replace(c, gaussian=max(c.gaussian, _UNHELD)) for c in self.channels]
        return replace(self, channels=tuple(dict.fromkeys(least)))

    def log_evidence(
        self, pictures: Pictures, shifts: Int[Tensor, " K"] | None = None
    ) -> Float[Tensor, " K"]:
        """ln p(cue | picture k, moved by shift k), summed over masks and channels."""
        owner = torch.zeros(len(pictures), dtype=torch.long, device=pictures.levels.device)
        return log_evidence([self], pictures, owner, shifts)

    @cached_property
    def coarse(self) -> int:
        """Bits of a level that are dropped where a cue takes many values."""
        return 0 if self.seen.kind == "binary" else 2

    @cached_property
    def farthest(self) -> float:
        """The largest residual there may be."""
        return max(1.0, float(self.picture.max()), 1.0 - float(self.picture.min()))

    @cached_property
    def log_prior(self) -> Float[Tensor, " channels"]:
        chances = self.picture.new_tensor([channel.chance for channel in self.channels])
        return (chances / chances.sum()).log()

    @cached_property
    def table(self) -> Float[Tensor, "pairs channels"]:
        """ln p of each pair of cue and picture, for each channel."""
        device = self.picture.device
        if self.binary:
            if self.seen.kind == "binary":
                return _binary_table(self.channels).to(device)
            step = 1 << self.coarse
            levels = torch.arange(0, 256, step, device=device) + (step - 1) / 2
            return self.seen.log_table(self.channels, to_logits(levels)).flatten(1).T
        return self._residual_table(device)

    @cached_property
    def folded(self) -> bool:
        """Whether its noise may have been folded, and its pictures are 8-bit."""
        return not self.binary and any(channel.folded for channel in self.channels)

    @property
    def _shades(self) -> int:
        """Classes of pixels between black and white, each for means below and above it."""
        return 2 * _SHADES if self.folded else 1

    def _residual_table(self, device: torch.device) -> Float[Tensor, "pairs channels"]:
        """For 8-bit pictures: the cue black, white or of a shade, times how far it is away."""
        away = (torch.arange(_RESIDUALS, device=device) / (_RESIDUALS - 1)) ** 2 * self.farthest
        shade = torch.arange(self._shades, device=device)
        x = (shade[:, None] // 2 + 0.5) / _SHADES
        mean = torch.where(shade[:, None] % 2 == 1, x - away, x + away)
        chances = [(c.hidden, c.salt_pepper, c.gaussian or 0.02) for c in self.channels]
        hidden, salt, s = away.new_tensor(chances).T[:, :, None, None]
        near = _normal(away / s, s).expand(-1, len(x), -1)  # (channels, shades, residuals)
        beyond = torch.special.ndtr(-away / s)  # what lay there became black or white
        clipped = self.seen.kind in ("binary", "clipped")
        black, white = near[:, :1], near[:, :1]
        if self.folded:
            folded = torch.tensor([c.folded for c in self.channels], device=device)[:, None, None]
            near = near + folded * _normal((x + mean) / s, s)
            both_ends = beyond + torch.special.ndtr((away - 2) / s)  # beyond 1, and beyond -1
            white = torch.where(folded, both_ends, white)
        elif clipped:
            black = white = beyond
        keep, salt = (1 - hidden) * (1 - salt), (1 - hidden) * salt / 2
        rows = [keep * black + hidden + salt, keep * white + salt, keep * near]
        return torch.cat(rows, dim=1).clamp(min=1e-30).log().flatten(1).T.contiguous()


def _normal(z: Tensor, s: Tensor) -> Tensor:
    """The share of one of 255 levels."""
    return torch.exp(-0.5 * z.square()) / (255 * s * math.sqrt(2 * math.pi))


@lru_cache(maxsize=4)
def _parabolas(s: float) -> Float[Tensor, "shades 2"]:
    """Of ln p(shade | mean) under folded noise, by least squares over means: its slope and its
    bend, which inner products with means and their squares rank by."""
    shades, mean = torch.linspace(0, 1, 65), torch.linspace(0, 1, 33)
    seen = Seen(torch.zeros(1, 1, 1, dtype=torch.long), shades, "folded")
    log_p = seen.log_densities(Channel(gaussian=s), mean)
    powers = torch.stack([torch.ones_like(mean), mean, mean.square()], dim=1)
    return torch.linalg.lstsq(powers, log_p.T).solution[1:].T


@lru_cache(maxsize=16)
def _binary_table(channels: tuple[Channel, ...]) -> Float[Tensor, "pairs channels"]:
    """The same for every binary cue."""
    seen = Seen(torch.zeros(1, 1, 1, dtype=torch.long), torch.tensor([0.0, 1.0]), "binary")
    return seen.log_table(channels, to_logits(torch.arange(256))).flatten(1).T.contiguous()


# Many cues and pictures at once


def log_evidence(
    cues: Sequence[Cue],
    pictures: Pictures,
    owner: Int[Tensor, " K"],
    shifts: Int[Tensor, " K"] | None = None,
) -> Float[Tensor, " K"]:
    """ln p(cue | picture k, moved by shift k) of the cue that `owner` numbers. What a shift moved
    out of the frame is explained by an empty border."""
    first = cues[0]
    shared = all(c.seen.kind == "binary" and c.channels == first.channels for c in cues)
    if len(cues) == 1 or (first.binary and shared):
        batch = _Batch.of(cues)
        rows = torch.arange(len(owner), device=owner.device).split(_CHUNK)
        parts = [(pictures[r], owner[r], None if shifts is None else shifts[r]) for r in rows]
        return torch.cat([batch.score(*part) for part in parts])
    score = torch.empty(len(owner), device=owner.device)
    for n in owner.unique().tolist():
        cue, rows = cues[n], (owner == n).nonzero()[:, 0]
        score[rows] = cue.log_evidence(pictures[rows], None if shifts is None else shifts[rows])
    return score


@dataclass(frozen=True)
class _Batch:
    """Cues that share a table: their pixels and masks, under every shift."""

    like: Cue  # any of them
    pixels: Shaped[Tensor, "cues shifts C H W"]  # numbers of their values, or the values
    masks: Bool[Tensor, "masks cues shifts H W"]
    chances: Float[Tensor, "masks cues"]  # ln of them; -inf beyond a cue's last mask

    @classmethod
    def of(cls, cues: Sequence[Cue]) -> "_Batch":
        like, most = cues[0], max(len(cue.masks) for cue in cues)
        pixels = [cue.seen.codes.int() if like.binary else cue.picture for cue in cues]
        masks = like.masks.new_zeros(len(cues), most, *like.masks.shape[1:])
        chances = like.chances.new_zeros(len(cues), most)
        for n, cue in enumerate(cues):
            masks[n, : len(cue.masks)], chances[n, : len(cue.masks)] = cue.masks, cue.chances

        def moved(values: Tensor, dim: int) -> Tensor:
            if like.shifts == [(0, 0)]:
                return values.unsqueeze(dim)
            return torch.stack([values.roll(shift, (-2, -1)) for shift in like.shifts], dim)

        masks = moved(masks.transpose(0, 1), 2)
        return cls(like, moved(torch.stack(pixels), 1), masks, chances.T.log())

    def score(
        self, pictures: Pictures, owner: Int[Tensor, " K"], shifts: Int[Tensor, " K"] | None
    ) -> Float[Tensor, " K"]:
        """For each mask a histogram of pairs, times the table of what each is worth."""
        table = self.like.table
        at = torch.zeros_like(owner) if shifts is None else shifts
        pairs = self._pairs(pictures, owner, at, shifts is not None)
        bins, count = len(table), len(pairs) * len(table)
        rows = torch.arange(len(pairs), device=pairs.device, dtype=pairs.dtype) * bins
        pairs = pairs + rows[:, None, None, None]
        scores, alone = [], len(self.masks[0]) == 1 and shifts is None
        for masks, chances in zip(~self.masks, self.chances, strict=True):
            hidden = masks if alone else masks[owner, at][:, None]
            kept = pairs.masked_fill(hidden, count).flatten()  # all that is hidden in one bin
            counts = torch.bincount(kept, minlength=count + 1)[:count].view(-1, bins)
            each = torch.addmm(self.like.log_prior, counts.float(), table).logsumexp(dim=1)
            scores.append(each + (chances if alone else chances[owner]))
        return torch.stack(scores).logsumexp(dim=0)

    def _pairs(
        self, pictures: Pictures, owner: Int[Tensor, " K"], at: Int[Tensor, " K"], moved: bool
    ) -> Int[Tensor, "K C H W"]:
        """The number of each pixel's pair of cue and picture, a row of the table."""
        levels, x, like = pictures.levels.int(), self.pixels[owner, at], self.like
        if like.binary:
            levels = levels >> like.coarse
            if moved:
                outside = torch.stack([wrapped(like.masks[0], s) for s in like.shifts])[at]
                border = int(to_levels(torch.tensor(_BORDER).logit())) >> like.coarse
                levels = torch.where(outside[:, None], border, levels)
            return x * (256 >> like.coarse) + levels
        away, shade = x - levels / 255, torch.full_like(levels, 2)
        if like.folded:
            shade += 2 * (_SHADES * x).int().clamp(0, _SHADES - 1) + (away >= 0)
        shade = torch.where(x == 0, 0, torch.where(x == 1, 1, shade))
        away = (away.abs() / like.farthest).clamp(max=1).sqrt()
        return (shade * _RESIDUALS + (away * (_RESIDUALS - 1)).round()).int()
