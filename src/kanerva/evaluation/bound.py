"""The bound on -ln p(x|M) over fixed episodes, and the two scores printed beside it.

Noise comes from streams named by split and episode, so a score does not depend on what was scored
before it, and controls see the same noise as the bound they are compared with.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm import tqdm

from kanerva.data.episodes import EpisodeBatch, FixedEpisodes
from kanerva.models.base import MemoryModel
from kanerva.models.terms import ElboTerms
from kanerva.seeding import stream
from kanerva.shapes import Counted

CHUNK = 8  # episodes scored together; part of the protocol, because noise is drawn for a chunk
_SELDOM = 60  # seconds between words of progress where there is no terminal


@dataclass(frozen=True)
class Score:
    """Averages over counted images, in nats: an upper bound on -ln p(x|M) and its three terms."""

    nll_nats: float
    recon: float
    kl_z: float
    kl_y: float
    ci95: float  # half width of `nll_nats`, taking images as independent
    n_images: int

    def objective(self, kl_weight: float) -> float:
        """What training with this weight of the KL terms minimises: no bound, unless it is one."""
        if kl_weight == 1:
            return self.nll_nats
        return self.recon + kl_weight * (self.kl_z + self.kl_y)

    def bits_per_dim(self, image: tuple[int, int, int]) -> float:
        return self.nll_nats / (math.log(2) * math.prod(image))


class Tally:
    """Collects terms of counted images and averages them in float64."""

    def __init__(self) -> None:
        self.rows: list[Float64[Tensor, "n 3"]] = []

    def add(self, terms: ElboTerms, counted: Counted) -> None:
        rows = torch.stack([-terms.log_likelihood, terms.readout_kl, terms.key_kl], dim=-1)
        self.rows.append(rows[counted].double().cpu())

    def score(self) -> Score:
        rows = torch.cat(self.rows)
        recon, kl_z, kl_y = rows.mean(dim=0).tolist()
        spread = rows.sum(dim=1).std().item() if len(rows) > 1 else 0.0
        return Score(
            nll_nats=rows.sum(dim=1).mean().item(),
            recon=recon,
            kl_z=kl_z,
            kl_y=kl_y,
            ci95=1.96 * spread / math.sqrt(len(rows)),
            n_images=len(rows),
        )


@dataclass(frozen=True)
class Chunk:
    """Some episodes, the number of the first, and the noise to score them with."""

    start: int
    batch: EpisodeBatch
    generator: torch.Generator


def chunks(episodes: FixedEpisodes, limit: int | None, title: str | None) -> Iterator[Chunk]:
    """Episodes in order, each chunk with its own noise. A bar where there is a terminal, elsewhere
    a word each minute."""
    total = len(episodes) if limit is None else min(limit, len(episodes))
    name = f"{episodes.image_set.name}/{episodes.image_set.split}"
    delay, mininterval = (0, 0.1) if sys.stderr.isatty() else (_SELDOM, _SELDOM)
    with tqdm(
        total=total,
        desc=title,
        unit="episode",
        leave=False,
        disable=title is None,
        delay=delay,
        mininterval=mininterval,
    ) as bar:
        for start in range(0, total, CHUNK):
            stop = min(start + CHUNK, total)
            noise = stream("evaluate", name, start, device=episodes.indices.device)
            yield Chunk(start, episodes.batch(start, stop), noise)
            bar.update(stop - start)


ScoreChunk = Callable[[Chunk], ElboTerms]


@torch.no_grad()
def score(
    episodes: FixedEpisodes,
    terms_of: ScoreChunk,
    *,
    limit: int | None = None,
    title: str | None = None,
) -> Score:
    """Average `terms_of` over all episodes, or the first `limit`. No batch is ever dropped."""
    tally = Tally()
    for chunk in chunks(episodes, limit, title):
        tally.add(terms_of(chunk), chunk.batch.counted)
    return tally.score()


def bound(
    model: MemoryModel,
    episodes: FixedEpisodes,
    *,
    sample: bool = True,
    limit: int | None = None,
    title: str | None = None,
) -> Score:
    """The headline: one sample of each latent. With `sample=False`, the paper's style: posterior
    means, which is no bound."""

    def terms_of(chunk: Chunk) -> ElboTerms:
        return model.elbo(chunk.batch.images, sample=sample, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit, title=title)


def validation_score(model: MemoryModel, episodes: FixedEpisodes, limit: int) -> Score:
    """What decides which step of a training is best."""

    def terms_of(chunk: Chunk) -> ElboTerms:
        return model.validation_terms(chunk.batch.images, generator=chunk.generator)

    return score(episodes, terms_of, limit=limit)


@torch.no_grad()
def iwae(
    model: MemoryModel,
    episodes: FixedEpisodes,
    samples: int,
    *,
    limit: int | None = None,
    title: str | None = None,
) -> tuple[float, float]:
    """-ln (1/k) sum_i p(x, z_i, y_i | M) / q(z_i, y_i | X): a tighter bound, and its ci95."""
    found: list[Tensor] = []
    for chunk in chunks(episodes, limit, title):
        weights = model.log_weights(chunk.batch.images, samples, generator=chunk.generator)
        nll = math.log(samples) - torch.logsumexp(weights.double(), dim=0)
        found.append(nll[chunk.batch.counted].cpu())
    nll = torch.cat(found)
    spread = nll.std().item() if len(nll) > 1 else 0.0
    return nll.mean().item(), 1.96 * spread / math.sqrt(len(nll))


@torch.no_grad()
def memory_kl(
    model: MemoryModel,
    episodes: FixedEpisodes,
    *,
    limit: int | None = None,
    title: str | None = None,
) -> float:
    """KL[q(M|X) || p(M)] / T, averaged over counted images: what `bound` leaves uncharged."""
    found: list[Tensor] = []
    for chunk in chunks(episodes, limit, title):
        kl = model.memory_kl(chunk.batch.images, generator=chunk.generator)
        found.append(kl[chunk.batch.counted].double().cpu())
    return torch.cat(found).mean().item()
