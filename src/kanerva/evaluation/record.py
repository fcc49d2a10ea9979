"""The record of an evaluation: every figure with how it was made; and its table.

EVALUATION's rules in short: `bound` is a valid upper bound on -ln p(x|M) in nats per image, one
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
from kanerva.data.episodes import FixedEpisodes
from kanerva.errors import UserError
from kanerva.evaluation.bound import Score, bound, iwae
from kanerva.evaluation.controls import IMAGES, controls
from kanerva.models import load
from kanerva.models.base import MemoryModel
from kanerva.provenance import commit, device_name, versions
from kanerva.runs import load_split, read_run_config

SECOND_COLUMNS = {"mnist": ["threshold"], "omniglot": ["dither", "threshold"]}


def evaluate(
    run: Path,
    *,
    split: str = "test",
    episodes: int | None = None,
    iwae_samples: int = 0,
    control_images: int = IMAGES,
    data_root: Path | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Score a run's best checkpoint and return its record."""
    config = read_run_config(run)
    model = load(run, device=device)
    images = load_split(config, split, data_root)

    def fixed(binarization: Any) -> FixedEpisodes:
        return FixedEpisodes(
            images,
            episode_length=config.episode_length,
            binarization=binarization,
            device=model.device,
        )

    scored = fixed(config.data.binarization)
    limit = len(scored) if episodes is None else min(episodes, len(scored))
    headline = bound(model, scored, limit=limit, title="bound")
    paper = bound(model, scored, sample=False, limit=limit, title="paper style")
    record: dict[str, Any] = {
        "schema": 1,
        "kind": "evaluation",
        "model": config.model,
        "preset": config.preset,
        "variant": None,
        "split": split,
        "n_images": headline.n_images,
        "n_episodes": limit,
        "partial": limit < len(scored),
        "seed": config.seed,
        "T": config.episode_length,
        "K": config.memory.reads,
        "memory": memory_size(model, config),
        "z_shape": [config.readout.size],
        "binarization": config.data.binarization,
        "image": list(config.image),
        "bound": as_entry(headline, config),
        "paper_style": as_entry(paper, config),
    }
    if iwae_samples:
        nll, ci95 = iwae(model, scored, iwae_samples, limit=limit, title=f"iwae {iwae_samples}")
        record["iwae"] = {"k": iwae_samples, "nll_nats": nll, "ci95": ci95}
    tried = controls(model, scored, min(control_images, limit * config.episode_length))
    record["controls"] = {
        "n_images": max((s.n_images for s in tried.values() if s is not None), default=0),
        **{name: None if s is None else as_entry(s, config) for name, s in tried.items()},
    }
    if config.data.binarization == "sample":
        record["other_binarizations"] = {
            how: as_entry(bound(model, fixed(how), limit=limit, title=how), config)
            for how in SECOND_COLUMNS.get(config.data.set, [])
        }
    return record | training_facts(run) | {
        "params": sum(p.numel() for p in model.parameters()),
        "flop_per_image": flop_per_image(model, config),
        "split_hash": scored.fingerprint(limit),
        "config_hash": config.config_hash(),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(model.device),
        "command": "kanerva " + " ".join(sys.argv[1:]),
    }  # fmt: skip


def as_entry(score: Score, config: RunConfig) -> dict[str, float]:
    """A score as it stands in a record."""
    entry = asdict(score)
    del entry["n_images"]
    return entry | {"bits_per_dim": score.bits_per_dim(config.image)}


def memory_size(model: MemoryModel, config: RunConfig) -> dict[str, Any]:
    """Shape, and floats and bits for each image, of all that p reads of an episode."""
    shape = [config.memory.channels, config.memory.size, config.memory.size]
    floats = math.prod(shape) / config.episode_length
    return {
        "shape": shape,
        "dtype": "float32",
        "floats_per_image": floats,
        "bits_per_image": 32 * floats,
    }


def training_facts(run: Path) -> dict[str, Any]:
    """How long the run trained: images seen, seconds, and the median of its images/s."""
    facts: dict[str, Any] = {"images_seen": None, "images_per_s": None, "wall_s": None}
    state = run / "checkpoints" / "last" / "state.json"
    if state.is_file():
        saved = json.loads(state.read_text())["progress"]
        facts |= {"images_seen": saved["images_seen"], "wall_s": saved["wall_s"]}
        facts |= {"steps": saved["step"], "best_step": saved["best_step"]}
        facts |= {"skipped_steps": saved["skipped"]}
    metrics = run / "metrics.csv"
    if metrics.is_file():
        with metrics.open() as file:
            rates = [float(r["images_per_s"]) for r in csv.DictReader(file) if r["images_per_s"]]
        facts["images_per_s"] = statistics.median(rates) if rates else None
    return facts


