"""Score a run and make its record: every figure, and how it was made.

The rules in short: `bound` is a valid upper bound on -ln p(x|M) in nats per image, with one sample
of each latent. `paper_style` decodes posterior means and is not a bound. Controls are bounds with
another memory. No bound charges for the memory, so each states its size.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from kanerva.config import RunConfig, flatten, to_dict
from kanerva.data.episodes import FixedEpisodes
from kanerva.data.image_set import ImageSet
from kanerva.data.registry import Binarization
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.errors import NumbersWentBad, UserError
from kanerva.evaluation.bound import Score, bound, iwae, kl_over_T, memory_kl
from kanerva.evaluation.controls import IMAGES, controls
from kanerva.evaluation.costs import (
    flop_per_image,
    gather_training_facts,
    memory_size,
    score_and_size,
)
from kanerva.evaluation.records import SCHEMA, check_record, make_folder, place_record
from kanerva.evaluation.resized import ResizedMemory
from kanerva.evaluation.uses import measure_familiarity, measure_generation
from kanerva.memory.detail import ALL
from kanerva.models.base import MemoryModel
from kanerva.models.kpp import Kpp
from kanerva.models.kpp_bits import KppBits
from kanerva.models.loading import checkpoint_folder
from kanerva.plain_files import require_name
from kanerva.provenance import command, commit, device_name, versions
from kanerva.runs import read_run_config

SECOND_COLUMNS: dict[str, list[Binarization]] = {
    "mnist": ["threshold"],
    "omniglot": ["dither", "threshold"],
}
Entry = dict[str, Any]


def evaluate(
    run: Path,
    model: MemoryModel,
    *,
    split: str = "test",
    episodes: int | None = None,
    iwae_samples: int = 0,
    control_images: int = IMAGES,
    variant: str | None = None,
    memory_dtype: str = "float32",
    bits: int | None = None,
    resized: ResizedMemory | None = None,
    data_root: Path | None = None,
    results: Path | None = None,
) -> Entry:
    """Score a run's best checkpoint, `model`, and return its record. If it could not be saved under
    `results`, that is an error before anything is scored.

    `memory_dtype` quantises every memory after it is written, `bits` shrinks it, and `resized`
    scores the same weights with a memory of another size. Neither the model nor torch's global
    generator is changed.
    """
    require_name(variant or "none", "--variant")
    trained, facts = read_run_config(run), gather_training_facts(run)
    if model.config != trained.model:
        raise UserError(f"{run / 'config.yaml'} does not describe the checkpoint: one was altered")
    config = trained
    if resized is not None:
        config, model = resized.apply(trained, model)
    if bits is not None:
        if not model.has_code:
            raise UserError(f"{model.config.name} holds floats: --bits is for kpp-bits")
        model = cast(KppBits, model).within(bits)
    subject = Subject(config, model.storing_as(memory_dtype), split, episodes, data_root)
    about = describe(subject, run, variant)
    if results is not None:
        make_folder(place_record(about, results).parent)
    headline, bits_per_image = score_headline(subject, run)
    readout = model.readout_shapes
    record = {
        "schema": SCHEMA,
        "kind": "evaluation",
        **about,
        "n_images": headline.n_images,
        "memory": add_sum(about["memory"], headline, bits_per_image, config.model.image),
        "resized": config != trained,
        "z_shape": readout if len(readout) > 1 else readout[0],
        **score_bounds(subject, headline, iwae_samples),
        **score_controls(subject, control_images),
        **measure_uses(subject, control_images),
        **facts,
        "params": sum(p.numel() for p in model.parameters()),
        "flop_per_image": flop_per_image(model, config),
        "config": to_dict(config),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(model.device),
        "command": command(sys.argv[1:]),
    }
    check_record(record, f"the record of {run}")
    return record


class Subject:
    """What is scored: a model with its run's config, on the first episodes of a split."""

    def __init__(
        self,
        config: RunConfig,
        model: MemoryModel,
        split: str,
        episodes: int | None,
        data_root: Path | None,
    ) -> None:
        self.config, self.model, self.split = config, model, split
        self.images: ImageSet = load_split(config, split, data_root)
        self.episodes: FixedEpisodes = fixed_episodes(config, self.images, model.device)
        total = len(self.episodes)
        self.limit = total if episodes is None else min(episodes, total)
        self.partial = self.limit < total

    def at_most(self, images: int) -> int:
        """`images`, but at most as many as are scored at all."""
        return min(images, self.limit * self.config.episode_length)

    def bound(
        self, title: str, episodes: FixedEpisodes | None = None, sample: bool = True
    ) -> Score:
        chosen = self.episodes if episodes is None else episodes
        return bound(self.model, chosen, sample=sample, limit=self.limit, title=title)

    def entry(self, score: Score) -> Entry:
        """Convert a score to an entry of a record."""
        entry = asdict(score)
        del entry["n_images"]
        return entry | {"bits_per_dim": score.bits_per_dim(self.config.model.image)}

    def total(self, nats: float) -> Entry:
        """An entry with the total of a score only."""
        pixels = math.prod(self.config.model.image)
        return {"nll_nats": nats, "bits_per_dim": nats / (math.log(2) * pixels)}


