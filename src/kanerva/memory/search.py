"""Which picture held does a cue show, how surely, or is it none of them?

    P(n | cue) = p(cue | picture n) (1 - prior_none) / N  /  p(cue)
    P(none | cue) = p(cue | nothing held) prior_none  /  p(cue)

p(cue | .) is summed over every channel, mask and shift that the cue may have come through
(`channels.py`). p(cue | nothing held) is half a model's own, half that of a kernel density over
what is held, each picture blurred: where noise is strong, what is like it but is not it.

Two steps, as in any search: an inner product of log-ratios with mean pictures ranks everything,
and what it ranks highest is scored exactly. Without noise the exact score is itself an inner
product, ln p(visible x | block) = [x m, m] . [logit p, ln(1 - p)].

A picture is kept as one byte for each pixel. So is a cue: then a score depends only on how often
each pair of bytes occurs, and one histogram serves all channels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.channels import (
    Channel,
    Mask,
    Noise,
    Picture,
    Seen,
    possible_channels,
    possible_masks,
    possible_shifts,
    wrapped,
)

Levels = UInt8[Tensor, "N C H W"]
_STEEP, _HALF = 3.4657, 127  # asinh(16): logits reach 32, and are finest near 0
_BORDER = 0.01  # of ink beyond the frame
_CHUNK = 512  # pictures compared at once: a histogram of each is held
_RESIDUALS = 64  # bins of |cue - mean|, for 8-bit pictures
_PRODUCTS = 16_000_000  # inner products held at once
CANDIDATES = 24  # scored exactly, for each mask a cue may have had; more where that
_NEGLIGIBLE, _MOST = 0.01, 3072  # leaves out more than so much, up to so many


def to_levels(logits: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """Logits of binary pixels as bytes: 2 sinh(a k), k = -127 .. 127."""
    steps = (logits.float() / 2).asinh() * (_HALF / _STEEP)
    return (steps.round().clamp(-_HALF, _HALF) + _HALF).to(torch.uint8)


def to_logits(levels: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """What `to_levels` was given, to within 1.4 % or 0.03."""
    return 2 * ((levels.float() - _HALF) * (_STEEP / _HALF)).sinh()


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
        return to_logits(self.levels).sigmoid() if self.binary else self.levels.float() / 255

    @cached_property
    def features(self) -> Float[Tensor, "N features"]:
        """What the inner product is with: means, and where pixels are not binary their squares."""
        flat = self.means.flatten(1)
        return flat if self.binary else torch.cat([flat, flat.square()], dim=1)

    def blurred(self) -> "Pictures":
        """What is like these, but none of them: as kernels of a density over pictures."""
        edge = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=self.levels.device) / 16
        kernel = (edge[:, None] * edge).expand(self.levels.shape[1], 1, 5, 5)
        padded = F.pad(self.means, (2, 2, 2, 2), mode="replicate")
        soft = F.conv2d(padded, kernel, groups=len(kernel))
        soft = 0.97 * soft + 0.03 * self.means.mean(dim=0)  # ours: best for unheld digits
        if self.binary:
            return Pictures(to_levels(soft.logit(eps=1e-6)), True)
        return Pictures((soft * 255).round().to(torch.uint8), False)


@dataclass(frozen=True)
class Cue:
    """One cue, and all that may have happened to it."""

    picture: Picture
    seen: Seen
    masks: Bool[Tensor, "masks H W"]
    chances: Float[Tensor, " masks"]  # a priori
    channels: list[Channel]
    shifts: list[tuple[int, int]]
    binary: bool  # the pictures it is compared with

    @classmethod
    def of(
        cls, picture: Picture, observed: Mask | None, noise: Noise, shifts: int, binary: bool
    ) -> "Cue":
        masks, chances = possible_masks(picture, observed)
        seen = Seen.of(picture, masks.any(dim=0))
        two = seen.kind == "binary"
        channels = possible_channels(noise, observed is not None, two, residual=not binary)
        return cls(picture, seen, masks, chances, channels, possible_shifts(shifts), binary)

    def queries(self) -> Float[Tensor, "groups shifts features"]:
        """Vectors whose inner product with `Pictures.features` ranks: one group for each mask,
        and one for pixels hidden here and there."""
        return torch.stack([self._queries(shift) for shift in self.shifts], dim=1)

    def _queries(self, shift: tuple[int, int]) -> Float[Tensor, "groups features"]:
        inside = ~wrapped(self.masks[0], shift)
        masks = self.masks.roll(shift, (1, 2)) & inside
        if not self.binary:
            x = self.picture.roll(shift, (1, 2))
            seen = masks[:, None].expand(-1, len(x), -1, -1).float()
            return torch.cat([(2 * x * seen).flatten(1), -seen.flatten(1)], dim=1)
        strengths = [1.0] if self.seen.kind in ("binary", "plain") else [0.3, 1.0]
        ratios = [self.seen.log_ratios(Channel(gaussian=s)).roll(shift, (1, 2)) for s in strengths]
        groups = [(ratio * mask).flatten() for ratio in ratios for mask in masks]
        if any(channel.hidden for channel in self.channels):
            groups.append((ratios[-1].clamp(min=-0.25) * inside).flatten())
        return torch.stack(groups)

    def log_evidence(
        self, pictures: Pictures, shifts: Int[Tensor, " K"] | None = None
    ) -> Float[Tensor, " K"]:
        """ln p(cue | picture k, moved by shift k), summed over masks and channels. What a shift
        moved out of the frame is explained by an empty border."""
        if len(pictures) > _CHUNK:
            rows = torch.arange(len(pictures), device=pictures.levels.device).split(_CHUNK)
            parts = [(pictures[r], None if shifts is None else shifts[r]) for r in rows]
            return torch.cat([self.log_evidence(*part) for part in parts])
        table = self._table.flatten(1).T  # (pairs, channels)
        pairs = self._pairs(pictures, shifts)  # (K, C, H, W)
        count = len(table)
        rows = torch.arange(len(pairs), device=pairs.device)[:, None] * (count + 1)
        total = []
        for mask, chance in zip(self.masks, self.chances.log(), strict=True):
            moved = mask[None] if shifts is None else self._rolled(mask)[shifts]
            kept = torch.where(moved[:, None], pairs, count).flatten(1)  # the last bin: hidden
            counts = torch.bincount((kept + rows).flatten(), minlength=len(pairs) * (count + 1))
            total.append(
                counts.view(len(pairs), -1)[:, :count].float() @ table + self._prior + chance
            )
        return torch.cat(total, dim=1).logsumexp(dim=1)

    def _rolled(self, values: Tensor) -> Tensor:
        """A mask or codes moved by every shift."""
        return torch.stack([values.roll(shift, (-2, -1)) for shift in self.shifts])

    def _pairs(
        self, pictures: Pictures, shifts: Int[Tensor, " K"] | None
    ) -> Int[Tensor, "K C H W"]:
        """The number of each pixel's pair of cue and picture, a row of the table."""
        levels = pictures.levels.long()
        if self.binary:
            levels = levels >> self._coarse
            codes = self.seen.codes
            if shifts is None:
                return codes * (256 >> self._coarse) + levels
            outside = torch.stack([wrapped(self.masks[0], s) for s in self.shifts])[shifts]
            border = int(to_levels(torch.tensor(_BORDER).logit())) >> self._coarse
            levels = torch.where(outside[:, None], border, levels)
            return self._rolled(codes)[shifts] * (256 >> self._coarse) + levels
        x = self.picture if shifts is None else self._rolled(self.picture)[shifts]
        edge = torch.where(x == 0, 0, torch.where(x == 1, 1, 2))
        away = ((x - levels / 255).abs() / self._reach).clamp(max=1).sqrt()
        return edge * _RESIDUALS + (away * (_RESIDUALS - 1)).round().long()

    @cached_property
    def _coarse(self) -> int:
        """Bits of a level that are dropped where a cue takes many values."""
        return 0 if self.seen.kind == "binary" else 2

    @cached_property
    def _reach(self) -> float:
        """The largest residual there may be."""
        return max(1.0, float(self.picture.max()), 1.0 - float(self.picture.min()))

    @cached_property
    def _prior(self) -> Float[Tensor, " channels"]:
        chances = self.picture.new_tensor([channel.chance for channel in self.channels])
        return (chances / chances.sum()).log()

    @cached_property
    def _table(self) -> Float[Tensor, "channels values levels"]:
        """ln p of each pair of cue and picture, for each channel."""
        device = self.picture.device
        if self.binary:
            if self.seen.kind == "binary":
                return _binary_table(tuple(self.channels)).to(device)
            step = 1 << self._coarse
            levels = torch.arange(0, 256, step, device=device) + (step - 1) / 2
            return self.seen.log_table(self.channels, to_logits(levels))
        away = (torch.arange(_RESIDUALS, device=device) / (_RESIDUALS - 1)) ** 2 * self._reach
        tables = []
        for channel in self.channels:
            s = channel.gaussian or 0.02
            near = torch.exp(-0.5 * (away / s) ** 2) / (255 * s * math.sqrt(2 * math.pi))
            keep = (1 - channel.hidden) * (1 - channel.salt_pepper)
            salt = (1 - channel.hidden) * channel.salt_pepper / 2
            extra = near.new_tensor([channel.hidden + salt, salt, 0.0])[:, None]
            tables.append((keep * near + extra).clamp(min=1e-30).log())
        return torch.stack(tables)