def flop_per_image(model: MemoryModel, config: RunConfig) -> float:
    """Floating-point operations of one training pass, forward and backward, for each image."""
    episode = torch.zeros(1, config.episode_length, *config.image, device=model.device)
    counter = FlopCounterMode(display=False)
    with counter, torch.enable_grad():
        model.elbo(episode).loss.backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / config.episode_length


def record_name(record: dict[str, Any]) -> str:
    """Where a record lies under `results/`."""
    variant = f"-{record['variant']}" if record["variant"] else ""
    return f"{record['preset']}/{record['model']}{variant}-s{record['seed']}.json"


def write_record(record: dict[str, Any], path: Path) -> None:
    """As JSON, all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write record {path}: {error.strerror}") from error


def read_record(path: Path) -> dict[str, Any]:
    """The record of a run folder, or a record file."""
    file = path / "evaluation.json" if path.is_dir() else path
    if not file.is_file():
        what = f"run `kanerva evaluate {path}` first" if path.is_dir() else "no such file"
        raise UserError(f"no evaluation record at {file}: {what}")
    try:
        record = json.loads(file.read_text())
        if record["kind"] != "evaluation":
            raise UserError(f"{file} is a record of kind {record['kind']!r}, not of an evaluation")
        return record
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a record: {error}") from error


def table(record: dict[str, Any]) -> str:
    """A record as the table `kanerva evaluate` prints."""
    part = f", {record['n_episodes']} episodes only" if record["partial"] else ""
    memory = record["memory"]
    lines = [
        f"{record['model']} on {record['preset']} {record['split']} "
        f"({record['n_images']} images{part}), T={record['T']}, K={record['K']}, "
        f"pixels: {record['binarization']}",
        f"memory {'x'.join(map(str, memory['shape']))} {memory['dtype']}: "
        f"{memory['floats_per_image']:g} floats, {memory['bits_per_image']:g} bits per image "
        f"(free: not charged in any figure)",
        "",
        f"{'nats per image':<22}{'total':>9}{'recon':>9}{'KL z':>9}{'KL y':>9}{'bits/dim':>10}",
    ]

    def row(name: str, entry: dict[str, float] | None) -> None:
        if entry is None:
            lines.append(f"{name:<22}{'none':>9}")
            return
        figures = "".join(f" {entry[k]:8.2f}" for k in ("nll_nats", "recon", "kl_z", "kl_y"))
        lines.append(f"{name:<22}{figures} {entry['bits_per_dim']:9.4f}")

    row("bound", record["bound"])
    if "iwae" in record:
        lines.append(f"{'iwae_' + str(record['iwae']['k']):<22}{record['iwae']['nll_nats']:9.2f}")
    row("paper_style (no bound)", record["paper_style"])
    for how, entry in record.get("other_binarizations", {}).items():
        row(f"bound, {how}", entry)
    lines.append(f"given another memory, on {record['controls']['n_images']} images:")
    for name in ("own", "left_out", "other", "zeroed"):
        row(f"  {name}", record["controls"][name])
    lines += [
        "",
        f"bound ± {record['bound']['ci95']:.2f} (95 % over images); floor ln T = "
        f"{math.log(record['T']):.2f}",
    ]
    return "\n".join(lines)


def compare(records: list[dict[str, Any]]) -> str:
    """Records side by side, the best bound of each preset first."""
    rows = [
        ["preset", "model", "seed", "T", "bound", "± ci95", "bits/dim", "paper_style"]
        + [
            "own",
            "left_out",
            "other",
            "zeroed",
            "floats/img",
            "bits/img",
            "params",
            "img/s",
            "images",
        ]
    ]
    for r in sorted(records, key=lambda r: (r["preset"], r["bound"]["nll_nats"])):
        name = r["model"] + (f"-{r['variant']}" if r["variant"] else "")
        tried = [r["controls"][name] for name in ("own", "left_out", "other", "zeroed")]
        rows.append(
            [r["preset"], name, str(r["seed"]), str(r["T"])]
            + [f"{r['bound'][key]:.2f}" for key in ("nll_nats", "ci95")]
            + [f"{r['bound']['bits_per_dim']:.4f}", f"{r['paper_style']['nll_nats']:.2f}"]
            + ["-" if entry is None else f"{entry['nll_nats']:.2f}" for entry in tried]
            + [f"{r['memory'][key]:g}" for key in ("floats_per_image", "bits_per_image")]
            + [f"{r['params']:,}", "-" if r["images_per_s"] is None else f"{r['images_per_s']:.0f}"]
            + [f"{r['n_images']}{' (part)' if r['partial'] else ''}"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
