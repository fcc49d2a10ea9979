"""The bound on -ln p(x|M) over fixed episodes, and the scores in the paper's style.

Noise comes from streams named by split and episode, so a score does not depend on what was scored
before it, and controls see the same noise as the bound they are compared with.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm import tqdm

from kanerva.data.episodes import EpisodeBatch, FixedEpisodes
from kanerva.models.base import MemoryModel
from kanerva.models.terms import ElboTerms
from kanerva.seeding import stream

CHUNK = 8  # episodes scored together; part of the protocol, because noise is sampled per chunk
_SELDOM = 60  # seconds between lines of progress if there is no terminal


@dataclass(frozen=True)
class Score:
    """Averages over counted images, in nats: an upper bound on -ln p(x|M) and its three terms."""

    nll_nats: float
    recon: float
    kl_z: float
    kl_y: float
    ci95: float  # half width of the 95 % interval of `nll_nats`
    n_images: int

    def objective(self, kl_weight: float) -> float:
        """The training objective with this weight of the KL terms; a bound only if it is 1."""
        if kl_weight == 1:
            return self.nll_nats
        return self.recon + kl_weight * (self.kl_z + self.kl_y)

    def bits_per_dim(self, image: tuple[int, int, int]) -> float:
        return self.nll_nats / (math.log(2) * math.prod(image))


@dataclass(frozen=True)
class Chunk:
    """Some episodes, the index of the first, and the generator to score them with."""

    start: int
    batch: EpisodeBatch
    generator: torch.Generator


def chunks(episodes: FixedEpisodes, limit: int | None, title: str | None) -> Iterator[Chunk]:
    """Yield episodes in order, each chunk with its own generator. Shows a progress bar on a
    terminal, otherwise a line each minute."""
    total = len(episodes) if limit is None else min(limit, len(episodes))
    name = f"{episodes.image_set.name}/{episodes.image_set.split}"
    often: dict[str, Any] = (
        {} if sys.stderr.isatty() else {"delay": _SELDOM, "mininterval": _SELDOM}
    )
    silent = title is None
    with tqdm(total=total, desc=title, unit="episode", leave=False, disable=silent, **often) as bar:
        for start in range(0, total, CHUNK):
            stop = min(start + CHUNK, total)
            noise = stream("evaluate", name, start, device=episodes.indices.device)
            yield Chunk(start, episodes.batch(start, stop), noise)
            bar.update(stop - start)


@torch.no_grad()
def gather(
    episodes: FixedEpisodes,
    values_of: Callable[[Chunk], Float[Tensor, "B T ..."]],
    limit: int | None,
    title: str | None,
) -> Float64[Tensor, "..."]:
    """Gather values of all counted images, or of those in the first `limit` episodes. No batch is
    dropped. The values are float64, for averages."""
    values = []
    for chunk in chunks(episodes, limit, title):
        values.append(values_of(chunk)[chunk.batch.counted].double().cpu())
    return torch.cat(values)


def half_width(values: Float64[Tensor, " n"]) -> float:
    """Half width of the 95 % confidence interval of a mean, with images as independent."""
    spread = values.std().item() if len(values) > 1 else 0.0
    return 1.96 * spread / math.sqrt(len(values))


def score(
    episodes: FixedEpisodes,
    terms_of: Callable[[Chunk], ElboTerms],
    *,
    limit: int | None = None,
    title: str | None = None,
) -> Score:
    """Average the terms of a bound."""

    def rows_of(chunk: Chunk) -> Tensor:
        terms = terms_of(chunk)
        return torch.stack([-terms.log_likelihood, terms.readout_kl, terms.key_kl], dim=-1)

    rows = gather(episodes, rows_of, limit, title)
    nll = rows.sum(dim=1)
    recon, kl_z, kl_y = rows.mean(dim=0).tolist()
    return Score(nll.mean().item(), recon, kl_z, kl_y, half_width(nll), len(rows))


def bound(
    model: MemoryModel,
    episodes: FixedEpisodes,
    *,
    sample: bool = True,
    limit: int | None = None,
    title: str | None = None,
) -> Score:
    """The headline bound, with one sample of each latent. With `sample=False`, the paper's style:
    posterior means, which is not a bound."""

    def terms_of(chunk: Chunk) -> ElboTerms:
        return model.elbo(chunk.batch.images, sample=sample, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit, title=title)


def kl_over_T(
    model: MemoryModel,
    episodes: FixedEpisodes,
    *,
    limit: int | None = None,
    title: str | None = None,
) -> Score:
    """A score as the paper may have computed it: posterior means, and each KL divided by T. It is
    not a bound. KL(M), which an episode shares, is added to KL z."""
    share = 1 / episodes.episode_length

    def terms_of(chunk: Chunk) -> ElboTerms:
        images = chunk.batch.images
        terms = model.elbo(images, sample=False, generator=chunk.generator)
        kl_z, kl_y = share * terms.readout_kl, share * terms.key_kl
        if model.has_memory_kl:
            kl_z = kl_z + model.memory_kl(images)
        return ElboTerms(terms.log_likelihood, kl_z, kl_y)

    return score(episodes, terms_of, limit=limit, title=title)


def validation_score(model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score:
    """The score that decides which step of a run is best."""

    def terms_of(chunk: Chunk) -> ElboTerms:
        return model.validation_terms(chunk.batch.images, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit)


def iwae(
    model: MemoryModel,
    episodes: FixedEpisodes,
    samples: int,
    *,
    limit: int | None = None,
    title: str | None = None,
) -> tuple[float, float]:
    """-ln (1/k) sum_i p(x, z_i, y_i | M) / q(z_i, y_i | X): a tighter bound, and its ci95."""

    def nll_of(chunk: Chunk) -> Tensor:
        weights = model.log_weights(chunk.batch.images, samples, generator=chunk.generator)
        return math.log(samples) - torch.logsumexp(weights.double(), dim=0)

    nll = gather(episodes, nll_of, limit, title)
    return nll.mean().item(), half_width(nll)


def memory_kl(model: MemoryModel, episodes: FixedEpisodes, limit: int, title: str) -> float:
    """KL[q(M|X) || p(M)] / T, averaged over counted images. `bound` does not include it."""

    def kl_of(chunk: Chunk) -> Tensor:
        return model.memory_kl(chunk.batch.images, generator=chunk.generator)

    return gather(episodes, kl_of, limit, title).mean().item()
