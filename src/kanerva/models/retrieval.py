"""The verbs of `Kpp` that look things up: `find`, `get`, `recall`, `familiarity`.

`content.py` compares blocks with images, `finding.py` with damaged cues.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.inputs import as_chance, as_count, as_mask, require_tensor_images
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
    """The pictures of every step, expected pixels on [0, 1], and the `Hits` of each cue; for a
    batch of memories, a list of them for each memory."""

    pictures: Float[Tensor, "S *B T C H W"]
    hits: list[Hits] | list[list[Hits]]


def find_all(
    model: "Kpp", memory: Memory, cue: Images, observed: Observed | None
) -> list[Hits] | list[list[Hits]]:
    """Call `find` for all cues, in one memory or in each memory of a batch."""
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
    """The part of `Kpp` with its retrieval verbs."""

    @property
    def _kpp(self) -> "Kpp":
        return cast("Kpp", self)

    def score_cues(
        self, memory: Memory, cue: Images, *, observed: Observed | None = None
    ) -> CueScores:
        """ln p(cue | block) of each cell's block; -inf for a free cell. `observed` masks hidden
        pixels of the cue: 1 or 0 for each pixel."""
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
        """Find the `k` stored images that a cue (C, H, W) most likely shows, with probabilities,
        and `.none`: the probability that it shows none of them. A batch of cues gives a list.

        `observed` is a mask (H, W) of the visible pixels; without it, any pixel may be hidden, and
        hidden pixels show 0. `noise` is "none", "salt_pepper", "gaussian", or None if unknown; its
        strength is integrated out. The cue may be shifted by up to `shifts` pixels.
        """
        k, shifts = as_count("k", k), as_count("shifts", shifts, 0)
        prior_none = as_chance("prior_none", prior_none)
        seen = None if observed is None else as_mask(observed)
        cue = require_tensor_images(cue, "cue")
        return find(self._kpp, memory, cue, seen, noise, shifts, k, prior_none)

    def get(self, memory: Memory, handles: Handles | None = None) -> Float[Tensor, "*B T C H W"]:
        """Decode stored blocks by handle; without handles, all of them, in order of handle. Returns
        expected pixels on [0, 1]."""
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
        """Repeat with M fixed: find the block that explains the last picture best, read it, decode.
        Stops after `steps` steps, by default when nothing changes. Expected pixels on [0, 1].

        There is always a best block. `answers=True` also returns the result of `find`: which image
        it is, with what probability, and whether the cue is stored at all. `observed` masks pixels
        of the cue in the first step. `sample=True` samples the key from q(y|.) and the readout from
        p(z|M, y) at each step; otherwise their means are used.
        """
        read = recall_means if not sample else partial(recall_samples, generator=generator)
        pictures = read(self._kpp, memory, cue, steps, observed)
        if not answers:
            return pictures
        return Recalled(pictures, find_all(self._kpp, memory, cue, observed))

    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """How much better the best stored block explains an image than a free cell, in nats.

        Large for images that were written, smaller for others (below zero on binary sets). It is
        computed at means of z: a score, not a bound.
        """
        return familiarity(self._kpp, memory, images)
