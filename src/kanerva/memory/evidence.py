"""Pictures, and cues with every mask and channel that they may have gone through.

Pictures and cues are quantised to few values per pixel, so a table has the score of each pair of
values, for each channel. `scoring.py` sums these scores.
"""

import math
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
_STEEP, _HALF = 3.4657, 127  # asinh(16): logits up to 32 in size, with the finest steps near 0
# ours: weights of a blank pixel in ranking (ink has 1) if few, or most, single pixels are hidden
FAINT = (-0.25, -0.04)
FOLDED = (0.5, 1.0)  # ours: strengths of folded noise at which 8-bit pictures are ranked
_UNHELD = 0.14  # ours: least root mean square distance from an unstored 8-bit image to stored ones
RESIDUALS = 64  # bins of |cue - mean|, for 8-bit pictures
SHADES = 8  # bins of a cue's values between black and white, if its noise may be folded


def to_levels(logits: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """Quantise logits of binary pixels to bytes: logit = 2 sinh(a k), k = -127 .. 127."""
    steps = (logits.float() / 2).asinh() * (_HALF / _STEEP)
    return (steps.round().clamp(-_HALF, _HALF) + _HALF).to(torch.uint8)


def to_logits(levels: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Invert `to_levels`, with an error of at most 1.4 % or 0.03, whichever is larger."""
    return 2 * ((levels.float() - _HALF) * (_STEEP / _HALF)).sinh()


def look_up(table: Shaped[Tensor, " rows"], index: Shaped[Tensor, "*n"]) -> Shaped[Tensor, "*n"]:
    """table[index], several times faster on a CPU."""
    return table.index_select(0, index.flatten().int()).view(index.shape)


@lru_cache(maxsize=1)
def _fine_levels() -> UInt8[Tensor, " steps"]:
    steps = torch.arange(2**16, dtype=torch.float64) / (2**16 - 1)
    return to_levels(steps.logit(eps=1e-6))


def _levels_of_means(means: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """Quantise means of binary pixels to the same bytes, by a lookup table."""
    return look_up(_fine_levels().to(means.device), (means * (2**16 - 1)).round())


@lru_cache(maxsize=8)
def _blur(side: int) -> Float[Tensor, "side side"]:
    """A binomial filter of five pixels along one axis, as a matrix; edge pixels are repeated."""
    filter = torch.zeros(side, side)
    rows = torch.arange(side)
    for step, weight in zip(range(-2, 3), (1, 4, 6, 4, 1), strict=True):
        filter[rows, (rows + step).clamp(0, side - 1)] += weight / 16
    return filter


@dataclass(frozen=True)
class Pictures:
    """Decoded blocks, one byte per pixel and channel: logits (`to_levels`) if pixels are binary,
    else 255 times the mean."""

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
        return look_up(table, self.levels)

    @cached_property
    def features(self) -> Float[Tensor, "N features"]:
        """Vectors whose inner products with `Cue.queries` rank pictures: means and, if pixels are
        not binary, their squares."""
        flat = self.means.flatten(1)
        return flat if self.binary else torch.cat([flat, flat.square()], dim=1)

    def blurred(self, owner: Int[Tensor, " N"] | None = None) -> "Pictures":
        """Blurred copies: the kernels of a density over pictures that are similar to these, but not
        stored. `owner` is the index of the cue that each is compared with; those of one cue share a
        mean picture."""
        down, across = (_blur(side).to(self.levels.device) for side in self.levels.shape[-2:])
        soft = self.means
        for _ in range(1 if self.binary else 4):  # 8-bit pictures are already smooth
            soft = down @ soft @ across.T
        average = self.means.mean(dim=0)
        if owner is not None:
            count = torch.bincount(owner).clamp(min=1)[:, None, None, None]
            sums = average.new_zeros(len(count), *average.shape).index_add(0, owner, self.means)
            average = (sums / count)[owner]
        soft = 0.97 * soft + 0.03 * average  # ours: best for digits that are not stored
        if self.binary:
            return Pictures(_levels_of_means(soft), True)
        return Pictures((soft * 255).round().to(torch.uint8), False)


@dataclass(frozen=True)
class Cue:
    """One cue, with the masks, channels and shifts that it may have gone through."""

    picture: Picture
    seen: Seen
    masks: Bool[Tensor, "masks H W"]
    chances: Float[Tensor, " masks"]  # prior probabilities
    boxes: list[Box]  # the masks as boxes; empty if a mask was given
    channels: tuple[Channel, ...]
    shifts: list[tuple[int, int]]
    binary: bool  # whether the pictures that it is compared with are binary

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
        """Whether its queries differ only by sums over bands of pixels (`ranking`)."""
        two = self.binary and self.seen.kind == "binary"
        return two and bool(self.boxes) and any(channel.hidden for channel in self.channels)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some black pixels of an 8-bit cue may be hidden ones."""
        black = (self.picture == 0).all(dim=0).any()
        return bool(black) and any(channel.hidden for channel in self.channels)

    def queries(self) -> Float[Tensor, "groups shifts features"]:
        """Vectors whose inner products with `Pictures.features` rank pictures: one group for each
        mask, and more for single hidden pixels and for folded noise."""
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
        """This cue as it is compared with kernels (`Pictures.blurred`). For 8-bit pictures, an
        image that is not stored is assumed to differ from every kernel by at least `_UNHELD`."""
        if self.binary:
            return self
        least = [replace(c, gaussian=max(c.gaussian, _UNHELD)) for c in self.channels]
        return replace(self, channels=tuple(dict.fromkeys(least)))

    @cached_property
    def coarse(self) -> int:
        """How many low bits of a level are dropped: two if the cue is not binary."""
        return 0 if self.seen.kind == "binary" else 2

    @cached_property
    def farthest(self) -> float:
        """The largest possible |cue - mean|."""
        return max(1.0, float(self.picture.max()), 1.0 - float(self.picture.min()))

    @cached_property
    def log_prior(self) -> Float[Tensor, " channels"]:
        chances = self.picture.new_tensor([channel.chance for channel in self.channels])
        return (chances / chances.sum()).log()

    @cached_property
    def table(self) -> Float[Tensor, "pairs channels"]:
        """ln p of each pair of a cue's value and a picture's, for each channel."""
        device = self.picture.device
        if self.binary:
            if self.seen.kind == "binary":
                return binary_table(self.channels).to(device)
            step = 1 << self.coarse
            levels = torch.arange(0, 256, step, device=device) + (step - 1) / 2
            return self.seen.log_table(self.channels, to_logits(levels)).flatten(1).T
        return self._residual_table(device)

    @cached_property
    def folded(self) -> bool:
        """Whether pictures are 8-bit and the noise may have been folded."""
        return not self.binary and any(channel.folded for channel in self.channels)

    @property
    def _shades(self) -> int:
        """The number of classes of pixels between black and white: a class is a shade and whether
        the mean lies below or above it."""
        return 2 * SHADES if self.folded else 1

    def _residual_table(self, device: torch.device) -> Float[Tensor, "pairs channels"]:
        """The table for 8-bit pictures: a row for each pair of the cue's class (black, white or a
        shade) and its distance from the mean."""
        distance = (torch.arange(RESIDUALS, device=device) / (RESIDUALS - 1)) ** 2 * self.farthest
        shade = torch.arange(self._shades, device=device)
        x = (shade[:, None] // 2 + 0.5) / SHADES
        mean = torch.where(shade[:, None] % 2 == 1, x - distance, x + distance)
        strengths = [(c.hidden, c.salt_pepper, c.gaussian or 0.02) for c in self.channels]
        hidden, salt, s = distance.new_tensor(strengths).T[:, :, None, None]
        density = _normal(distance / s, s).expand(-1, len(x), -1)  # (channels, shades, residuals)
        tail = torch.special.ndtr(-distance / s)  # the mass that clipping moves to black or white
        clipped = self.seen.kind in ("binary", "clipped")
        black, white = density[:, :1], density[:, :1]
        if self.folded:
            folded = torch.tensor([c.folded for c in self.channels], device=device)[:, None, None]
            density = density + folded * _normal((x + mean) / s, s)
            both_tails = tail + torch.special.ndtr((distance - 2) / s)  # above 1, and below -1
            white = torch.where(folded, both_tails, white)
        elif clipped:
            black = white = tail
        keep, salt = (1 - hidden) * (1 - salt), (1 - hidden) * salt / 2
        rows = [keep * black + hidden + salt, keep * white + salt, keep * density]
        return torch.cat(rows, dim=1).clamp(min=1e-30).log().flatten(1).T.contiguous()


def _normal(z: Tensor, s: Tensor) -> Tensor:
    """The mass of N(0, s^2), at z standard deviations, in one of 255 levels."""
    return torch.exp(-0.5 * z.square()) / (255 * s * math.sqrt(2 * math.pi))


@lru_cache(maxsize=4)
def _parabolas(s: float) -> Float[Tensor, "shades 2"]:
    """Parabolas fitted to ln p(shade | mean) under folded noise, by least squares over means: their
    linear and quadratic coefficients, which multiply `Pictures.features`."""
    shades, mean = torch.linspace(0, 1, 65), torch.linspace(0, 1, 33)
    seen = Seen(torch.zeros(1, 1, 1, dtype=torch.long), shades, "folded")
    log_p = seen.log_densities(Channel(gaussian=s), mean)
    powers = torch.stack([torch.ones_like(mean), mean, mean.square()], dim=1)
    return torch.linalg.lstsq(powers, log_p.T).solution[1:].T


@lru_cache(maxsize=16)
def binary_table(channels: tuple[Channel, ...]) -> Float[Tensor, "pairs channels"]:
    """`Cue.table` of a binary cue: it is the same for all of them."""
    seen = Seen(torch.zeros(1, 1, 1, dtype=torch.long), torch.tensor([0.0, 1.0]), "binary")
    return seen.log_table(channels, to_logits(torch.arange(256))).flatten(1).T.contiguous()
