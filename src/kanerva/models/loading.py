"""Trained models by name: those that ship, run folders, checkpoint folders, Hub ids."""

import re
from pathlib import Path

import torch

from kanerva.errors import UserError
from kanerva.models import model_class
from kanerva.models.base import MemoryModel
from kanerva.models.checkpoint_io import CONFIG, hub_file, read_config

PRETRAINED = Path(__file__).parents[1] / "pretrained"  # a folder for each model that ships


def _checkpoint_in(run: Path) -> Path | None:
    names = ["best", ".best.old", "last", ".last.old"]  # old: a save was killed half way
    folders = [run, *(run / "checkpoints" / name for name in names)]
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def checkpoint_folder(run: Path) -> Path:
    """A run folder's best checkpoint, else its last; a checkpoint folder is itself."""
    folder = _checkpoint_in(run)
    if folder is None:
        raise UserError(f"no checkpoint in {run}: train with `kanerva train --run {run}`")
    return folder


def shipped_versions() -> list[str]:
    """Every model that comes with the package, with its version: `mnist-1`."""
    return sorted(file.parent.name for file in PRETRAINED.glob(f"*/{CONFIG}"))


def shipped() -> list[str]:
    """Their names without a version, each of which means the newest."""
    return sorted({_split(name)[0] for name in shipped_versions()})


def _split(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.+)-(\d+)", name)
    return (name, 0) if found is None else (found[1], int(found[2]))


def shipped_folder(name: str | Path) -> Path | None:
    """The files of a shipped model, if a name means one: `mnist` is the newest, `mnist-1` that
    version. A run of that name in the working directory comes first, any other folder does not;
    `./NAME`, or a `Path`, is always a folder."""
    if isinstance(name, Path) or _checkpoint_in(Path(name)) is not None:
        return None
    versions = [v for v in shipped_versions() if name in (v, _split(v)[0])]
    newest = max(versions, key=lambda v: _split(v)[1], default=None)
    return None if newest is None else PRETRAINED / newest


def load(name: str | Path, *, device: str | torch.device = "cpu") -> MemoryModel:
    """A trained model, ready to evaluate: the name of one that ships with the package, a run
    folder, a checkpoint folder or a Hub id."""
    path = shipped_folder(name) or Path(name)
    local = len(path.parts) != 2 or path.parts[0] == "runs" or path.parent.is_dir()
    if local:  # a Hub id is owner/name
        if not path.is_dir():
            ships = "" if len(path.parts) > 1 else f"; shipped models: {', '.join(shipped())}"
            raise UserError(f"no run folder at {path} (looked in {Path.cwd()}){ships}")
        folder = checkpoint_folder(path)
        model = model_class(read_config(folder / CONFIG).name)
        return model.from_pretrained(folder, map_location=device)
    config = read_config(hub_file(str(name), CONFIG))
    return model_class(config.name).from_pretrained(str(name), map_location=device)
