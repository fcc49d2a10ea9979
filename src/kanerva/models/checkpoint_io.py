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
from kanerva.files import read_tensors, write_tensors

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
    model = cls(read_config(files[CONFIG]))
    load_weights(model, files[WEIGHTS])
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
    write_tensors(folder / WEIGHTS, state, {"format": "pt", "config": _fingerprint(config)})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _fingerprint(config: object) -> str:
    """A hash of a config as it is written, by which weights recognise theirs: options that a later
    version adds do not count."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def read_config(path: Path) -> ModelConfig:
    """The config a checkpoint was made with."""
    if not path.is_file():
        raise UserError(f"no checkpoint here: {path} is missing")
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is damaged or unreadable: {error}") from error
    return model_from_dict(data, where=str(path))


_RENAMED = {"key_posterior.net.": "key_network.net.", "placer.": "placement."}  # since 0.1


def _name_today(name: str) -> str:
    """A tensor of version 0.1 by the name it has today."""
    for old, new in _RENAMED.items():
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model from `model.safetensors`; names, shapes and config must be those it had."""
    state, about = read_tensors(path)
    state = {_name_today(name): value for name, value in state.items()}
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ state.keys()):
        side = "lacks" if name in expected else "has an unknown tensor"
        raise UserError(f"{path} does not fit its config.json: it {side} {name}")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{path} does not fit its config.json: {name} is {tuple(value.shape)}, "
                f"not {tuple(expected[name].shape)}"
            )
    written = json.loads((path.parent / CONFIG).read_text())
    if about.get("config", _fingerprint(written)) != _fingerprint(written):
        raise UserError(f"{path} does not fit its config.json, which was altered")
    model.load_state_dict(state)