# Scores


def score_headline(subject: Subject, run: Path) -> tuple[Score, float | None]:
    """Compute the bound, and for blocks of bits also the bits written. A bound that is not finite
    is an error."""
    model, bits = subject.model, None
    if model.has_code:
        coded = cast(KppBits, model)
        result, bits = score_and_size(coded, subject.episodes, subject.limit, "bound")
    else:
        result = subject.bound("bound")
    if not math.isfinite(result.nll_nats):
        raise NumbersWentBad(f"{run}: the bound is {result.nll_nats}")
    return result, bits


def score_bounds(subject: Subject, headline: Score, iwae_samples: int) -> Entry:
    """Entries of the bound and of all other scores that apply to such a run."""
    config, model, limit = subject.config, subject.model, subject.limit
    entries = {"bound": subject.entry(headline)}
    if model.has_memory_kl:  # a distribution over memories: a full bound, on -ln p(X) / T
        kl_m = memory_kl(model, subject.episodes, limit, "KL(M)")
        entries["bound"]["kl_m"] = kl_m
        entries["full_bound"] = subject.total(headline.nll_nats + kl_m)
    # not a bound, except for a model without sampling, where it is the same number
    at_means = headline if model.is_exact else subject.bound("paper style", sample=False)
    entries["paper_style"] = subject.entry(at_means)
    if config.optim.kl_weight == "1/T":  # not a bound either: KL divided by T, as in training
        likely = kl_over_T(model, subject.episodes, limit=limit, title="KL over T")
        entries["kl_over_T"] = subject.total(likely.nll_nats) | {"ci95": likely.ci95}
    if iwae_samples:
        k, title = iwae_samples, f"iwae {iwae_samples}"
        nll, ci95 = iwae(model, subject.episodes, k, limit=limit, title=title)
        entries["iwae"] = {"k": k, "nll_nats": nll, "ci95": ci95}
    # Other published binarizations. A model of bits stores all pixels, whatever they are: its bound
    # is the cost of the key.
    if config.data.binarization == "sample" and not model.has_code:
        others = entries["other_binarizations"] = {}
        for how in SECOND_COLUMNS.get(config.data.set, []):
            episodes = fixed_episodes(config, subject.images, model.device, how)
            others[how] = subject.entry(subject.bound(how, episodes))
    return entries


def score_controls(subject: Subject, images: int) -> Entry:
    """Entries of the controls: bounds with another memory."""
    tried = controls(subject.model, subject.episodes, subject.at_most(images))
    count = max((s.n_images for s in tried.values() if s is not None), default=0)
    entries = {k: None if s is None else subject.entry(s) for k, s in tried.items()}
    return {"controls": {"n_images": count, **entries}}


def measure_uses(subject: Subject, images: int) -> Entry:
    """Measure the uses of a memory of blocks; empty for a model without blocks."""
    if not subject.model.has_blocks:
        return {}
    model, episodes = cast(Kpp, subject.model), subject.episodes
    count = subject.at_most(images)
    return {
        "familiarity": measure_familiarity(model, episodes, count),
        "generation": measure_generation(model, episodes, count),
    }


# What was scored, and how


def describe(subject: Subject, run: Path, variant: str | None) -> Entry:
    """Entries that name the run, its memory, and the images, with a hash of their pixels."""
    config = subject.config
    return {
        "model": config.model.name,
        "preset": config.preset,
        "data": config.data.set,
        "variant": variant or config.variant,
        "checkpoint": checkpoint_folder(run).name.removeprefix(".").removesuffix(".old"),
        "seed": config.seed,
        "split": subject.split,
        "n_episodes": subject.limit,
        "partial": subject.partial,
        "split_hash": subject.episodes.fingerprint(subject.limit),
        "T": config.episode_length,
        "K": count_reads(config),
        "binarization": config.data.binarization,
        "image": list(config.model.image),
        "config_hash": config.config_hash(),
        "memory": describe_memory(subject.model, config.episode_length),
    }


def describe_memory(model: MemoryModel, length: int) -> Entry:
    """The memory's size. Bits of coded blocks are known when they are written."""
    size = memory_size(model, length, model.memory_dtype)
    if model.has_code:
        cap = cast(KppBits, model).cap
        size |= {"dtype": "bits", "cap": None if cap == ALL else cap}
    return size


def add_sum(size: Entry, headline: Score, bits: float | None, image: tuple[int, int, int]) -> Entry:
    """The memory's size with the bits that were written, if it is a code, and its sum with the
    bound."""
    if bits is not None:
        size = size | {"bits_per_image": bits}
    bits_per_dim = size["bits_per_image"] / math.prod(image)
    both = bits_per_dim + headline.bits_per_dim(image)
    return size | {"bits_per_dim": bits_per_dim, "sum_bits_per_dim": both}


def count_reads(config: RunConfig) -> int:
    """K, reads per image; one for models without that option."""
    options = flatten(to_dict(config.model))
    return options.get("memory.reads", options.get("rows.heads", 1))
