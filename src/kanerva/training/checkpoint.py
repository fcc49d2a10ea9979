"""Checkpoints that survive kill -9: written under another name, synced, renamed into place.

A checkpoint is a folder: `model.safetensors` and `config.json`; a resumable one also has
`optimizer.safetensors` and `state.json`. `state.json` holds the SHA-256 of the other files, so that
a truncated or altered file is noticed before training continues.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kanerva.config import coerce
from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors
from kanerva.models.base import MemoryModel
from kanerva.models.checkpoint_io import CONFIG, WEIGHTS, load_weights, save_weights
from kanerva.plain_files import file_digest, read_sealed, reason, sealed, sync, write_whole

OPTIMIZER, STATE = "optimizer.safetensors", "state.json"


@dataclass
class Progress:
    """A run's progress. Everything else about the next step follows from (seed, step)."""

    step: int = 0
    best_nll: float | None = None  # validation objective of the best checkpoint, nats per image
    best_step: int = 0
    skipped: int = 0  # steps left out because their numbers were not finite
    metrics_bytes: int = 0  # length of metrics.csv at the save; later rows are cut on resume
    images_seen: int = 0
    wall_s: float = 0.0


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def _remove(folder: Path) -> None:
    """Remove a file or folder if it exists. Of a link only the link is removed."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill, then move it to the place of `folder`.

    `recover` finishes a move that a kill interrupted. A write error, such as a full disk, becomes a
    `UserError`.
    """
    temporary = _temporary(folder)
    try:
        _remove(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        _remove(_old(folder))
        if os.path.lexists(folder):
            os.rename(folder, _old(folder))
        os.rename(temporary, folder)
        sync(folder.parent)
        _remove(_old(folder))
    except (OSError, UserError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot save checkpoint {folder}: {reason(error)}") from error


def recover(folder: Path) -> None:
    """Restore the previous checkpoint after a kill between two renames, and remove what an
    interrupted save left behind."""
    if not folder.exists() and _old(folder).exists():
        os.rename(_old(folder), folder)
    _remove(_old(folder))
    _remove(_temporary(folder))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimiser state by parameter number and name, as plain tensors."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().cpu().contiguous()
        for index, entries in state.items()
        for name, value in entries.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`. Groups and their options come from the config."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            entries[name] = _laid_out_like(parameter, value)


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Move `value` to the parameter's device and memory format (such as channels-last): fused
    optimisers read both with the same strides."""
    if value.ndim == 0:
        return value.to(parameter.device)
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def weights_of(model: MemoryModel) -> dict[str, Tensor]:
    """A model's tensors, without gradients."""
    return {name: value.detach() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class RunState:
    """All tensors of a run at one step."""

    weights: dict[str, Tensor]
    rest: dict[str, Tensor]  # of the optimiser and the weight average


def run_state(
    model: MemoryModel, optimizer: torch.optim.Optimizer, average: MemoryModel | None
) -> RunState:
    """Gather the tensors that `save_last` writes."""
    rest = {f"optimizer.{k}": v for k, v in optimizer_tensors(optimizer).items()}
    if average is not None:
        rest |= {f"average.{k}": v for k, v in weights_of(average).items()}
    return RunState(weights_of(model), rest)


def save_best(folder: Path, model: MemoryModel) -> None:
    """Weights and config only: what evaluation and users load."""
    with _replacing(folder) as temporary:
        save_weights(model, temporary)


def save_last(
    folder: Path, model: MemoryModel, state: RunState, progress: Progress, about: dict[str, Any]
) -> None:
    """Save everything a run needs to resume as if it had never stopped."""
    with _replacing(folder) as temporary:
        save_weights(model, temporary, state.weights)
        write_tensors(temporary / OPTIMIZER, state.rest, {"format": "pt"})
        digests = {name: file_digest(temporary / name) for name in (WEIGHTS, CONFIG, OPTIMIZER)}
        content = sealed({"progress": asdict(progress), "sha256": digests, "about": about})
        write_whole(temporary / STATE, json.dumps(content, indent=2) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """Read `state.json` of a resumable checkpoint; refuse it if it was altered."""
    path = folder / STATE
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} is missing")
    state = read_sealed(path)
    progress, digests = state.get("progress"), state.get("sha256")
    known = {f.name for f in fields(Progress)}
    if not isinstance(progress, dict) or set(progress) != known or not isinstance(digests, dict):
        raise UserError(f"{path} is not the state of a run")
    coerce(Progress, progress, str(path))
    return state


def restore(
    folder: Path,
    model: MemoryModel,
    optimizer: torch.optim.Optimizer,
    average: MemoryModel | None,
) -> Progress:
    """Load what `save_last` wrote into a model and optimiser built from the same config. The files
    are first checked against the digests in `state.json`."""
    saved = read_state(folder)
    for name in (WEIGHTS, CONFIG, OPTIMIZER):
        digest = saved["sha256"].get(name)
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            raise UserError(f"{folder / name} is truncated or was altered after it was saved")
    load_weights(model, folder / WEIGHTS)
    tensors, _ = read_tensors(folder / OPTIMIZER)

    def part(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    restore_optimizer(optimizer, part("optimizer."))
    if average is not None:
        average.load_state_dict(part("average."))
    return Progress(**saved["progress"])
