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


def control(name: str, model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score | None:
    """One of the four on the first episodes. None where there is no such memory: an episode of one
    has no rest and no neighbour, and a small set no other episode that is free of shared images."""
    others = partners(episodes, limit) if name == "other" else []
    if others is None or (name in ("left_out", "permuted") and episodes.episode_length < 2):
        return None

    def terms_of(chunk: Chunk) -> ElboTerms:
        images, noise = chunk.batch.images, chunk.generator
        if name == "left_out":  # each image under the memory of the rest of its episode
            return model.left_out(images, generator=noise)
        if name == "permuted":  # the right memory, and each image read at its neighbour's key
            return model.permuted(images, generator=noise)
        if name == "other":  # the next episode's memory
            memory = model.write(strangers(episodes, chunk, others), generator=noise)
        else:  # zeroed
            memory = model.empty(len(images))
        return model.elbo(images, memory, generator=noise)

    return score(episodes, terms_of, limit=limit, title=name.replace("_", " "))


def controls(
    model: MemoryModel, episodes: FixedEpisodes, images: int = IMAGES
) -> dict[str, Score | None]:
    """All on the first episodes that hold `images` images, and the bound on the same ones:
    `own`, what each control is to be compared with."""
    limit = holding(episodes, images)
    own = {"own": bound(model, episodes, limit=limit, title="own")}
    if not model.remembers:  # there is no memory to exchange
        return dict(own)
    names = ("left_out", "other", "zeroed", "permuted")
    return own | {name: control(name, model, episodes, limit) for name in names}