@lru_cache(maxsize=16)
def _binary_table(channels: tuple[Channel, ...]) -> Float[Tensor, "channels values levels"]:
    """The same for every binary cue."""
    seen = Seen(torch.zeros(1, 1, 1, dtype=torch.long), torch.tensor([0.0, 1.0]), "binary")
    return seen.log_table(channels, to_logits(torch.arange(256)))


# The answer


@dataclass(frozen=True)
class Hit:
    """One picture held."""

    id: int  # a handle of a memory, an id of a store
    probability: float
    shift: tuple[int, int]  # rows down and columns right that the cue seems to be moved by
    payload: str  # of a store; a memory has none
    _image: Callable[[], Picture] = field(repr=False)

    @property
    def image(self) -> Picture:
        """What is held, decoded: expected pixels on [0, 1]."""
        return self._image()


@dataclass(frozen=True)
class Hits(Sequence[Hit]):
    """What a cue may show, likeliest first, and the probability that it is none of what is held.
    `left_out` says how much more what was not scored would have, were each as likely as the median
    of what was."""

    hits: list[Hit]
    none: float
    left_out: float = 0.0

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.hits[index]

    def __len__(self) -> int:
        return len(self.hits)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    @property
    def ids(self) -> list[int]:
        return [hit.id for hit in self.hits]

    @property
    def probabilities(self) -> list[float]:
        return [hit.probability for hit in self.hits]

    @property
    def images(self) -> Float[Tensor, "k C H W"]:
        return torch.stack([hit.image for hit in self.hits])


