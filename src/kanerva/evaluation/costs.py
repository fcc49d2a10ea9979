"""What a model costs: floats and bits of memory, operations, and its training time."""

import copy
import csv
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from kanerva.config import RunConfig
from kanerva.data.episodes import FixedEpisodes
from kanerva.errors import UserError
from kanerva.evaluation.bound import Chunk, Score, score
from kanerva.models.base import MemoryModel
from kanerva.models.kpp_bits import KppBits
from kanerva.models.terms import ElboTerms
from kanerva.plain_files import read_sealed
from kanerva.seeding import stream


def memory_size(model: MemoryModel, length: int, dtype: str = "float32") -> dict[str, Any]:
    """The size of all that p reads of an episode of T images: shape, floats and bits per image."""
    shape = model.memory_shape(length)
    return {
        "shape": list(shape),
        "dtype": dtype,
        "floats_per_image": math.prod(shape) / length,
        "bits_per_image": model.memory_bits(length, dtype) / length,
    }


def score_and_size(
    model: KppBits, episodes: FixedEpisodes, limit: int, title: str
) -> tuple[Score, float]:
    """Return the bound, and the bits per image of all that p reads in the memories' files.

    Bits are those of whole episodes: gists, detail, caps, the end of the stream. A file's header of
    128 bytes and the handles do not count, because p does not read them.
    """
    total = 0

    def terms_of(chunk: Chunk) -> ElboTerms:
        nonlocal total
        images = chunk.batch.images
        memory = model.write(images, generator=chunk.generator)
        total += sum(8 * len(memory[b].as_container().stream) for b in range(len(images)))
        handles = torch.arange(images.shape[1], device=model.device).expand(len(images), -1)
        return model.elbo(images, memory, handles=handles, generator=chunk.generator)

    result = score(episodes, terms_of, limit=limit, title=title)
    return result, total / (min(limit, len(episodes)) * episodes.episode_length)


def flop_per_image(model: MemoryModel, config: RunConfig) -> float:
    """Floating-point operations per image of one training pass, forward and backward. They are
    counted on a copy of the model, without touching the global generator."""
    model = copy.deepcopy(model)
    episode = torch.zeros(1, config.episode_length, *config.model.image, device=model.device)
    counter = FlopCounterMode(display=False)
    with counter, torch.enable_grad():
        outputs = model(episode, stream("flop", device=model.device))
        auxiliary = outputs.pop("auxiliary", torch.zeros((), device=model.device))
        (ElboTerms(**outputs).loss + auxiliary).backward()
    return counter.get_total_flops() / config.episode_length


def gather_training_facts(run: Path) -> dict[str, Any]:
    """How long the run trained: images seen, seconds, and the median images/s. None for weights
    without their run."""
    last, log = run / "checkpoints" / "last", run / "metrics.csv"
    if not (last / "state.json").is_file():
        return {"images_seen": None, "images_per_s": None, "wall_s": None}
    try:
        saved = read_sealed(last / "state.json")["progress"]
        return {
            "images_seen": saved["images_seen"],
            "images_per_s": _median_rate(log) if log.is_file() else None,
            "wall_s": saved["wall_s"],
            "steps": saved["step"],
            "best_step": saved["best_step"],
            "skipped_steps": saved["skipped"],
        }
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, OSError, csv.Error) as error:
        raise UserError(f"{run}: state.json or metrics.csv is damaged: {error!r}") from error


def _median_rate(log: Path) -> float | None:
    with log.open() as file:
        rates = [float(r["images_per_s"]) for r in csv.DictReader(file) if r["images_per_s"]]
    return statistics.median(rates) if rates else None
