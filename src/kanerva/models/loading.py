"""Load trained models: shipped ones by name, run folders, checkpoint folders, Hub ids."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import torch

from kanerva.errors import UserError, suggest
from kanerva.inputs import as_device, as_path
from kanerva.models import model_class
from kanerva.models.base import MemoryModel
from kanerva.models.checkpoint_io import CONFIG, WEIGHTS, hub_file, read_config
from kanerva.plain_files import file_digest, read_json

if TYPE_CHECKING:
    from kanerva.models.kpp import Kpp

PRETRAINED = Path(__file__).parents[1] / "pretrained"  # a folder for each model that ships


def _checkpoint_in(run: Path) -> Path | None:
    names = ["best", ".best.old", "last", ".last.old"]  # .old: left by a save that was killed
    folders = [run, *(run / "checkpoints" / name for name in names)]
    # os.path.isfile is False for invalid names; Path.is_file may raise an error
    return next((folder for folder in folders if os.path.isfile(folder / CONFIG)), None)


def checkpoint_folder(run: Path) -> Path:
    """The best checkpoint of a run folder, else its last one; or a checkpoint folder itself."""
    folder = _checkpoint_in(run)
    if folder is None:
        raise UserError(f"no checkpoint in {run}: train with `kanerva train --run {run}`")
    return folder


def shipped_versions() -> list[str]:
    """Every model that comes with the package, with its version: `mnist-1`."""
    return sorted(file.parent.name for file in PRETRAINED.glob(f"[!.]*/{CONFIG}"))


def shipped() -> list[str]:
    """The names of shipped models without a version; each stands for the newest version."""
    return sorted({_split(name)[0] for name in shipped_versions()})


def _split(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.+)-(\d+)", name)
    return (name, 0) if found is None else (found[1], int(found[2]))


def shipped_folder(name: str | Path) -> Path | None:
    """The folder of the shipped model that a name stands for, or None: `mnist` is the newest
    version, `mnist-1` a certain one. A run with that name in the working directory takes
    precedence; other folders do not. `./NAME`, or a `Path`, is never a shipped model."""
    if isinstance(name, Path) or _checkpoint_in(Path(name)) is not None:
        return None
    versions = [v for v in shipped_versions() if name in (v, _split(v)[0])]
    newest = max(versions, key=lambda v: _split(v)[1], default=None)
    return None if newest is None else PRETRAINED / newest


def check_shipped(folder: Path) -> None:
    """Refuse a shipped model whose files differ from those that its record was made with."""
    path = folder / "evaluation.json"
    record = read_json(path)
    about = record.get("shipped") if isinstance(record, dict) else None
    digests = about.get("sha256") if isinstance(about, dict) else None
    if not isinstance(digests, dict) or not {CONFIG, WEIGHTS} <= digests.keys():
        raise UserError(f"{path} is damaged: install kanerva again")
    for file in (CONFIG, WEIGHTS, "config.yaml"):
        if digests.get(file) != file_digest(folder / file):
            raise UserError(f"{folder / file} was altered: install kanerva again")


def _hint(path: Path) -> str:
    """A hint for the error about a missing folder."""
    hint = suggest(path.name, shipped()) if len(path.parts) == 1 else ""
    if path.suffix == ".kanerva":
        hint = "`kanerva store add` makes a store; "
    hint = hint or "`kanerva train` makes one, `make demo` makes runs/demo; "
    return f"{hint}shipped models: {', '.join(shipped())}"


@overload
def load(
    name: Literal["glyphs", "mnist", "omniglot"],
    *,
    device: str | torch.device = "cpu",
    capacity: int | None = None,
) -> "Kpp": ...


@overload
def load(
    name: str | Path, *, device: str | torch.device = "cpu", capacity: int | None = None
) -> MemoryModel: ...


def load(
    name: str | Path, *, device: str | torch.device = "cpu", capacity: int | None = None
) -> MemoryModel:
    """A trained model, ready to evaluate. `name`: that of a shipped model, a run folder, a
    checkpoint folder or a Hub id. `capacity`: memories have room for at least this many images, if
    the model has blocks; the weights work for any size."""
    model = _load(name, as_device(device))
    return model if capacity is None else model.with_capacity(capacity)


def _load(name: str | Path, device: torch.device) -> MemoryModel:
    path, ours = as_path(name), shipped_folder(name)
    path = path if ours is None else ours
    if ours is not None:
        check_shipped(ours)
    local = len(path.parts) != 2 or path.parts[0] == "runs" or os.path.isdir(path.parent)
    if local:  # a Hub id is owner/name
        if not os.path.isdir(path):
            raise UserError(f"no run folder at {path} (looked in {Path.cwd()}); {_hint(path)}")
        folder = checkpoint_folder(path)
        model = model_class(read_config(folder / CONFIG).name)
        return model.from_pretrained(folder, map_location=device)
    config = read_config(hub_file(str(name), CONFIG))
    return model_class(config.name).from_pretrained(str(name), map_location=device)
