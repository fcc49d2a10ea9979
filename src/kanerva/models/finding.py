"""`find`: the probability that a damaged cue shows each image of a memory or store, or none.

`memory/search.py` compares cues with decoded pictures. This file has what needs a model: decoding
blocks to pictures, and p(cue | none), estimated by importance sampling of z given a free cell. Each
estimate is unbiased and mostly too low, so the largest is taken:

    generic     z ~ p(z | free cell), the same samples for every cue: good if the cue shows little
    encoded     z ~ q(z | guess at the whole image, free cell): good if the cue shows a lot. Guesses
                are the best stored picture, and the cue with its hidden pixels filled in from that
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.channels import Noise
from kanerva.memory.detail import Detail
from kanerva.memory.evidence import Cue, Pictures, to_levels
from kanerva.memory.heap import Memory
from kanerva.memory.ranking import Candidates, Features
from kanerva.memory.scoring import Scorer, log_evidence
from kanerva.memory.search import Held, Hits, Named, search
from kanerva.models.content import cached, decode_held, put_stored
from kanerva.seeding import Same, stream
from kanerva.shapes import Blocks, DecoderOutput

if TYPE_CHECKING:
    from kanerva.models.kpp import Kpp

Cues = Shaped[Tensor, "*T C H W"]
Visible = Shaped[Tensor, "*masks rows columns"]  # true or 1 where a pixel is visible
GENERIC, ENCODED = 128, 2  # ours: samples for each estimate


@torch.no_grad()
def find(
    model: "Kpp",
    memory: Memory,
    cue: Cues,
    observed: Visible | None,
    noise: Noise,
    shifts: int,
    k: int,
    prior_none: float,
) -> Hits | list[Hits]:
    """See `Kpp.find`."""
    model.as_maps(memory)
    if memory.is_batch:
        raise UserError("this is a batch of memories: find in one, memory[i]")
    owners = memory.require_slots()
    cells, output = decode_held(model, memory)
    pictures = as_pictures(model, output)
    handles = owners[cells].tolist()
    features = Features(pictures.features, model.config.image)

    def rank(cues: Sequence[Cue], count: int) -> list[Candidates]:
        return Candidates.rank(cues, features, count)

    def name(rows: list[int]) -> list[Named]:
        return [(handles[r], lambda r=r: pictures.means[r], "") for r in rows]

    held = Held(
        len(pictures),
        rank,
        lambda rows: pictures[rows],
        lambda cues, guesses: log_none(model, cues, guesses),
        name,
    )
    cues = as_cues(model, cue, observed, noise, shifts)
    hits = search(cues, held, k=k, prior_none=prior_none)
    return hits if cue.ndim == 4 else hits[0]


def as_cues(
    model: "Kpp", cue: Cues, observed: Visible | None, noise: Noise, shifts: int
) -> list[Cue]:
    """Check cues, which may be any finite numbers, and masks of their visible pixels."""
    image = model.config.image
    if cue.ndim not in (3, 4) or tuple(cue.shape[-3:]) != image or not len(cue):
        raise UserError(f"a cue is {image}, or a batch of those; got {tuple(cue.shape)}")
    # bytes of a binary model may be 0 and 1
    is_grey = cue.dtype == torch.uint8 and (int(cue.max()) > 1 or not model.pixels.binary)
    cues = cue.to(model.device).float() / (255 if is_grey else 1)
    if not cues.isfinite().all():
        raise UserError("a cue's pixels are finite numbers: hide what is missing with observed")
    model.pixels.check_cue(cues)
    cues = cues.view(-1, *image)
    masks: list[Tensor] | list[None] = [None] * len(cues)
    if observed is not None:
        if observed.shape != image[1:] and observed.shape != (*cue.shape[:-3], *image[1:]):
            raise UserError(
                f"observed is {image[1:]}, 1 where a pixel is visible, or one for each cue; "
                f"got {tuple(observed.shape)}"
            )
        masks = list((observed != 0).to(model.device).expand(len(cues), *image[1:]))
    binary = model.config.likelihood == "bernoulli"
    return [Cue.of(c, m, noise, shifts, binary) for c, m in zip(cues, masks, strict=True)]


def as_pictures(model: "Kpp", output: DecoderOutput) -> Pictures:
    """Quantise the decoder output of one episode to bytes."""
    if model.config.likelihood == "bernoulli":
        return Pictures(to_levels(output[0]), binary=True)
    return Pictures((model.likelihood.mean(output)[0] * 255).round().to(torch.uint8), binary=False)


def decode_blocks(model: "Kpp", blocks: Blocks, detail: Detail | None = None) -> Pictures:
    """Decode the blocks of one episode to pictures, at the mean of p(z | block). Pixels that their
    detail stores are taken from it."""
    output = model.decoder(model.readout(blocks, sample=False).readout)
    return as_pictures(model, output if detail is None else put_stored(output, detail))


@torch.no_grad()
def log_none(model: "Kpp", cues: Sequence[Cue], guesses: Float[Tensor, "n C H W"]) -> list[float]:
    """Estimate ln p(cue | none) of each cue. `guesses`: the best stored picture for each."""
    empty = model.free_cells(1, 1)
    generic = cached(model, model, lambda: _generic(model, empty))
    visible = torch.stack([cue.masks.all(dim=0) for cue in cues])[:, None]  # under every mask
    shown = torch.stack([cue.picture for cue in cues]).clamp(0, 1)
    images = torch.stack([torch.where(visible, shown, guesses), guesses], dim=1)
    images = images.round() if cues[0].binary else (images * 255).round() / 255
    features = model.encoder(images).repeat_interleave(ENCODED, dim=1)
    blocks = empty.expand(*features.shape[:2], -1, -1, -1)
    noise = Same(stream("none", device=model.device))  # each cue is an episode of its own
    reading = model.readout(blocks, features, generator=noise)
    weights = (reading.log_prior - reading.log_posterior).flatten()
    samples = as_pictures(model, model.decoder(reading.readout).flatten(0, 1)[None])
    owner = torch.arange(len(cues), device=model.device).repeat_interleave(2 * ENCODED)
    encoded = (Scorer(cues)(samples, owner) + weights).view(len(cues), 2, ENCODED)
    by_encoded = encoded.logsumexp(2).amax(dim=1) - math.log(ENCODED)
    by_generic = torch.stack([log_evidence(cue, generic).logsumexp(0) for cue in cues])
    return torch.maximum(by_encoded, by_generic - math.log(GENERIC)).tolist()


def _generic(model: "Kpp", empty: Blocks) -> Pictures:
    """Samples of the model's prior, given a free cell."""
    blocks = empty.expand(-1, GENERIC, -1, -1, -1)
    readout = model.readout(blocks, generator=stream("generic", device=model.device)).readout
    return as_pictures(model, model.decoder(readout))
