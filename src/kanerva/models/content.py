"""Content addressing: which block of a memory explains an image, and whether any does.

Each stored block is decoded once, at the mean of p(z | block), and every image is scored under the
resulting p(x | z).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.errors import UserError
from kanerva.inputs import as_count, as_mask
from kanerva.memory.detail import Detail
from kanerva.memory.heap import Memory
from kanerva.models.base import MOST_STEPS, Handles, Images, Observed
from kanerva.models.terms import ElboTerms
from kanerva.readout import SpatialPrior
from kanerva.seeding import Noise
from kanerva.shapes import Cells, DecoderOutput, Episode, FeatureMaps, MemoryMap, PerImage

if TYPE_CHECKING:
    from kanerva.models.kpp import Kpp

CueScores = Float[Tensor, "B T slots"]  # ln p(cue | each cell's block), -inf where a cell is free


_STORED = 8.0  # the logit given to a pixel that is stored as 1, its negative for 0
_AT_ONCE = 128  # blocks decoded at once: more do not fit a processor's cache
Made = TypeVar("Made")
_cache: WeakKeyDictionary[Any, tuple[str, Any]] = WeakKeyDictionary()


def cached(owner: object, model: "Kpp", make: Callable[[], Made]) -> Made:
    """Cache the result of `make` as long as `owner` lives and the model's weights and device do not
    change."""
    name, found = f"{model.fingerprint()} {model.device}", _cache.get(owner)
    if found is None or found[0] != name:
        found = (name, make())
        _cache[owner] = found
    return found[1]


@dataclass(frozen=True)
class Decoded:
    """The cached decoder outputs of a memory's blocks, with the map and weights they belong to."""

    model: str  # fingerprint
    map: Float[Tensor, "*B Cm Hm Wm"]
    version: int  # of the map tensor
    cells: Int[Tensor, " held"]
    output: DecoderOutput

    def is_valid(self, model: "Kpp", like: Memory) -> bool:
        """Whether the weights are the same, and the map was not modified in place since."""
        same = self.map.shape == like.map.shape and self.map.device == like.map.device
        return same and self.model == model.fingerprint() and self.version == _version(self.map)


def _version(map: Float[Tensor, "*B Cm Hm Wm"]) -> int:
    return 0 if map.is_inference() else map._version


@torch.no_grad()
def decode_held(model: "Kpp", memory: Memory) -> tuple[Int[Tensor, " cells"], DecoderOutput]:
    """The cells that are in use in any memory of a batch, and the decoder outputs of their blocks.
    Pixels that a block stores are taken from it."""
    cells, output = _decode_once(model, memory)
    detail = memory.as_batch().detail
    if detail is None or not len(cells):
        return cells, output
    return cells, put_stored(output, detail.at(cells.expand(len(output), -1)))


def put_stored(output: DecoderOutput, detail: Detail) -> DecoderOutput:
    """Replace the decoder outputs of pixels that blocks store by the stored values."""
    pixels = detail.pixels.to(output).unflatten(-1, output.shape[2:])
    stored = detail.is_stored.unflatten(-1, output.shape[2:])
    return torch.where(stored, _STORED * (2 * pixels - 1), output)


