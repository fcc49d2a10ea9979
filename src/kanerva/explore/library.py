"""Models and data sets by name. A client chooses one of these names; no path from a client ever
reaches the disk."""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from kanerva import data
from kanerva.config import RunConfig
from kanerva.data.registry import DATASETS
from kanerva.data.splits import load_split
from kanerva.errors import UserError
from kanerva.explore.pixels import to_text
from kanerva.models.base import MemoryModel
from kanerva.models.loading import load, shipped, shipped_folder
from kanerva.presets import OWN
from kanerva.runs import read_run_config
from kanerva.seeding import stream

_LOADED = 4  # models kept at once
_RUNS = 50  # run folders offered
_SLOW = ("mazes", OWN)  # not offered: one takes minutes to render, one depends on a folder


class Library:
    """Shipped models, the runs under `runs/`, and the one named on the command line."""

    def __init__(self, first: str, root: Path | None = None, model: MemoryModel | None = None):
        """`model`: the model `first`, if it is already loaded, as a store's is."""
        self.first, self.root = first, root
        runs = sorted(p.parent for p in Path("runs").glob("*/config.yaml"))
        names = [first, *shipped(), *(str(run) for run in runs[:_RUNS])]
        self.names = list(dict.fromkeys(names))
        self._models: OrderedDict[str, MemoryModel] = OrderedDict()
        self._sets: dict[str, UInt8[Tensor, "N C H W"]] = {}
        self._model_lock, self._set_lock = threading.Lock(), threading.Lock()
        if model is not None:
            self._models[first] = model

    def model(self, name: str) -> MemoryModel:
        """The model of that name, loaded on first use."""
        if name not in self.names:
            raise UserError("no model of that name")
        with self._model_lock:
            if name not in self._models:
                model = load(name).requires_grad_(False).eval()
                if not model.remembers:
                    raise UserError(f"{name}: {model.config.name} has no memory to explore")
                self._models[name] = model
            self._models.move_to_end(name)
            others = [other for other in self._models if other not in (name, self.first)]
            for other in others[: max(0, len(self._models) - _LOADED)]:
                del self._models[other]  # least recently used; sessions that use it keep it
            return self._models[name]

    def sets_for(self, name: str) -> list[str]:
        """Data sets that are present and fit a model, its own first."""
        shape, folder = self.model(name).config.image, shipped_folder(name) or Path(name)
        fits = [
            s.name
            for s in DATASETS.values()
            if s.image_shape == shape and s.name not in _SLOW and data.is_present(s.name, self.root)
        ]
        run = _own_run(folder)
        if run is None:
            return fits
        if run.data.set == OWN and run.data.folder and Path(run.data.folder).is_dir():
            fits.append(OWN)  # the folder that it was trained on
        return sorted(fits, key=lambda fit: fit != run.data.set)

    def examples(self, name: str, set_name: str, count: int, seed: int) -> list[str]:
        """Some test images of a set, in the model's pixel format."""
        if set_name not in self.sets_for(name):
            raise UserError("no set of that name fits this model")
        run = _own_run(Path(name)) if set_name == OWN else None
        key = set_name if run is None else f"{set_name} {name}"
        with self._set_lock:
            if key not in self._sets:
                if run is None:
                    self._sets[key] = data.load(set_name, "test", self.root).images
                else:
                    self._sets[key] = load_split(run, "test", self.root).images
            images = self._sets[key]
        binary = self.model(name).config.likelihood == "bernoulli"
        chosen = torch.randperm(len(images), generator=stream(seed, "examples"))[:count]
        pixels = data.binarize(images[chosen], "threshold" if binary else "none")
        return [to_text(image) for image in data.to_float(pixels, binary)]

    def describe(self, name: str) -> dict[str, Any]:
        """What the page needs to know about a model, and what it may offer."""
        model = self.model(name)
        return {
            "name": name,
            "kind": model.config.name,
            "image": list(model.config.image),
            "binary": model.config.likelihood == "bernoulli",
            "sets": self.sets_for(name),
            "replays": model.replays,
            "can": {
                "find": model.has_blocks,
                "free": model.has_blocks,
                "shrink": model.has_code,
                "recall": model.recalls,
                "place": model.key_shape == (2,),  # a key is a place of the map
            },
        }


def _own_run(folder: Path) -> RunConfig | None:
    """The config of a run folder; None if it is not one."""
    try:
        return read_run_config(folder)
    except UserError:
        return None
