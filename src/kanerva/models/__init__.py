"""The models by name, and how to load one."""

from pathlib import Path

import torch

from kanerva.config import ModelConfig
from kanerva.errors import UserError
from kanerva.models.base import (
    CONFIG,
    ElboTerms,
    JointDensity,
    MemoryModel,
    hub_file,
    read_config,
)
from kanerva.models.kpp import Kpp
from kanerva.models.kpp_paper import KppPaper
from kanerva.models.rivals.dkm import DynamicKanervaMachine
from kanerva.models.rivals.dnc import DifferentiableNeuralComputer
from kanerva.models.rivals.km import KanervaMachine
from kanerva.models.rivals.no_memory import NoMemory
from kanerva.models.rivals.vae import VAE
from kanerva.models.rivals.vma import VariationalMemoryAddressing

MODELS: dict[str, type[MemoryModel]] = {
    "kpp": Kpp,
    "kpp-paper": KppPaper,
    "vae": VAE,
    "no-memory": NoMemory,
    "km": KanervaMachine,
    "dkm": DynamicKanervaMachine,
    "dkm-tsm": DynamicKanervaMachine,
    "vma": VariationalMemoryAddressing,
    "dnc": DifferentiableNeuralComputer,
}

__all__ = [
    "MODELS",
    "PRETRAINED",
    "ElboTerms",
    "JointDensity",
    "DifferentiableNeuralComputer",
    "DynamicKanervaMachine",
    "Kpp",
    "KanervaMachine",
    "VAE",
    "KppPaper",
    "MemoryModel",
    "NoMemory",
    "VariationalMemoryAddressing",
    "build",
    "load",
    "shipped",
    "shipped_folder",
]


def build(config: ModelConfig) -> MemoryModel:
    """A fresh model of the class its config names."""
    return MODELS[config.model](config)


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


PRETRAINED = Path(__file__).parents[1] / "pretrained"  # a folder for each model that ships


def shipped() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(file.parent.name for file in PRETRAINED.glob(f"*/{CONFIG}"))


def shipped_folder(name: str | Path) -> Path | None:
    """The files of a shipped model, if a name means one. A run of that name in the working
    directory comes first, any other folder does not; `./NAME`, or a `Path`, is always a folder."""
    if isinstance(name, Path) or name not in shipped() or _checkpoint_in(Path(name)) is not None:
        return None
    return PRETRAINED / name


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
        model = MODELS[read_config(folder / CONFIG).model]
        return model.from_pretrained(folder, map_location=device)
    config = read_config(hub_file(str(name), CONFIG))
    return MODELS[config.model].from_pretrained(str(name), map_location=device)
