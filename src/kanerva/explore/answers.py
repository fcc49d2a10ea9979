"""What the page shows of a memory: pictures, the posterior, iterative reading, samples."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.distributions import as_normal
from kanerva.errors import UserError
from kanerva.explore.pixels import Damage, Image, to_text
from kanerva.explore.session import Session
from kanerva.memory.heap import Memory
from kanerva.memory.search import Hits
from kanerva.models.base import MemoryModel
from kanerva.models.content import decode_held
from kanerva.models.kpp_bits import KppBits
from kanerva.seeding import stream

Pictures = Float[Tensor, "held C H W"]


def number(value: float) -> float | None:
    """Round a number for JSON; None if it is not finite."""
    return round(value, 6) if math.isfinite(value) else None


# Stored images


@torch.no_grad()
def held_pictures(model: MemoryModel, memory: Memory) -> Pictures:
    """Decode each stored block, in order of handle."""
    if not len(memory):
        return torch.zeros(0, *model.config.image)
    cells, output = decode_held(model, memory)  # pyright: ignore[reportArgumentType]
    pictures = model.likelihood.mean(output)[0]
    rows = torch.empty(memory.capacity, dtype=torch.long).scatter(
        0, cells, torch.arange(len(cells))
    )
    pictures = pictures[rows[memory.cells]]
    if memory.detail is None:
        return pictures
    detail = memory.detail.apply(lambda part: part[memory.cells])  # exact pixels
    exact = torch.arange(detail.pixels.shape[-1]) < detail.stored[:, None]
    flat = torch.where(exact, detail.pixels.float(), pictures.flatten(1))
    return flat.view_as(pictures)


def warm(model: MemoryModel) -> None:
    """Run a model once, so that no client waits for what it computes only the first time."""
    if model.has_blocks:
        blank = torch.zeros(1, *model.config.image)
        model.find(model.write(blank), blank[0])


def describe(session: Session) -> dict[str, Any]:
    """The whole memory, for the page to draw."""
    memory, model = session.memory, session.model
    about = {"undo": len(session.past), "redo": len(session.future), "model": session.name}
    if not model.has_blocks:
        images = session.state.images
        held = [{"handle": h, "cell": 0, "bits": 0, "image": to_text(i)} for h, i in images.items()]
        blocks, size = memory.map[None], 32 * memory.floats
        return about | {
            "capacity": None,
            "rows": 1,
            "columns": 1,
            "bits": size if images else 0,
            "held": held,
            "blocks": _colours(session, blocks, range(1 if images else 0)),
            "block": list(blocks.shape[-2:]),
        }
    pictures, cells = held_pictures(model, memory), memory.cells.tolist()
    each = zip(memory.handles, cells, memory.bits.tolist(), pictures, strict=True)
    held = [
        {"handle": handle, "cell": cell, "bits": round(bits), "image": to_text(picture)}
        for handle, cell, bits, picture in each
    ]
    every = torch.arange(memory.capacity)[None]
    blocks = memory.grid.read(memory.map[None], every)[0]
    return about | {
        "capacity": memory.capacity,
        "rows": memory.grid.rows,
        "columns": memory.grid.columns,
        "bits": round(float(memory.bits.sum())),
        "held": held,
        "blocks": _colours(session, blocks, cells),
        "block": list(memory.grid.block),
    }


def _colours(
    session: Session, blocks: Float[Tensor, "cells Cm h w"], held: "list[int] | range"
) -> dict[int, str]:
    """Convert blocks to colours, on the session's fixed scale. Three channels are used as they are,
    others are mixed to three."""
    if not len(held):
        return {}
    chosen = blocks[list(held)]
    channels = blocks.shape[1]
    if channels != 3:
        mix = torch.randn(3, channels, generator=stream("colours")) / math.sqrt(channels)
        chosen = torch.einsum("dc,nchw->ndhw", mix, chosen)
    light, warm, green = torch.tanh(chosen / session.colour_scale(chosen)).unbind(1)
    base = 0.62 + 0.24 * light  # quiet colours: light, blue to ochre, a little green to rose
    red, blue = base + 0.2 * warm - 0.07 * green, base - 0.24 * warm - 0.07 * green
    colours = torch.stack([red, base + 0.05 * green, blue], dim=1)
    return {cell: to_text(block) for cell, block in zip(held, colours, strict=True)}


def changed_cells(before: Memory, after: Memory) -> list[int]:
    """Cells whose numbers differ in any bit."""
    if before.owners is None or after.owners is None:
        return []
    every = torch.arange(before.capacity)[None]
    old, new = (m.grid.read(m.map[None], every)[0].flatten(1) for m in (before, after))
    return (old != new).any(dim=1).nonzero()[:, 0].tolist()


# Which image a cue shows


def find(session: Session, image: Image, damage: Damage, mask_given: bool) -> dict[str, Any]:
    """The posterior over the stored images and "none of these"."""
    cue = damage.apply(image)
    seen = damage.observed if mask_given else None
    if len(session.memory) == 0:
        return {"cue": to_text(cue), "none": 1.0, "hits": []}
    hits = session.model.find(
        session.memory, cue, observed=seen, shifts=damage.shifts, k=session.memory.capacity
    )
    return {"cue": to_text(cue), **describe_hits(hits)}


def describe_hits(hits: Hits) -> dict[str, Any]:
    rows = [{"handle": h.id, "p": number(h.probability), "shift": list(h.shift)} for h in hits]
    return {"none": number(hits.none), "hits": rows}


@torch.no_grad()
def details(session: Session, image: Image, damage: Damage) -> dict[str, Any]:
    """Familiarity and bound of the image itself, and the nearest neighbour of the cue in pixels."""
    model, memory = session.model, session.memory
    values: dict[str, Any] = {"familiarity": None, "bound": None, "nearest": None}
    held = session.state.images if memory.owners is None else memory.handles
    if not len(held):
        return values
    if model.has_blocks:
        values["familiarity"] = number(float(model.familiarity(memory, image[None])[0]))
    try:
        terms = model.elbo(image[None], memory, sample=False)
        costs = {"log_likelihood": -terms.log_likelihood, **terms.by_name()}
        costs["log_likelihood"] = -terms.log_likelihood
        values["bound"] = {name: number(float(cost[0])) for name, cost in costs.items()}
        values["bound"]["total"] = number(float(terms.nll_nats[0]))
    except UserError:  # some models score only whole episodes
        pass
    handle, distance = nearest(session, damage.apply(image), damage.observed)
    values["nearest"] = {"handle": handle, "distance": number(distance)}
    return values


def nearest(session: Session, cue: Image, seen: Float[Tensor, "H W"]) -> tuple[int, float]:
    """The image with the least squared error on visible pixels. Images are compared as they were
    written, or if that is not known, as the memory decodes them."""
    memory, images = session.memory, session.state.images
    if memory.owners is None:
        handles, pictures = list(images), torch.stack(list(images.values()))
    else:
        handles, pictures = memory.handles, held_pictures(session.model, memory)
        best_known = [
            images.get(handle, picture) for handle, picture in zip(handles, pictures, strict=True)
        ]
        pictures = torch.stack(best_known)
    errors = ((pictures - cue).square() * seen).flatten(1).sum(dim=1)
    best = int(errors.argmin())
    return handles[best], float(errors[best])


def steps(
    session: Session, image: Image, damage: Damage, mask_given: bool, count: int, sample: bool
) -> dict[str, Any]:
    """Iterative reading: the cue, then the picture after each step."""
    cue = damage.apply(image)
    pictures = session.model.recall(
        session.memory,
        cue[None],
        steps=count,
        sample=sample,
        observed=damage.observed[None] if mask_given else None,
        generator=stream(damage.seed, "recall"),
    )
    return {"cue": to_text(cue), "steps": [to_text(picture[0]) for picture in pictures]}


# Samples, which the page calls dreams


def dream(
    session: Session, at: tuple[float, float] | None, spread: float, count: int, seed: int
) -> dict[str, Any]:
    """Samples around a place (x, y) on [-1, 1] of the map, the first of them exactly there; without
    a place, samples at random keys. A model of bits has nothing between cells: it shows the image
    that is stored there, and new ones like it."""
    model, memory, chance = session.model, session.memory, stream(seed, "dream")
    if at is None:
        images = model.generate(memory, count, generator=chance)
        return {"images": [to_text(image) for image in images]}
    if model.key_shape != (2,):
        raise UserError("this model's keys are not places of its map")
    place = torch.tensor(at)
    handle = int(memory.require_slots()[memory.grid.cell_of(place)])
    if isinstance(model, KppBits) and handle >= 0:
        images = [model.get(memory, [handle])]
        if count > 1:
            images.append(model.generate(memory, count - 1, near=handle, generator=chance))
    else:
        key = as_normal(place)
        images = [model.generate(memory, 1, near=(key, 0.0), generator=chance)]
        if count > 1:
            images.append(model.generate(memory, count - 1, near=(key, spread), generator=chance))
    return {"images": [to_text(image) for image in torch.cat(images)]}
