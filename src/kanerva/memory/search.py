"""Which picture held does a cue show, how surely, or is it none of them?

    P(n | cue) = p(cue | picture n) (1 - prior_none) / N  /  p(cue)
    P(none | cue) = p(cue | nothing held) prior_none  /  p(cue)

p(cue | .) is summed over every channel, mask and shift that the cue may have come through
(`channels.py`, `evidence.py`). p(cue | nothing held) is half a model's own, half that of a kernel
density over what is held, each picture blurred: where noise is strong, what is like it but is not
it. The model is asked only where the kernels leave doubt.

Two steps, as in any search: an inner product of log-ratios with mean pictures ranks everything,
and what it ranks highest is scored exactly. Without noise the exact score is itself an inner
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
from kanerva.memory.evidence import Cue, Pictures, log_evidence
from kanerva.memory.ranking import Candidates

_PRODUCTS, _CUES = 16_000_000, 64  # inner products held at once; cues
_BLURRED = 4096  # pictures blurred at once
CANDIDATES = 8, 4  # scored exactly: of one mask, or each of several; more where that
_NEGLIGIBLE, _MOST = 0.01, 3072  # leaves out more than so much, up to so many
_DOUBT = (-14.0, 7.0)  # ln odds of none by the kernels alone, between which a model is asked. ours


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
    `left_out` says how much more what was not scored would have, were each as likely as a middling
    one of those that one mask ranked highest."""

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
    """What is searched: so many pictures, `rank`ed into candidates for each mask of each cue,
    `fetch`ed by row, `name`d by row; `log_none` is a model's ln p(cue | nothing held) of cues,
    given the best guess at what each shows."""

    count: int
    rank: Rank
    fetch: Fetch
    log_none: Callable[[Sequence[Cue], Float[Tensor, "n C H W"]], list[float]]
    name: Callable[[list[int]], list[Named]]


@dataclass(frozen=True)
class _Scored:
    """A cue's candidates: ln p(cue | each), and that of a kernel density. In numpy: there are a
    few dozen, of which a call of torch's costs more than what it computes."""

    rows: np.ndarray
    shifts: np.ndarray
    each: np.ndarray
    kin: float
    left_out: float  # share of what was not scored, estimated
    guess: Callable[[], Picture]  # the best picture

    def log_joint(self, prior_none: float) -> tuple[float, float]:
        """ln p(cue, held) and, by the kernels alone, ln p(cue, none)."""
        held = math.log(1 - prior_none) if prior_none < 1 else -math.inf
        none = math.log(prior_none / 2) if prior_none else -math.inf
        return np.logaddexp.reduce(self.each) + held, self.kin + none

    def posterior(
        self, modelled: float, k: int, prior_none: float
    ) -> tuple[list[tuple[int, float, int]], float]:
        """The likeliest rows, each with its probability and shift; and that of none. `modelled` is
        the model's share of ln p(cue, none)."""
        held, near = self.log_joint(prior_none)
        none = np.logaddexp(near, modelled)
        log_held = self.each + (held - np.logaddexp.reduce(self.each))
        total = np.logaddexp(np.logaddexp.reduce(log_held), none)
        rows, place = np.unique(self.rows, return_inverse=True)
        chance = np.zeros(len(rows))
        np.add.at(chance, place, np.exp(log_held - total))
        found = []
        for row in np.argsort(-chance, kind="stable")[:k]:
            likeliest = np.where(place == row, self.each, -np.inf).argmax()
            found.append((int(rows[row]), float(chance[row]), int(self.shifts[likeliest])))
        return found, float(np.exp(none - total))


def search(cues: Sequence[Cue], held: Held, *, k: int = 5, prior_none: float = 0.5) -> list[Hits]:
    """The `k` likeliest of what is held, for each cue."""
    if k < 1 or not 0 <= prior_none <= 1:
        raise UserError(f"k is at least 1 and prior_none a probability, got {k}, {prior_none}")
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
        again = [n for n, one in enumerate(found) if one.left_out >= _NEGLIGIBLE]
        if not again:
            break
        count = min(4 * count, _MOST)
        better = _score([cues[n] for n in again], held, count, prior_none > 0)
        for n, one in zip(again, better, strict=True):
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
        for _, chance, shift in rows:
            id, image, payload = next(named)
            down, across = cue.shifts[shift]
            each.append(Hit(id, chance, (-down, -across), payload, image))
        hits.append(Hits(each, none, min(1.0, one.left_out)))
    return hits


def _score(cues: Sequence[Cue], held: Held, count: int, kernels: bool) -> list[_Scored]:
    """The best `count` candidates for each mask of each cue."""
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
    score = log_evidence(cues, pictures, owner, moves)
    kin = score.new_full(score.shape, -torch.inf)
    if kernels:  # in parts: blurred pictures are floats
        loose = [cue.loose for cue in cues]
        for part in torch.arange(len(owner), device=device).split(_BLURRED):
            soft, mine = pictures[part].blurred(owner[part]), owner[part]
            kin[part] = log_evidence(loose, soft, mine, None if moves is None else moves[part])
    pairs = held.count * len(cues[0].shifts)
    ends = np.cumsum(sizes)
    parts = [
        np.split(part.cpu().numpy(), ends[:-1])
        for part in (rows, shifts, score.double(), kin.double())
    ]
    found = []
    for mine, moved, each, near, end in zip(*parts, ends, strict=True):
        # each of several masks has ranked `count`; most of those of wrong masks fit badly, and say
        # nothing of what the right one left out
        usual = np.sort(each)[-min(len(each), 1 + count // 2)]
        left_out = math.exp(usual - np.logaddexp.reduce(each)) * (pairs - len(each))
        best = int(end) - len(each) + int(each.argmax())
        guess = partial(_mean_picture, pictures, best)
        log_pairs = math.log(pairs)
        kin_total = np.logaddexp.reduce(near) - log_pairs
        found.append(_Scored(mine, moved, each - log_pairs, kin_total, left_out, guess))
    return found


def _mean_picture(pictures: Pictures, row: int) -> Picture:
    return pictures[torch.tensor([row], device=pictures.levels.device)].means[0]
