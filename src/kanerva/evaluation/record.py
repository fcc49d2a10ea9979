"""The record of an evaluation: every figure with how it was made.

The rules in short: `bound` is a valid upper bound on -ln p(x|M) in nats per image, one
sample of each latent; `paper_style` decodes posterior means and is no bound; controls are bounds
given another memory; the memory is free, so its size stands beside every figure.
"""

import csv
import json
import math
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from kanerva.config import RunConfig
from kanerva.data import Binarization
from kanerva.errors import NumbersWentBad, UserError
from kanerva.evaluation.bound import Score, bound, iwae, memory_kl
from kanerva.evaluation.controls import IMAGES, controls
from kanerva.evaluation.resized import Elsewhere
from kanerva.evaluation.uses import familiarity, generation, like_beside_like
from kanerva.models import Kpp, checkpoint_folder
from kanerva.models.base import ElboTerms, MemoryModel
from kanerva.provenance import command, commit, device_name, versions
from kanerva.runs import fixed_episodes, load_split, read_run_config

SECOND_COLUMNS: dict[str, list[Binarization]] = {
    "mnist": ["threshold"],
    "omniglot": ["dither", "threshold"],
}


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
    elsewhere: Elsewhere | None = None,
    data_root: Path | None = None,
) -> dict[str, Any]:
    """Score a run's best checkpoint, `model`, and return its record.

    `memory_dtype` rounds every memory after it was written; `elsewhere` scores the same weights
    in a memory of another size.
    """
    config, facts = read_run_config(run), training_facts(run)
    if model.config != config.model_config():
        raise UserError(f"{run / 'config.yaml'} does not describe the checkpoint: one was altered")
    own = (config.episode_length, config.memory)
    if elsewhere is not None:
        config, model = elsewhere.moved(config, model)
    model.memory_dtype, kept = memory_dtype, model.memory_dtype
    images = load_split(config, split, data_root)
    scored = fixed_episodes(config, images, model.device)
    limit = len(scored) if episodes is None else min(episodes, len(scored))
    headline = bound(model, scored, limit=limit, title="bound")
    if not math.isfinite(headline.nll_nats):
        raise NumbersWentBad(f"{run}: the bound is {headline.nll_nats}")
    paper = bound(model, scored, sample=False, limit=limit, title="paper style")
    record: dict[str, Any] = {
        "schema": 1,
        "kind": "evaluation",
        "model": config.model,
        "preset": config.preset,
        "data": config.data.set,
        "variant": variant or config.variant,
        "checkpoint": checkpoint_folder(run).name.removeprefix(".").removesuffix(".old"),
        "split": split,
        "n_images": headline.n_images,
        "n_episodes": limit,
        "partial": limit < len(scored),
        "seed": config.seed,
        "T": config.episode_length,
        "K": config.memory.reads,
        "memory": memory_size(model, config.episode_length, memory_dtype),
        "elsewhere": (config.episode_length, config.memory) != own,
        "z_shape": z_shape(config, model),
        "binarization": config.data.binarization,
        "image": list(config.image),
        "bound": as_entry(headline, config),
        "paper_style": as_entry(paper, config),
    }
    if model.has_memory_kl:
        kl_m = memory_kl(model, scored, limit=limit, title="KL(M)")
        full = headline.nll_nats + kl_m  # bounds -ln p(X) / T: the memory is charged
        record["bound"]["kl_m"] = kl_m
        record["full_bound"] = {
            "nll_nats": full,
            "bits_per_dim": full / (math.log(2) * math.prod(config.image)),
        }
    if iwae_samples:
        nll, ci95 = iwae(model, scored, iwae_samples, limit=limit, title=f"iwae {iwae_samples}")
        record["iwae"] = {"k": iwae_samples, "nll_nats": nll, "ci95": ci95}
    tried = controls(model, scored, min(control_images, limit * config.episode_length))
    record["controls"] = {
        "n_images": max((s.n_images for s in tried.values() if s is not None), default=0),
        **{name: None if s is None else as_entry(s, config) for name, s in tried.items()},
    }
    if isinstance(model, Kpp):
        count = min(control_images, limit * config.episode_length)
        record["familiarity"] = familiarity(model, scored, count)
        record["places"] = like_beside_like(model, scored, count)
        record["generation"] = generation(model, scored, count)
    if config.data.binarization == "sample":
        record["other_binarizations"] = {}
        for how in SECOND_COLUMNS.get(config.data.set, []):
            second = fixed_episodes(config, images, model.device, how)
            found = bound(model, second, limit=limit, title=how)
            record["other_binarizations"][how] = as_entry(found, config)
    flop = flop_per_image(model, config)
    model.memory_dtype = kept
    return record | facts | {
        "params": sum(p.numel() for p in model.parameters()),
        "flop_per_image": flop,
        "split_hash": scored.fingerprint(limit),
        "config_hash": config.config_hash(),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(model.device),
        "command": command(sys.argv[1:]),
    }  # fmt: skip


