"""What a memory of blocks is asked by content: `find`, `get`, `recall`, `familiarity`.

How blocks are compared with images is in `content.py`, with damaged cues in `finding.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.inputs import as_count, as_mask, require_tensor_images
from kanerva.memory.channels import Noise as ChannelNoise
from kanerva.memory.heap import Memory
from kanerva.memory.search import Hits
from kanerva.models.base import Handles, Images, Observed
from kanerva.models.content import (
    CueScores,
    familiarity,
    get,
    recall_means,
    recall_samples,
    score_cues,
)
from kanerva.models.finding import Cues, Visible, find
from kanerva.seeding import Noise
from kanerva.shapes import PerImage

if TYPE_CHECKING:
    from kanerva.models.kpp import Kpp


@dataclass(frozen=True)
class Recalled:
    """Pictures of every step, expected pixels on [0, 1], and for each cue its `Hits`; of a batch of
    memories, a list of those for each."""

    pictures: Float[Tensor, "S *B T C H W"]
    hits: list[Hits] | list[list[Hits]]


def find_all(
    model: "Kpp", memory: Memory, cue: Images, observed: Observed | None
) -> list[Hits] | list[list[Hits]]:
    """`find` for all cues, in one memory or in each of a batch."""
    seen = None if observed is None else as_mask(observed)
    if not memory.is_batch:
        return _find(model, memory, cue, seen)
    each = [seen] * len(cue) if seen is None or seen.ndim < 4 else list(seen)
    return [_find(model, memory[i], cue[i], mask) for i, mask in enumerate(each)]


def _find(model: "Kpp", memory: Memory, cue: Images, observed: Observed | None) -> list[Hits]:
    found = find(model, memory, cue, observed, None, 0, 5, 0.5)
    assert isinstance(found, list)
    return found


class Retrieval:
    """Verbs of `Kpp`."""

    @property
    def _kpp(self) -> "Kpp":
        return cast("Kpp", self)

    def score_cues(
        self, memory: Memory, cue: Images, *, observed: Observed | None = None
    ) -> CueScores:
        """ln p(cue | block) of every block held, on `observed` pixels only (1 or 0 for each) where
        part of a cue is hidden; -inf where a cell is free."""
        return score_cues(self._kpp, memory, cue, observed)

    def find(
        self,
        memory: Memory,
        cue: Cues,
        *,
        observed: Visible | None = None,
        noise: ChannelNoise = None,
        shifts: int = 0,
        k: int = 5,
        prior_none: float = 0.5,
    ) -> Hits | list[Hits]:
        """The `k` images held that a cue (C, H, W) most likely shows, with probabilities, and
        `.none`: that it shows none of what is held. A batch of cues gives a list.

        `observed` says which pixels (H, W) are seen; without it any may be hidden, showing 0.
        `noise` is "none", "salt_pepper", "gaussian", or None where it is not known; its strength
        is integrated over. The cue may be moved by up to `shifts` pixels.
        """
        k, shifts = as_count("k", k), as_count("shifts", shifts, 0)
        seen = None if observed is None else as_mask(observed)
        cue = require_tensor_images(cue, "cue")
        return find(self._kpp, memory, cue, seen, noise, shifts, k, prior_none)

    def get(self, memory: Memory, handles: Handles | None = None) -> Float[Tensor, "*B T C H W"]:
        """Pictures of blocks held, by handle; without handles of all, in their order. Expected
        pixels on [0, 1]."""
        return get(self._kpp, memory, handles)

    @overload
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int | None = None,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
    ) -> Float[Tensor, "S *B T C H W"]: ...

    @overload
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        answers: Literal[True],
        steps: int | None = None,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
    ) -> Recalled: ...

    @torch.no_grad()
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int | None = None,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
        answers: bool = False,
    ) -> Float[Tensor, "S *B T C H W"] | Recalled:
        """Hold M; find the block that explains the picture best, read it, decode, and again:
        `steps` times, or until nothing changes. Expected pixels on [0, 1].

        There is always a best block: `answers=True` also says which it is, how surely, and whether
        the cue is held at all (`find`). `observed` hides pixels of the cue, in the first step.
        `sample=True` draws the key from q(y|.) and the readout from p(z|M, y) at each step; else
        both are taken at their means.
        """
        read = recall_means if not sample else partial(recall_samples, generator=generator)
        pictures = read(self._kpp, memory, cue, steps, observed)
        if not answers:
            return pictures
        return Recalled(pictures, find_all(self._kpp, memory, cue, observed))

    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """How much better the best block held explains an image than no block does: nats.

        Large for what was written, smaller for what was not (below zero on binary sets). Both at
        means: a score, not a bound.
        """
        return familiarity(self._kpp, memory, images)
