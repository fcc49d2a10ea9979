"""Search: the probability that a cue shows each of N stored pictures, or none of them.

    P(n | cue) = p(cue | picture n) (1 - prior_none) / N  /  p(cue)
    P(none | cue) = p(cue | none) prior_none  /  p(cue)

p(cue | .) is summed over every channel, mask and shift that the cue may have gone through
(`channels.py`, `scoring.py`). p(cue | none) is an equal mixture of two densities: the model's own,
and a kernel density over blurred stored pictures, for images that are similar to a stored one but
not stored. The model's density is slow, so it is computed only if the kernel density alone does not
decide.

There are two steps, as in most search engines: inner products of log-ratios with mean pictures rank
all pictures, and the highest are scored exactly. Without noise the exact score is itself an inner
product, ln p(visible x | block) = [x m, m] . [logit p, ln(1 - p)].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.channels import Picture
from kanerva.memory.evidence import Cue, Pictures
from kanerva.memory.ranking import Candidates
from kanerva.memory.scoring import Scorer

_PRODUCTS, _CUES = 16_000_000, 64  # inner products, and cues, per batch
_BLURRED = 4096  # pictures blurred at once
# Pictures scored exactly: for a cue with one mask, and for each mask of a cue with several. As long
# as `left_out` is at least _NEGLIGIBLE, four times as many are scored, up to _MOST.
CANDIDATES = 8, 4
_NEGLIGIBLE, _MOST = 0.01, 3072
_DOUBT = (-14.0, 7.0)  # ours: ln odds of none by the kernels; in between, the model is asked


@dataclass(frozen=True)
class Hit:
    """One stored picture that a cue may show."""

    id: int  # a handle of a memory, or an id of a store
    probability: float
    shift: tuple[int, int]  # likeliest shift of the cue: rows down and columns right
    payload: str  # the string stored with the image; empty in a memory
    _image: Callable[[], Picture] = field(repr=False)

    @property
    def image(self) -> Picture:
        """The stored picture, decoded: expected pixels on [0, 1]."""
        return self._image()


@dataclass(frozen=True)
class Hits(Sequence[Hit]):
    """The stored pictures that a cue may show, likeliest first, and `none`: the probability that it
    shows none of them. `left_out` estimates the probability of the pictures that were not scored,
    relative to those that were: each is taken to be as likely as a middling candidate."""

    hits: list[Hit]
    none: float
    left_out: float = 0.0

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.hits and isinstance(index, int):
            raise IndexError("there are no hits: nothing is held")
        return self.hits[index]

    def __repr__(self) -> str:
        found = ", ".join(f"{hit.id}: {hit.probability:.4f}" for hit in self.hits)
        return f"Hits({found or 'nothing held'}; none of these: {self.none:.4f})"

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
        if not self.hits:
            raise UserError("there are no hits: nothing is held")
        return torch.stack([hit.image for hit in self.hits])


Rank = Callable[[Sequence[Cue], int], list[Candidates]]
Fetch = Callable[[Int[Tensor, " K"]], Pictures]
Named = tuple[int, Callable[[], Picture], str]  # id, picture, payload


@dataclass(frozen=True)
class Held:
    """The pictures that are searched, by row."""

    count: int
    rank: Rank  # the best candidates for each mask of each cue
    fetch: Fetch  # the pictures of rows
    # the model's ln p(cue | none) of each cue, given the best candidate for it
    log_none: Callable[[Sequence[Cue], Float[Tensor, "n C H W"]], list[float]]
    name: Callable[[list[int]], list[Named]]


@dataclass(frozen=True)
class _Scored:
    """The scored candidates of one cue. In numpy: for a few dozen numbers, a torch call costs more
    than its arithmetic."""

    rows: np.ndarray
    shifts: np.ndarray
    each: np.ndarray  # ln p(cue, candidate | stored)
    kernels: float  # ln p(cue) under the kernel density
    left_out: float  # see `Hits`
    guess: Callable[[], Picture]  # the best candidate

    def log_joint(self, prior_none: float) -> tuple[float, float]:
        """ln p(cue, stored) and, by the kernel density alone, ln p(cue, none)."""
        held = math.log(1 - prior_none) if prior_none < 1 else -math.inf
        none = math.log(prior_none / 2) if prior_none else -math.inf
        return np.logaddexp.reduce(self.each) + held, self.kernels + none

    def posterior(
        self, modelled: float, k: int, prior_none: float
    ) -> tuple[list[tuple[int, float, int]], float]:
        """The `k` likeliest rows, each with its probability and shift, and the probability of none.
        `modelled` is the model's part of ln p(cue, none)."""
        held, by_kernels = self.log_joint(prior_none)
        none = np.logaddexp(by_kernels, modelled)
        log_held = self.each + (held - np.logaddexp.reduce(self.each))
        total = np.logaddexp(np.logaddexp.reduce(log_held), none)
        rows, place = np.unique(self.rows, return_inverse=True)
        probability = np.zeros(len(rows))
        np.add.at(probability, place, np.exp(log_held - total))
        found = []
        for row in np.argsort(-probability, kind="stable")[:k]:
            likeliest = np.where(place == row, self.each, -np.inf).argmax()
            found.append((int(rows[row]), float(probability[row]), int(self.shifts[likeliest])))
        return found, float(np.exp(none - total))


