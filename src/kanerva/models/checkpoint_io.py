"""Weights as plain files: `model.safetensors` and `config.json`, in a folder or on the Hub."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from kanerva.config import ModelConfig, model_from_dict, to_dict
from kanerva.errors import UserError
from kanerva.files import FLOATS, read_tensors, require_tensor, write_tensors
from kanerva.plain_files import read_json, write_whole

if TYPE_CHECKING:
    from kanerva.models.base import MemoryModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"
M = TypeVar("M", bound=nn.Module)  # a name known here: checks at run time look it up

CARD = """---
{{ card_data }}
---

A generative memory model, written with the Python package `kanerva`.

    import kanerva
    model = kanerva.load("OWNER/NAME")          # this repository's id, or a folder with its files
    memory = model.write(images)                # (T, C, H, W) on [0, 1]
    recalled = model.recall(memory, images)

`config.json` holds its sizes. Say here what it was trained on, and quote the record of
`kanerva evaluate` with its protocol.
"""


def load_pretrained(
    cls: type[M], name: str | Path, map_location: str | torch.device, **options: object
) -> M:
    """A model of this class from a folder or a Hub id, in evaluation mode."""
    if os.path.isdir(name):
        files = {file: Path(name) / file for file in (CONFIG, WEIGHTS)}
    else:
        files = {file: hub_file(str(name), file, **options) for file in (CONFIG, WEIGHTS)}
    config = read_config(files[CONFIG])
    weights = read_weights(files[WEIGHTS])
    with torch.device("meta"):  # sizes that a config claims take memory only once weights have them
        require_fit(weights, cls(config).state_dict(), files[WEIGHTS])
    model = cls(config)
    model.load_state_dict(weights)
    return model.to(map_location).eval()


def hub_file(name: str, file: str, **options: object) -> Path:
    """One file of a Hub repository."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are not our words
    try:
        return Path(hf_hub_download(name, file, **options))  # pyright: ignore
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{name!r} is neither a run folder nor reachable as a Hub id: {first}"
        ) from error


def save_weights(
    model: "MemoryModel", folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write `model.safetensors` and `config.json` into a folder; the first knows the second.
    `weights` are the model's own, unless given."""
    state = model.state_dict() if weights is None else weights
    config = to_dict(model.config)
    for name, value in state.items():
        require_tensor(state, name, f"cannot write {folder}", [value.dtype])
    write_tensors(folder / WEIGHTS, state, {"format": "pt", "config": _fingerprint(config)})
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _fingerprint(config: object) -> str:
    """A hash of a config as it is written, by which weights recognise theirs: options that a later
    version adds do not count."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def read_config(path: Path) -> ModelConfig:
    """The config a checkpoint was made with."""
    if not path.is_file():
        raise UserError(f"no checkpoint here: {path} is missing")
    return model_from_dict(read_json(path), where=str(path))


_RENAMED = {"key_posterior.net.": "key_network.net.", "placer.": "placement."}  # since 0.1


def _name_today(name: str) -> str:
    """A tensor of version 0.1 by the name it has today."""
    for old, new in _RENAMED.items():
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model from `model.safetensors`; names, shapes and config must be those it had."""
    weights = read_weights(path)
    require_fit(weights, model.state_dict(), path)
    model.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`. In a run's checkpoints, and where they name their config,
    they are ours and have a digest; from elsewhere they need not."""
    of_run = path.parent.parent.name == "checkpoints"
    weights, about = read_tensors(path, lambda about: of_run or "config" in about)
    if "config" in about and about["config"] != _fingerprint(read_json(path.parent / CONFIG)):
        raise UserError(f"{path} does not fit its config.json, which was altered")
    return {_name_today(name): value for name, value in weights.items()}


def require_fit(weights: dict[str, Tensor], expected: dict[str, Tensor], where: object) -> None:
    """Refuse weights of other names, shapes or types than a model's, or that are not finite."""
    where = f"{where} does not fit its config.json"
    for name in weights.keys() - expected.keys():
        raise UserError(f"{where}: it has an unknown tensor {name}")
    for name, value in expected.items():
        kinds = FLOATS if value.is_floating_point() else [value.dtype]
        require_tensor(weights, name, where, kinds, value.shape)
