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
from kanerva.models.eight_bits import from_eight_bits
from kanerva.plain_files import read_json, write_whole

if TYPE_CHECKING:
    from kanerva.models.base import MemoryModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"
M = TypeVar("M", bound=nn.Module)  # not MemoryModel: checks at run time need an imported name

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
    """Load a model of this class from a folder or a Hub id, in evaluation mode."""
    if os.path.isdir(name):
        files = {file: Path(name) / file for file in (CONFIG, WEIGHTS)}
    else:
        files = {file: hub_file(str(name), file, **options) for file in (CONFIG, WEIGHTS)}
    config = read_config(files[CONFIG])
    weights = read_weights(files[WEIGHTS])
    with torch.device("meta"):  # a forged config must not allocate memory before weights match it
        require_fit(weights, cls(config).state_dict(), files[WEIGHTS])
    model = cls(config)
    model.load_state_dict(weights)
    return model.to(map_location).eval()


def hub_file(name: str, file: str, **options: object) -> Path:
    """Download one file of a Hub repository; return its path."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hide its warnings
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
    """Write `model.safetensors` and `config.json` into a folder. The first contains a hash of the
    second. `weights` are by default the model's own."""
    state = model.state_dict() if weights is None else weights
    config = to_dict(model.config)
    for name, value in state.items():
        require_tensor(state, name, f"cannot write {folder}", [value.dtype])
    write_tensors(folder / WEIGHTS, state, {"format": "pt", "config": _fingerprint(config)})
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _fingerprint(config: object) -> str:
    """A hash of a config as written in the file, to check that weights belong to it. Options that a
    later version adds do not change it."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def read_config(path: Path) -> ModelConfig:
    """The config a checkpoint was made with."""
    if not path.is_file():
        raise UserError(f"no checkpoint here: {path} is missing")
    return model_from_dict(read_json(path), where=str(path))


def _name_today(name: str) -> str:
    """Translate the name of a tensor of version 0.1."""
    old = "key_posterior.net."
    return "key_network.net." + name.removeprefix(old) if name.startswith(old) else name


def load_weights(model: nn.Module, path: Path) -> None:
    """Load `model.safetensors` into a model; names, shapes and config must match."""
    weights = read_weights(path)
    require_fit(weights, model.state_dict(), path)
    model.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of `model.safetensors`. A digest is required in the checkpoints of a run and
    in files that contain the hash of a config, because kanerva wrote them; others need none."""
    of_run = path.parent.parent.name == "checkpoints"
    weights, about = read_tensors(path, lambda about: of_run or "config" in about)
    if "config" in about and about["config"] != _fingerprint(read_json(path.parent / CONFIG)):
        raise UserError(f"{path} does not fit its config.json, which was altered")
    weights = from_eight_bits(weights, path)  # as shipped models have them
    return {_name_today(name): value for name, value in weights.items()}


def require_fit(weights: dict[str, Tensor], expected: dict[str, Tensor], where: object) -> None:
    """Refuse weights whose names, shapes or types do not match, or that are not finite."""
    where = f"{where} does not fit its config.json"
    for name in weights.keys() - expected.keys():
        raise UserError(f"{where}: it has an unknown tensor {name}")
    for name, value in expected.items():
        kinds = FLOATS if value.is_floating_point() else [value.dtype]
        require_tensor(weights, name, where, kinds, value.shape)
