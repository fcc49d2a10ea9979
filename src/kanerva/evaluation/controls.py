"""Controls: the same bound given another memory. Each is valid; a large gap says M is used."""

import math

import torch

from kanerva.data.episodes import FixedEpisodes
from kanerva.evaluation.bound import Chunk, Score, bound, score
from kanerva.models.base import MemoryModel
from kanerva.models.terms import ElboTerms
from kanerva.shapes import Episode

IMAGES = 1024  # scored by each control unless asked for more


def holding(episodes: FixedEpisodes, images: int) -> int:
    """How many of the first episodes hold so many images; all of them at most."""
    return min(math.ceil(images / episodes.episode_length), len(episodes))


def zeroed(model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score:
    """A memory of zeros."""

    def terms_of(chunk: Chunk) -> ElboTerms:
        images = chunk.batch.images
        return model.elbo(images, model.empty(len(images)), generator=chunk.generator)

    return score(episodes, terms_of, limit=limit, title="zeroed")


def other_episode(episodes: FixedEpisodes, episode: int) -> int | None:
    """The next episode that shares no image with this one (the wrapped last one may share)."""
    mine = set(episodes.indices[episode].tolist())
    for step in range(1, len(episodes)):
        candidate = (episode + step) % len(episodes)
        if mine.isdisjoint(episodes.indices[candidate].tolist()):
            return candidate
    return None


def partners(episodes: FixedEpisodes, limit: int) -> list[int] | None:
    """For each of the first episodes, one that shares no image with it; None if one has none."""
    found = [other_episode(episodes, e) for e in range(min(limit, len(episodes)))]
    return None if None in found else [number for number in found if number is not None]


def strangers(episodes: FixedEpisodes, chunk: Chunk, others: list[int]) -> Episode:
    """Images that a chunk's memories do not hold, as many as they do."""
    numbers = others[chunk.start : chunk.start + len(chunk.batch.images)]
    return torch.cat([episodes.batch(number, number + 1).images for number in numbers])


def other(model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score | None:
    """The next episode's memory; None where no other episode is free of shared images."""
    others = partners(episodes, limit)
    if others is None:
        return None

    def terms_of(chunk: Chunk) -> ElboTerms:
        images = strangers(episodes, chunk, others)
        memory = model.write(images, generator=chunk.generator)
        return model.elbo(chunk.batch.images, memory, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit, title="other")


def left_out(model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score | None:
    """Each image under the memory of the rest of its episode; None for episodes of one."""
    if episodes.episode_length < 2:
        return None

    def terms_of(chunk: Chunk) -> ElboTerms:
        return model.left_out(chunk.batch.images, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit, title="left out")


def permuted(model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score | None:
    """The right memory, and each image read at its neighbour's key; None for episodes of one."""
    if episodes.episode_length < 2:
        return None

    def terms_of(chunk: Chunk) -> ElboTerms:
        return model.permuted(chunk.batch.images, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit, title="permuted")


def controls(
    model: MemoryModel, episodes: FixedEpisodes, images: int = IMAGES
) -> dict[str, Score | None]:
    """All on the first episodes that hold `images` images, and the bound on the same ones:
    `own`, what each control is to be compared with."""
    limit = holding(episodes, images)
    if not model.remembers:  # there is no memory to exchange
        return {"own": bound(model, episodes, limit=limit, title="own")}
    return {
        "own": bound(model, episodes, limit=limit, title="own"),
        "left_out": left_out(model, episodes, limit),
        "other": other(model, episodes, limit),
        "zeroed": zeroed(model, episodes, limit),
        "permuted": permuted(model, episodes, limit),
    }