def search(cues: Sequence[Cue], held: Held, *, k: int = 5, prior_none: float = 0.5) -> list[Hits]:
    """Find the `k` likeliest stored pictures for each cue."""
    if held.count == 0:
        return [Hits([], 1.0) for _ in cues]
    hits: list[Hits] = []
    at_once = min(_CUES, max(1, _PRODUCTS // (held.count * 8 * len(cues[0].shifts))))
    for start in range(0, len(cues), at_once):
        hits += _search(cues[start : start + at_once], held, k, prior_none)
    return hits


def _search(cues: Sequence[Cue], held: Held, k: int, prior_none: float) -> list[Hits]:
    count = min(max(k, CANDIDATES[any(len(cue.masks) > 1 for cue in cues)]), _MOST)
    found = _score(cues, held, count, prior_none > 0)
    while count < _MOST:
        unsure = [n for n, one in enumerate(found) if one.left_out >= _NEGLIGIBLE]
        if not unsure:
            break
        count = min(4 * count, _MOST)
        better = _score([cues[n] for n in unsure], held, count, prior_none > 0)
        for n, one in zip(unsure, better, strict=True):
            found[n] = one
    modelled = [-math.inf] * len(cues)
    if prior_none:
        joint = [one.log_joint(prior_none) for one in found]
        doubtful = [n for n, (a, b) in enumerate(joint) if _DOUBT[0] < b - a < _DOUBT[1]]
        if doubtful:
            guesses = torch.stack([found[n].guess() for n in doubtful])
            answers = held.log_none([cues[n] for n in doubtful], guesses)
            for n, answer in zip(doubtful, answers, strict=True):
                modelled[n] = answer + math.log(prior_none / 2)
    ranked = [one.posterior(m, k, prior_none) for one, m in zip(found, modelled, strict=True)]
    named = iter(held.name([row for rows, _ in ranked for row, _, _ in rows]))
    hits = []
    for cue, one, (rows, none) in zip(cues, found, ranked, strict=True):
        each = []
        for _, probability, shift in rows:
            id, image, payload = next(named)
            down, across = cue.shifts[shift]
            each.append(Hit(id, probability, (-down, -across), payload, image))
        hits.append(Hits(each, none, min(1.0, one.left_out)))
    return hits


def _score(cues: Sequence[Cue], held: Held, count: int, kernels: bool) -> list[_Scored]:
    """Score the best `count` candidates for each mask of each cue."""
    candidates = held.rank(cues, count)
    sizes = [len(one.rows) for one in candidates]
    rows = torch.cat([one.rows for one in candidates])
    shifts = torch.cat([one.shifts for one in candidates])
    pictures = held.fetch(rows)
    device = pictures.levels.device
    owner = torch.repeat_interleave(
        torch.arange(len(cues), device=device), torch.tensor(sizes, device=device)
    )
    moves = shifts if len(cues[0].shifts) > 1 else None
    scorer = Scorer(cues)
    score = scorer(pictures, owner, moves)
    kernel = score.new_full(score.shape, -torch.inf)
    if kernels:  # in batches: blurring needs the pictures as floats
        loose = scorer if cues[0].binary else Scorer([cue.loose for cue in cues])
        for part in torch.arange(len(owner), device=device).split(_BLURRED):
            soft, mine = pictures[part].blurred(owner[part]), owner[part]
            kernel[part] = loose(soft, mine, None if moves is None else moves[part])
    pairs = held.count * len(cues[0].shifts)
    ends = np.cumsum(sizes)
    parts = [
        np.split(part.cpu().numpy(), ends[:-1])
        for part in (rows, shifts, score.double(), kernel.double())
    ]
    found = []
    for own_rows, own_shifts, each, by_kernel, end in zip(*parts, ends, strict=True):
        # A middling one of the best `count`, not of all: every mask adds `count` candidates, and
        # those of wrong masks mostly fit badly, whatever the right mask left out.
        middling = np.sort(each)[-min(len(each), 1 + count // 2)]
        left_out = math.exp(middling - np.logaddexp.reduce(each)) * (pairs - len(each))
        best = int(end) - len(each) + int(each.argmax())
        guess = partial(_mean_picture, pictures, best)
        log_pairs = math.log(pairs)
        density = np.logaddexp.reduce(by_kernel) - log_pairs
        found.append(_Scored(own_rows, own_shifts, each - log_pairs, density, left_out, guess))
    return found


def _mean_picture(pictures: Pictures, row: int) -> Picture:
    return pictures[torch.tensor([row], device=pictures.levels.device)].means[0]
