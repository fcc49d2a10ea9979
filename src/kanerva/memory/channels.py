"""How a picture becomes a cue: pixels hidden, noise of unknown strength, a shift.

A cue is a clean picture that went through a channel. If the strength of the channel is unknown, the
likelihood is averaged over a small grid of strengths, so that the posterior includes this
uncertainty. For a binary pixel with p(1) = p:

    hidden h          a share h of the pixels, or a whole band at an edge, shows 0
    salt & pepper e   a share e of the pixels shows 0 or 1 with equal probability, so that
                      p' = (1 - h) ((1 - e) p + e / 2)
    Gaussian s        p(x | clean) = N(clean, s^2); its values may then be clipped to [0, 1], or
                      folded: |x|, clipped at 1

Decoded 8-bit pixels have an error (the residual), which counts as Gaussian noise and is covered by
the same grid. Hidden 8-bit pixels may show any one colour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from kanerva.errors import UserError
from kanerva.plain_files import shown

Picture = Float[Tensor, "C H W"]
Mask = Bool[Tensor, "H W"]
Box = tuple[int, int, int, int]  # top, bottom, left, right; bottom and right are exclusive

# ours: grids of strengths
HIDDEN = (0.0, 0.15, 0.4, 0.6, 0.75, 0.85, 0.91, 0.945)
SALT_PEPPER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GAUSSIAN = (0.02, 0.04, 0.08, 0.14, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0, 1.4, 2.0)
LEAST_FOLDED = 0.3  # folding weaker noise changes little
MOST_SHIFTS = 16  # pixels
FINE = tuple(round(0.08 * 25 ** (n / 19), 4) for n in range(20))  # 0.08 .. 2, for binary pictures
# Prior probabilities: nothing is hidden; a band at one edge is hidden; all but a window is hidden.
# Each position of an edge is equally likely, so a window pays for the positions of four edges.
WHOLE, BAND, WINDOW = 0.5, 0.4, 0.1
_BINS = 64  # bins for the values of a cue that is not binary


@dataclass(frozen=True)
class Channel:
    """One way to damage a picture, of known strength."""

    hidden: float = 0.0  # share of pixels that show 0; which ones is unknown
    salt_pepper: float = 0.0  # share of pixels that are 0 or 1 at random
    gaussian: float = 0.0  # standard deviation
    folded: bool = False  # for 8-bit pictures: |x| of noisy pixels. Binary ones use `Seen.kind`

    def __post_init__(self) -> None:
        if not (0 <= self.hidden < 1 and 0 <= self.salt_pepper <= 1 and self.gaussian >= 0):
            raise UserError(f"shares lie on [0, 1], a deviation is at least 0; got {self}")

    @property
    def chance(self) -> float:
        """Prior probability, up to a factor. ours: single pixels are rarely hidden, and more rarely
        together with noise; most cues have no noise."""
        noisy = self.salt_pepper > 0 or self.gaussian > 0
        hidden = 1.0 if self.hidden == 0 else 0.002 if noisy else 0.01
        folded = 0.01 if self.folded else 1.0
        return hidden * folded * (20.0 if self.salt_pepper == 0 else 1.0)


Kind = Literal["binary", "plain", "clipped", "folded"]  # the kind of a cue's values
Noise = str | Channel | None  # "none", "salt_pepper", "gaussian" of any strength; None: unknown


def possible_channels(
    noise: Noise, mask_given: bool, kind: Kind, residual: bool = False
) -> tuple[Channel, ...]:
    """The channels that a cue may have gone through. `mask_given`: it is known which pixels are
    hidden. `kind`: that of the cue's values. `residual`: the pictures that the cue is compared with
    have a decoding error, as 8-bit ones do."""
    if isinstance(noise, Channel):
        return (noise,)
    if noise not in (None, "none", "salt_pepper", "gaussian"):
        raise UserError(
            f"noise is none, salt_pepper, gaussian, a Channel, or None if it is not known; "
            f"got {noise!r}"
        )
    return _channels(noise, mask_given, kind, residual)


@lru_cache(maxsize=64)  # about a hundred objects, the same for every cue
def _channels(
    noise: str | None, mask_given: bool, kind: Kind, residual: bool
) -> tuple[Channel, ...]:
    binary = kind == "binary"
    salted, spread = noise in (None, "salt_pepper"), noise in (None, "gaussian")
    hidden = HIDDEN[:1] if mask_given else HIDDEN if binary or residual else HIDDEN[::2]
    salt = SALT_PEPPER[:: 3 if residual else 1] if salted and (binary or residual) else (0.0,)
    if residual:
        spreads = GAUSSIAN if spread else GAUSSIAN[:3]
    else:
        spreads = FINE if spread and not binary else (0.0,)
    plain = [Channel(*strengths) for strengths in product(hidden, salt, spreads)]
    folded = [Channel(gaussian=s, folded=True) for s in GAUSSIAN if s >= LEAST_FOLDED]
    return tuple(plain + folded if residual and spread and kind == "folded" else plain)


def _shares(
    channels: Sequence[Channel], like: Tensor
) -> tuple[Float[Tensor, "channels 1"], Float[Tensor, "channels 1"]]:
    """The share of pixels that are unchanged, and the share that noise set to 1."""
    hidden = like.new_tensor([channel.hidden for channel in channels])[:, None]
    noise = like.new_tensor([channel.salt_pepper for channel in channels])[:, None]
    return (1 - hidden) * (1 - noise), (1 - hidden) * noise / 2


# A cue's pixels


@dataclass(frozen=True)
class Seen:
    """A cue's pixels, quantised to few values: the index of each pixel's value, and the values."""

    codes: Int[Tensor, "C H W"]
    values: Float[Tensor, " values"]
    kind: Kind

    @classmethod
    def of(cls, cue: Picture, visible: Mask) -> "Seen":
        """Quantise a cue. Values other than 0 and 1 are put into bins. If a cue lies within [0, 1]
        but is not binary, its noise was clipped to that range or, if no pixel is 0, folded."""
        codes = (cue == 1).long()
        if bool(((cue == 0) | (cue == 1) | ~visible).all()):
            return cls(codes, cue.new_tensor([0.0, 1.0]), "binary")
        shown = cue[:, visible]
        low, high = shown.min(), shown.max()
        inside = bool((low >= 0) & (high <= 1))
        kind = "plain" if not inside else "clipped" if bool((shown == 0).any()) else "folded"
        width = (high - low).clamp(min=1e-6) / _BINS
        place = ((cue - low) / width).long().clamp(0, _BINS - 1)
        edge = (cue == 0) | (cue == 1)
        middle = low + width * (torch.arange(_BINS, device=cue.device) + 0.5)
        values = torch.cat([cue.new_tensor([0.0, 1.0]), middle])
        return cls(torch.where(edge, codes, place + 2), values, kind)

    def log_densities(
        self, channel: Channel, clean: Float[Tensor, " levels"]
    ) -> Float[Tensor, "values levels"]:
        """ln p(value | clean pixel) of each value of the cue, under Gaussian noise only."""
        x, b = self.values[:, None], clean[None]
        if self.kind == "binary" or channel.gaussian == 0:
            # If no noise is assumed but values are not binary, each is rounded to 0 or 1.
            return torch.where((x >= 0.5) == (b >= 0.5), 0.0, -torch.inf)
        s = channel.gaussian
        scale = -math.log(s * math.sqrt(2 * math.pi))
        density = scale - 0.5 * ((x - b) / s) ** 2
        if self.kind == "plain":
            return density
        above = torch.special.log_ndtr((b - 1) / s)  # ln of the mass above 1
        below = torch.special.log_ndtr(-b / s)
        if self.kind == "folded":
            density = torch.logaddexp(density, scale - 0.5 * ((x + b) / s) ** 2)
            above = torch.logaddexp(above, torch.special.log_ndtr((-1 - b) / s))
        density = torch.where(x == 1, above, density)
        return torch.where(x == 0, below, density) if self.kind == "clipped" else density

    def log_table(
        self, channels: Sequence[Channel], logits: Float[Tensor, " levels"]
    ) -> Float[Tensor, "channels values levels"]:
        """ln p(value | logit of a binary pixel), for each channel."""
        keep, salt = _shares(channels, logits)
        ink = torch.logaddexp(keep.log() + logsigmoid(logits), salt.log())
        rest = 1 - keep - salt  # p(0) where the clean pixel is 1
        blank = torch.logaddexp(keep.log() + logsigmoid(-logits), rest.clamp(min=0).log())
        clean = logits.new_tensor([0.0, 1.0])
        spreads = {channel.gaussian for channel in channels}
        noises = {s: self.log_densities(Channel(gaussian=s), clean) for s in spreads}
        noise = torch.stack([noises[channel.gaussian] for channel in channels])[..., None]
        return torch.logaddexp(noise[:, :, 0] + blank[:, None], noise[:, :, 1] + ink[:, None])

    def log_ratios(self, channel: Channel) -> Float[Tensor, "C H W"]:
        """ln p(value | 1) - ln p(value | 0) of each pixel, scaled to at most 1 in size. Its inner
        products with mean pictures rank them."""
        if self.kind == "binary":
            ratio = 2 * self.values - 1
        else:
            off, on = self.log_densities(channel, self.values.new_tensor([0.0, 1.0])).unbind(1)
            ratio = on - off
        return (ratio / ratio.abs().max().clamp(min=1e-6))[self.codes]


def possible_boxes(cue: Picture, blank: Float[Tensor, " C"]) -> dict[Box, float]:
    """The boxes of pixels that may have been visible, if no mask is given, with their prior
    probabilities: the whole cue; all but the blank band at one edge; all but the blank bands at all
    four edges, which comes last."""
    height, width = cue.shape[1:]
    ink = (cue != blank[:, None, None]).any(dim=0)
    rows, columns = (ink.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0))
    whole = (0, height, 0, width)
    if not rows:
        return {whole: 1.0}
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    bands = [(top, height, 0, width), (0, bottom, 0, width)]
    bands += [(0, height, left, width), (0, height, 0, right)]
    chances: dict[Box, float] = {}
    windows = height * (height + 1) * width * (width + 1) / 4
    priors = [WHOLE, *(BAND / 4 / s for s in (height, height, width, width)), WINDOW / windows]
    for box, chance in zip([whole, *bands, (top, bottom, left, right)], priors, strict=True):
        chances[box] = chances.get(box, 0.0) + chance / sum(priors)
    return chances


def corner_colour(cue: Picture) -> Float[Tensor, " C"]:
    """The colour that hidden pixels show: that of most corners, or black if all four differ."""
    corners = cue[:, [0, 0, -1, -1], [0, -1, 0, -1]].T
    alike = (corners[:, None] == corners).all(dim=2).sum(dim=1)
    best = int(alike.argmax())
    return corners[best] if int(alike[best]) > 1 else torch.zeros_like(corners[0])


def possible_masks(
    cue: Picture, observed: Mask | None, boxes: dict[Box, float]
) -> tuple[Bool[Tensor, "masks H W"], Float[Tensor, " masks"]]:
    """Masks of the pixels that may have been visible, with prior probabilities: the given mask
    alone, or one for each box."""
    if observed is not None:
        return observed[None], cue.new_ones(1)
    top, bottom, left, right = torch.tensor(list(boxes), device=cue.device).T[:, :, None]
    down, across = (torch.arange(size, device=cue.device) for size in cue.shape[1:])
    rows, columns = (top <= down) & (down < bottom), (left <= across) & (across < right)
    return rows[:, :, None] & columns[:, None], cue.new_tensor(list(boxes.values()))


def possible_shifts(shifts: int) -> list[tuple[int, int]]:
    """Every shift (rows down, columns right) of up to `shifts` pixels, starting with (0, 0)."""
    if not 0 <= shifts <= MOST_SHIFTS:  # memory use grows with its square
        raise UserError(f"shifts is a number of pixels, at most {MOST_SHIFTS}; got {shown(shifts)}")
    steps = sorted(range(-shifts, shifts + 1), key=abs)
    return list(product(steps, steps))


def wrapped(mask: Mask, shift: tuple[int, int]) -> Mask:
    """Where a picture rolled by `shift` shows pixels that wrapped around from the opposite edge."""
    height, width = mask.shape
    down, across = torch.arange(height, device=mask.device), torch.arange(width, device=mask.device)
    rows = (down - shift[0] < 0) | (down - shift[0] >= height)
    columns = (across - shift[1] < 0) | (across - shift[1] >= width)
    return rows[:, None] | columns[None]