def as_entry(score: Score, config: RunConfig) -> dict[str, float]:
    """A score as it stands in a record."""
    entry = asdict(score)
    del entry["n_images"]
    return entry | {"bits_per_dim": score.bits_per_dim(config.image)}


def memory_size(model: MemoryModel, length: int, dtype: str = "float32") -> dict[str, Any]:
    """Shape, and floats and bits for each image, of all that p reads of an episode of T images."""
    shape = model.memory_shape(length)
    return {
        "shape": list(shape),
        "dtype": dtype,
        "floats_per_image": math.prod(shape) / length,
        "bits_per_image": model.memory_bits(length, dtype) / length,
    }


def z_shape(config: RunConfig, model: MemoryModel) -> list[Any]:
    """Numbers of the readout; of each of its parts where it has several."""
    if not isinstance(model, Kpp):
        return [config.readout.size]
    parts = [list(shape) for shape in model.readout.shapes.values()]
    return parts if len(parts) > 1 else parts[0]


def training_facts(run: Path) -> dict[str, Any]:
    """How long the run trained: images seen, seconds, and the median of its images/s."""
    facts: dict[str, Any] = {"images_seen": None, "images_per_s": None, "wall_s": None}
    last = run / "checkpoints" / "last"
    try:
        saved = json.loads((last / "state.json").read_text())["progress"]
        log, rates = run / "metrics.csv", []
        if log.is_file():  # weights may come without it
            with log.open() as file:
                rates = [
                    float(r["images_per_s"]) for r in csv.DictReader(file) if r["images_per_s"]
                ]
    except FileNotFoundError:  # or without their run
        return facts
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{run}: state.json or metrics.csv is damaged: {error!r}") from error
    return {
        "images_seen": saved["images_seen"],
        "images_per_s": statistics.median(rates) if rates else None,
        "wall_s": saved["wall_s"],
        "steps": saved["step"],
        "best_step": saved["best_step"],
        "skipped_steps": saved["skipped"],
    }


def flop_per_image(model: MemoryModel, config: RunConfig) -> float:
    """Floating-point operations of one training pass, forward and backward, for each image."""
    episode = torch.zeros(1, config.episode_length, *config.image, device=model.device)
    counter = FlopCounterMode(display=False)
    with counter, torch.enable_grad():
        outputs = model(episode)
        beside = outputs.pop("auxiliary", torch.zeros((), device=model.device))
        (ElboTerms(**outputs).loss + beside).backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / config.episode_length


def record_name(record: dict[str, Any]) -> str:
    """Where a record lies under `results/`."""
    variant = f"-{record['variant']}" if record["variant"] else ""
    split = "" if record["split"] == "test" else f"-{record['split']}"
    return f"{record['preset']}/{record['model']}{variant}-s{record['seed']}{split}.json"


def run_record_name(record: dict[str, Any]) -> str:
    """What a record is called in its run folder: a quick look, fewer bits or another memory never
    replace the full figure."""
    split = "" if record["split"] == "test" else f"-{record['split']}"
    memory = record["memory"]
    other = "" if memory["dtype"] == "float32" else f"-{memory['dtype']}"
    if record["elsewhere"]:
        other += f"-T{record['T']}-side{memory['shape'][-1]}"
    return f"evaluation{split}{other}{'-partial' if record['partial'] else ''}.json"


def file_record(record: dict[str, Any], results: Path) -> Path:
    """File a record under `results/`, unless another configuration's or a fuller one is there."""
    path = results / record_name(record)
    if path.exists():
        there = read_record(path)
        if there["config_hash"] != record["config_hash"]:
            raise UserError(f"{path} is of another configuration: give this one a --variant name")
        if there["memory"] != record["memory"]:
            raise UserError(f"{path} is of another memory: give this one a --variant name")
        if record["partial"] and not there["partial"]:
            raise UserError(f"{path} is of the whole split; a part does not replace it")
    write_record(record, path)
    return path


def write_record(record: dict[str, Any], path: Path) -> None:
    """As JSON, all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write record {path}: {error.strerror}") from error


NEEDED = {"model", "preset", "split", "bound", "paper_style", "controls", "memory", "config_hash"}


def read_record(path: Path) -> dict[str, Any]:
    """The record of a run folder (of the whole test set, if it is there), or a record file."""
    files = [path]
    if path.is_dir():
        files = [path / f"evaluation{part}.json" for part in ("", "-partial")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        what = f"run `kanerva evaluate {path}` first" if path.is_dir() else "no such file"
        raise UserError(f"no evaluation record at {files[0]}: {what}")
    try:
        record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} is not a record: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != "evaluation":
        raise UserError(f"{file} is not the record of an evaluation")
    if missing := NEEDED - record.keys():
        raise UserError(f"{file} is not a whole record: it lacks {', '.join(sorted(missing))}")
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """The record of a run folder or a file; of another folder all records in it."""
    if path.is_dir() and not any(path.glob("evaluation*.json")) and any(path.glob("*.json")):
        return [read_record(file) for file in sorted(path.glob("*.json"))]
    return [read_record(path)]