def show_stored(logits: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Expected pixels; exactly 0 or 1 where the logit is as large as that of a stored pixel."""
    return torch.where(logits.abs() < _STORED, logits.sigmoid(), (logits > 0).float())


def _decode_once(model: "Kpp", memory: Memory) -> tuple[Int[Tensor, " cells"], DecoderOutput]:
    """Decode each block only once: the result is cached, and memories derived from this one by
    `append` or `free` reuse it."""
    held = memory.as_batch().require_slots() >= 0
    cells, maps = held.any(dim=0).nonzero()[:, 0], model.as_maps(memory)
    last = memory.kept.get("decoded")
    last = last if isinstance(last, Decoded) and last.is_valid(model, memory) else None
    if last is not None and last.map is memory.map and torch.equal(last.cells, cells):
        return cells, last.output
    known = torch.zeros_like(cells, dtype=torch.bool)
    if last is not None and len(last.cells):
        at = torch.searchsorted(last.cells, cells).clamp(max=len(last.cells) - 1)
        before = last.map if memory.is_batch else last.map[None]
        read, every = model.placement.grid.read, cells.expand(len(maps), -1)
        same = (read(maps, every) == read(before, every)).flatten(2).all(dim=-1).all(dim=0)
        known = same & (last.cells[at] == cells)
    if last is None or not bool(known.any()):
        output = _decode(model, maps, cells)
    else:
        output = last.output[:, at]  # pyright: ignore[reportPossiblyUnboundVariable]
        if not bool(known.all()):
            output[:, ~known] = _decode(model, maps, cells[~known])
    made = Decoded(model.fingerprint(), memory.map, _version(memory.map), cells, output)
    memory.kept["decoded"] = made
    return cells, output


def _decode(model: "Kpp", maps: MemoryMap, cells: Int[Tensor, " n"]) -> DecoderOutput:
    parts = []
    for some in cells.split(_AT_ONCE):
        blocks = model.placement.grid.read(maps, some.expand(len(maps), -1))
        parts.append(model.decoder(SpatialPrior(model.readout, blocks).mean))
    return torch.cat(parts, dim=1)


def _decode_means(model: "Kpp", memory: Memory) -> tuple[Int[Tensor, " held"], Images]:
    """Cells that hold a block, and the expected pixels of each; stored pixels are exact."""
    cells, output = decode_held(model, memory)
    return cells, model.likelihood.mean(output) if memory.detail is None else show_stored(output)


@torch.no_grad()
def get(model: "Kpp", memory: Memory, handles: Handles | None) -> Float[Tensor, "*B T C H W"]:
    """See `Kpp.get`."""
    model.as_maps(memory)
    where = memory.slots_of(memory.handles if handles is None else handles)
    cells, means = _decode_means(model, memory)
    pictures = _values_at(means, cells, where)
    return pictures if memory.is_batch else pictures[0]


@torch.no_grad()
def recall_means(
    model: "Kpp", memory: Memory, cue: Images, steps: int | None, observed: Observed | None
) -> Float[Tensor, "S *B T C H W"]:
    """Show the block that explains the cue best, then the block that explains that picture best,
    and so on. Once a step chooses the same blocks as the one before, so do all later ones."""
    model.as_maps(memory, cue)
    most = as_count("steps", MOST_STEPS if steps is None else steps)
    picture = model.as_episodes(cue)
    chosen: list[Cells] = []
    _require_held(memory)
    cells, means = _decode_means(model, memory)
    while len(chosen) < most:
        shown = picture if cue.ndim == 5 else picture[0]
        scores = model.score_cues(memory, shown, observed=observed if not chosen else None)
        best = scores.argmax(dim=-1)
        if chosen and torch.equal(best, chosen[-1]):
            break
        chosen.append(best)
        picture = _values_at(means, cells, best)
    chosen += chosen[-1:] * (most - len(chosen) if steps is not None else 0)
    pictures = torch.stack([_values_at(means, cells, best) for best in chosen])
    return pictures if memory.is_batch else pictures[:, 0]


@torch.no_grad()
def recall_samples(
    model: "Kpp",
    memory: Memory,
    cue: Images,
    steps: int | None,
    observed: Observed | None,
    generator: Noise,
) -> Float[Tensor, "S *B T C H W"]:
    """The same as `recall_means`, with keys and readouts sampled at each step."""
    maps, masks = model.as_maps(memory, cue), [observed]
    _require_held(memory)

    def read(picture: Episode) -> Episode:
        shown, mask = picture if cue.ndim == 5 else picture[0], masks.pop() if masks else None
        best = model.score_cues(memory, shown, observed=mask).argmax(dim=-1)
        prior = model.read_maps(maps, model.keys_at(memory, best).sample(generator))
        return model.likelihood.mean(model.decoder(prior.sample(generator)))

    return model.iterate_read(memory, cue, steps, read)


def _require_held(memory: Memory) -> None:
    """Refuse an empty memory: there would be no block to show."""
    if not bool((memory.require_slots() >= 0).any(dim=-1).all()):
        raise UserError("this memory holds nothing that could be recalled: write images first")


def _values_at(
    values: Float[Tensor, "B held *rest"], cells: Int[Tensor, " held"], where: Cells
) -> Tensor:
    """The values at cells `where`, given those at the sorted `cells`."""
    rows = torch.arange(len(where), device=where.device)[:, None]
    return values[rows, torch.searchsorted(cells, where)]


@torch.no_grad()
def score_cues(model: "Kpp", memory: Memory, cue: Images, observed: Observed | None) -> CueScores:
    """ln p(cue | block) of every stored block, over observed pixels only."""
    model.as_maps(memory, cue)
    episode = model.as_episodes(cue)
    model.pixels.check_cue(episode)
    held = memory.as_batch().require_slots() >= 0
    mask = None if observed is None else _check_mask(observed, cue)
    scores = torch.full((*episode.shape[:2], held.shape[1]), -torch.inf, device=model.device)
    if not bool(held.any()):
        return scores
    cells, pictures = decode_held(model, memory)
    for t in range(episode.shape[1]):
        one = episode[:, t : t + 1].expand(-1, len(cells), -1, -1, -1)
        seen = None if mask is None else mask[:, t : t + 1].expand(-1, len(cells), -1, -1)
        scores[:, t, cells] = model.likelihood.log_prob(pictures, one, seen)
    return scores.masked_fill(~held[:, None], -torch.inf)


@torch.no_grad()
def familiarity(model: "Kpp", memory: Memory, images: Images) -> PerImage:
    """ln p(x | best block) minus the bound on ln p(x | free cell), both at means of z."""
    episode = model.as_pixels(images)
    best = score_cues(model, memory, images, None).argmax(dim=-1)
    maps, owners = model.as_maps(memory), memory.as_batch().require_slots()
    blocks = model.placement.grid.read(maps, best)
    known = model.log_likelihood(SpatialPrior(model.readout, blocks).mean, episode)
    nothing = model.free_cells(*episode.shape[:2])
    reading = model.readout(nothing, model.encoder(episode), sample=False)
    score = known - (model.log_likelihood(reading.readout, episode) - reading.kl)
    score = score.masked_fill((owners < 0).all(dim=1, keepdim=True), -torch.inf)
    return score if images.ndim == 5 else score[0]


def terms_by_content(
    model: "Kpp",
    images: Images,
    features: FeatureMaps,
    memory: Memory,
    sample: bool,
    generator: Noise,
) -> ElboTerms:
    """The bound if it is unknown whether an image is stored, and where: the best block, or a free
    cell if that is better. The choice is made at posterior means, before anything is sampled, so
    the result is still a bound."""
    episode, maps = model.as_episodes(images), model.as_maps(memory, images)
    in_free_cell = model.keys_in_free_cells(memory, features.shape[1], generator)
    in_best = model.keys_at(memory, score_cues(model, memory, images, None).argmax(dim=-1))
    means, found = [], []
    for keys in (in_free_cell, in_best):
        at_means = model.terms(episode, features, maps, keys, sample=False)
        means.append(at_means.nll_nats)
        found.append(model.terms(episode, features, maps, keys, sample=sample, generator=generator))
    holds_nothing = (memory.as_batch().require_slots() < 0).all(dim=1, keepdim=True)
    return found[0].where((means[0] < means[1]) | holds_nothing, found[1])


def _check_mask(observed: Observed, cue: Images) -> Float[Tensor, "B T H W"]:
    shape, mask = (*cue.shape[:-3], *cue.shape[-2:]), as_mask(observed).to(cue.device)
    if mask.shape not in (shape, shape[-2:]):
        raise UserError(
            f"observed is 1 or 0 for each pixel: {tuple(shape[-2:])}, or for each cue {shape}; "
            f"got {tuple(mask.shape)}"
        )
    mask = mask.expand(shape)
    return mask if mask.ndim == 4 else mask[None]
