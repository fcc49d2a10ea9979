"""Controls: the same bound with another memory. Each is valid; a large gap shows that M is used."""

import math

import torch

from kanerva.data.episodes import FixedEpisodes
from kanerva.evaluation.bound import Chunk, Score, bound, score
from kanerva.models.base import MemoryModel
from kanerva.models.terms import ElboTerms
from kanerva.shapes import Episode

IMAGES = 1024  # default number of images scored by each control


def holding(episodes: FixedEpisodes, images: int) -> int:
    """How many episodes, from the first, contain `images` images; at most all episodes."""
    return min(math.ceil(images / episodes.episode_length), len(episodes))


def other_episode(episodes: FixedEpisodes, episode: int) -> int | None:
    """The next episode that shares no image with this one (the padded last one may share some)."""
    mine = set(episodes.indices[episode].tolist())
    for step in range(1, len(episodes)):
        candidate = (episode + step) % len(episodes)
        if mine.isdisjoint(episodes.indices[candidate].tolist()):
            return candidate
    return None


def partners(episodes: FixedEpisodes, limit: int) -> list[int] | None:
    """For each of the first episodes, another that shares no image; None if any has none."""
    others = [other_episode(episodes, e) for e in range(min(limit, len(episodes)))]
    return None if None in others else [number for number in others if number is not None]


def strangers(episodes: FixedEpisodes, chunk: Chunk, others: list[int]) -> Episode:
    """Images that are not in a chunk's memories, as many as are."""
    numbers = others[chunk.start : chunk.start + len(chunk.batch.images)]
    return torch.cat([episodes.batch(number, number + 1).images for number in numbers])


def control(name: str, model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score | None:
    """Score one of the four controls on the first episodes.

    None if there is no such memory: an episode of one image has no rest and no neighbour, and in a
    small set every other episode may share images.
    """
    others = partners(episodes, limit) if name == "other" else []
    if others is None or (name in ("left_out", "permuted") and episodes.episode_length < 2):
        return None

    def terms_of(chunk: Chunk) -> ElboTerms:
        images, noise = chunk.batch.images, chunk.generator
        if name == "left_out":  # each image with a memory of the rest of its episode
            return model.left_out(images, generator=noise)
        if name == "permuted":  # the right memory, but each image is read at its neighbour's key
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
    """Score all controls on the first episodes with `images` images, and `own`, the bound on the
    same images, to compare with."""
    limit = holding(episodes, images)
    own = {"own": bound(model, episodes, limit=limit, title="own")}
    if not model.remembers:  # there is no memory to replace
        return dict(own)
    names = ("left_out", "other", "zeroed", "permuted")
    return own | {name: control(name, model, episodes, limit) for name in names}