@dataclass(frozen=True)
class Candidates:
    """Rows of what is held and shifts of the cue, in pairs: all of them, or the best."""

    rows: Int[Tensor, " K"]
    shifts: Int[Tensor, " K"]

    @classmethod
    def rank(
        cls, cues: Sequence[Cue], features: Float[Tensor, "N features"], count: int
    ) -> "list[Candidates]":
        """For each cue the `count` pairs with the largest inner products, for each mask."""
        number, shifts = len(features), len(cues[0].shifts)
        if number * shifts <= count:
            every = torch.arange(number * shifts, device=features.device)
            return [cls(every % number, every // number)] * len(cues)
        queries = [cue.queries() for cue in cues]
        products = torch.cat(queries).flatten(0, 1) @ features.T
        found = []
        for scores in products.view(-1, shifts * number).split([len(q) for q in queries]):
            best = scores.topk(count, dim=1).indices.unique()
            found.append(cls(best % number, best // number))
        return found


Rank = Callable[[Sequence[Cue], int], list[Candidates]]


def search_all(
    cues: Sequence[Cue], held: int, rank: Rank, each: Callable[[Cue, Candidates | None], Hits]
) -> list[Hits]:
    """`each` cue's hits; candidates are ranked for as many cues at once as memory allows."""
    hits: list[Hits] = []
    at_once = max(1, _PRODUCTS // max(1, held * 8 * len(cues[0].shifts)))
    for start in range(0, len(cues), at_once):
        part = cues[start : start + at_once]
        first = rank(part, CANDIDATES) if held else [None] * len(part)
        hits += [each(cue, candidates) for cue, candidates in zip(part, first, strict=True)]
    return hits


def search(
    cue: Cue,
    held: int,
    rank: Rank,
    fetch: Callable[[Int[Tensor, " K"]], Pictures],
    log_none: Callable[[Picture], float],  # given the best guess at what the cue shows
    name: Callable[[list[int]], list[tuple[int, Callable[[], Picture], str]]],
    *,
    first: Candidates | None = None,
    k: int = 5,
    prior_none: float = 0.5,
) -> Hits:
    """The `k` likeliest of what is held. `rank` gives so many candidates for each mask, of which
    the `first` may be known already; `fetch` rows' pictures, `log_none` a model's ln p(cue |
    nothing held), and `name` rows' ids, pictures and payloads. More are scored where those left
    out could matter."""
    if k < 1 or not 0 <= prior_none <= 1:
        raise UserError(f"k is at least 1 and prior_none a probability, got {k}, {prior_none}")
    if held == 0:
        return Hits([], 1.0)
    pairs, count = held * len(cue.shifts), CANDIDATES
    while True:
        candidates = first or rank([cue], count)[0]
        pictures = fetch(candidates.rows)
        each = cue.log_evidence(pictures, candidates.shifts if len(cue.shifts) > 1 else None)
        rest = pairs - len(each)
        left_out = float((each.median() - each.logsumexp(0)).exp()) * rest
        if left_out < _NEGLIGIBLE or count >= _MOST:
            break
        first, count = None, 8 * count
    each = each.double() + math.log(max(1 - prior_none, 1e-300)) - math.log(pairs)
    none = -math.inf
    if prior_none:
        kin = cue.log_evidence(pictures.blurred()).logsumexp(0) - math.log(held)
        modelled = log_none(pictures.means[int(each.argmax())])
        none = math.log(prior_none / 2) + float(torch.logaddexp(kin, kin.new_tensor(modelled)))
    total = torch.logaddexp(each.logsumexp(0), each.new_tensor(none))
    rows, place = candidates.rows.unique(return_inverse=True)
    chance = each.new_zeros(len(rows)).index_add(0, place, (each - total).exp())
    best = chance.topk(min(k, len(rows)))
    hits = []
    named = name(rows[best.indices].tolist())
    ranked = zip(best.values.tolist(), best.indices.tolist(), named, strict=True)
    for probability, row, (id, image, payload) in ranked:
        likeliest = int(each.masked_fill(place != row, -torch.inf).argmax())
        down, across = cue.shifts[int(candidates.shifts[likeliest])]
        hits.append(Hit(id, probability, (-down, -across), payload, image))
    return Hits(hits, float((none - total).exp()), min(1.0, left_out))
