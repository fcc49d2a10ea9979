"""Measure the uses of a memory of blocks: familiarity and sampling.

Only for models that place blocks (`kpp`). Each function returns a plain entry of a record.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kanerva.data.episodes import FixedEpisodes
from kanerva.distributions import as_normal, as_uniform
from kanerva.evaluation.bound import Chunk, chunks
from kanerva.evaluation.controls import holding, partners, strangers
from kanerva.memory.heap import Memory
from kanerva.models.kpp import Kpp
from kanerva.seeding import stream
from kanerva.shapes import Episode

Scores = Float[Tensor, "_"]
Pictures = tuple[Episode, Bool[Tensor, "B T"]]
SPREADS = (0.1, 0.5)  # noise on perturbed keys; 0.1 is the paper's (§4.1.1)


def auroc(positive: Scores, negative: Scores) -> float:
    """The probability that a positive scores above a negative; ties count half."""
    both = torch.cat([positive, negative]).double()
    _, inverse, counts = both.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank = (last - (counts - 1) / 2)[inverse]  # average rank of ties
    n, m = len(positive), len(negative)
    return ((rank[:n].sum() - n * (n + 1) / 2) / (n * m)).item()


@torch.no_grad()
def measure_familiarity(
    model: Kpp, episodes: FixedEpisodes, images: int
) -> dict[str, float] | None:
    """Measure familiarity of written against unwritten test images. The unwritten ones are from the
    next episode that shares no image."""
    others = partners(episodes, holding(episodes, images))
    if others is None:
        return None
    held, new = [], []
    for chunk in chunks(episodes, len(others), "familiarity"):
        batch = chunk.batch
        memory = model.write(batch.images, generator=chunk.generator)
        held.append(model.familiarity(memory, batch.images)[batch.counted].cpu())
        unknown = strangers(episodes, chunk, others)
        new.append(model.familiarity(memory, unknown)[batch.counted].cpu())
    written, unwritten = torch.cat(held), torch.cat(new)
    return {
        "auroc": auroc(written, unwritten),
        "written_nats": written.mean().item(),
        "unwritten_nats": unwritten.mean().item(),
        "n_written": len(written),
        "n_unwritten": len(unwritten),
    }


@torch.no_grad()
def measure_generation(
    model: Kpp, episodes: FixedEpisodes, images: int
) -> dict[str, float | int] | None:
    """Compare samples with the written images: the distance to the nearest written image (root mean
    square over pixels), and greyness (mean of 4 p (1 - p): 0 black and white, 1 all grey)."""
    others = partners(episodes, holding(episodes, images))
    if others is None:
        return None
    found: dict[str, list[Tensor]] = {}
    for chunk in chunks(episodes, len(others), "generation"):
        written = chunk.batch.images.flatten(2)
        pictures = draw_pictures(model, chunk, strangers(episodes, chunk, others))
        for name, (samples, chosen) in pictures.items():
            made = samples.flatten(2)
            nearest = torch.cdist(made, written).min(dim=-1).values / math.sqrt(made.shape[-1])
            grey = (4 * made * (1 - made)).mean(dim=-1)
            found.setdefault(f"{name}_nearest", []).append(nearest[chosen].cpu())
            found.setdefault(f"{name}_grey", []).append(grey[chosen].cpu())
    every = {name: torch.cat(values) for name, values in found.items()}
    means = {name: values.mean().item() for name, values in every.items() if len(values)}
    return {"n": len(others) * episodes.episode_length} | means


def draw_pictures(model: Kpp, chunk: Chunk, unwritten: Episode) -> dict[str, Pictures]:
    """Pictures from memories and pictures to compare them with, each with a mask of those that
    count.

    Samples at random keys are `held` if the key falls into a cell with a block, else `free` (none
    in a full memory). `perturbed` uses keys close to those of written images; `recalled` is the
    reconstruction of the written images. To compare: `vae`, samples of an empty memory;
    `crossfade`, the average of two written images; `unwritten`, real images of another episode.
    """
    written = chunk.batch.images
    count, length = written.shape[:2]
    memory = model.write(written, generator=chunk.generator)
    noise = stream("generate", chunk.start, device=model.device)
    keys = as_normal(memory.places)
    random = torch.randn(count, length, 2, generator=noise, device=keys.device)
    samples = model.generate_at(memory, random, generator=noise)
    on_block = nearest_is_held(memory, random)
    every = torch.ones_like(on_block)
    pictures = {
        "recalled": (model.reconstruct(written), every),
        "held": (samples, on_block),
        "free": (samples, ~on_block),
        "vae": (model.generate(model.empty(count), length, generator=noise), every),
        "crossfade": ((written + written.roll(1, dims=1)) / 2, every),
        "unwritten": (unwritten, every),
    }
    for spread in SPREADS:
        moved = keys + spread * torch.randn(keys.shape, generator=noise, device=keys.device)
        made = model.generate_at(memory, moved, generator=noise)
        pictures[f"perturbed_{spread:g}"] = (made, every)
    return pictures


def nearest_is_held(memory: Memory, keys: Float[Tensor, "B T 2"]) -> Bool[Tensor, "B T"]:
    """Whether the cell that a key falls into holds a block."""
    cells = memory.grid.cell_of(as_uniform(keys))
    return memory.require_slots().gather(1, cells) >= 0
