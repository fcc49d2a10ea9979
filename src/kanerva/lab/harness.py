"""Shared by experiments: models that are trained once and reused, images, records, pictures.

An experiment is a function from a `Lab` to a `Finding`. It gets trained models and images from the
lab, and returns figures, a table as text, and pictures, which are saved in a record. The verdict on
the claim is not stored. It is computed from the figures whenever a record is read, so that a record
does not go stale when the wording or the threshold of a verdict is corrected.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from kanerva import data
from kanerva.config import KppConfig, KppEmptyConfig, ModelConfig, RunConfig
from kanerva.data import ImageSet
from kanerva.data.splits import load_split
from kanerva.errors import UserError
from kanerva.evaluation.records import make_folder, write_record
from kanerva.models.base import MemoryModel
from kanerva.models.loading import PRETRAINED, load, shipped_versions
from kanerva.pictures import write_picture
from kanerva.presets import preset
from kanerva.provenance import commit, device_name, versions
from kanerva.runs import read_run_config
from kanerva.seeding import stream
from kanerva.training.checkpoint import read_state
from kanerva.training.loop import train

Pixels = Float[Tensor, "n C H W"]
Figures = dict[str, Any]  # plain JSON
QUICK = "Quick run, decides nothing: what it measured is in its table."
PRECISIONS = {"cuda": "bf16-mixed", "cpu": "32-true"}  # that models are trained in
QUICK_STEPS = (600, 400)  # training steps of the quick version: of kpp, of any other model


@dataclass
class Finding:
    """The results of an experiment."""

    figures: Figures  # every number of the table, the verdict and the picture
    lines: list[str]  # the figures as a table of text, at most 110 characters wide
    picture: Image.Image | Figure | None = None


@dataclass(frozen=True, kw_only=True)
class About:
    """The description of an experiment: a table or figure of the paper, or one beyond it."""

    paper: str  # its place in the paper, such as "Fig. 6, right"; or "beyond"
    shows: str  # a few words, for `reproduce --list`
    claim: str  # the paper's claim, or our question
    quick: str = "about 2 min on two cores"
    full: str = "minutes on a GPU"
    # data sets of the full protocol; the first gives the verdict. The quick version uses `glyphs`
    presets: tuple[str, ...] = ("mnist",)
    on_every_set: bool = False  # made from records of all data sets, whatever the preset


@dataclass(frozen=True, kw_only=True)
class Experiment(About):
    """An experiment: its description, the function that runs it, and its verdict."""

    name: str
    run: Callable[["Lab"], Finding]
    verdict: Callable[[Figures], str]  # whether the claim holds; for full protocols only

    def conclusion(self, record: dict[str, Any]) -> str:
        """The verdict of a record; a quick run has none."""
        return QUICK if record["quick"] else self.verdict(record["figures"])


class Lab:
    """The environment of an experiment: a quick, small version or the full protocol."""

    def __init__(
        self,
        *,
        quick: bool,
        runs: Path,
        preset: str = "glyphs",
        seed: int = 0,
        device: str = "cpu",
        data_root: Path | None = None,
        steps: int | None = None,
    ) -> None:
        """`steps` overrides the training steps of every model, for tests."""
        self.quick, self.preset, self.seed, self.steps = quick, preset, seed, steps
        self.runs, self.device, self.data_root = runs, torch.device(device), data_root
        self._sets: dict[str, ImageSet] = {}
        self.found: set[str] = set()  # runs that were already trained
        self._trained: set[str] = set()

    def pick(self, quick: Any, full: Any) -> Any:
        """The first value in the quick version, the second in the full protocol."""
        return quick if self.quick else full

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(text, file=sys.stderr, flush=True)

    def noise(self, *names: int | str) -> torch.Generator:
        """A generator on the lab's device, the same in every run."""
        return stream(self.seed, "experiment", *names, device=self.device)

    # Models

    def config(self, model: str = "kpp", variant: str | None = None, **parts: Any) -> RunConfig:
        """The run config of a preset, shortened in the quick version.

        `parts` replace options of the run or its model: `episode_length=8`, or options of a group,
        `memory={"size": 32}`. The Kanerva machines are trained without KL(M) in their objective:
        with it their memory collapses to its prior, and there is nothing to read.
        """
        start = preset(self.preset, model, variant)
        if model in ("km", "dkm", "dkm-tsm"):
            parts = {"rows": {"charge": False}} | parts
        of_run = {f.name: parts.pop(f.name) for f in fields(RunConfig) if f.name in parts}
        start = replace_options(start, of_run | {"model": replace_options(start.model, parts)})
        ours, theirs = QUICK_STEPS if self.quick else (start.steps, full_steps(self.preset))
        own = isinstance(start.model, KppConfig | KppEmptyConfig) or start.variant == "strong"
        length = self.steps or (ours if own else theirs)
        every = min(start.validate_every, length)
        precision = PRECISIONS[self.device.type]
        return replace(start, steps=length, validate_every=every, precision=precision)

    def trained(
        self,
        model: str = "kpp",
        variant: str | None = None,
        *,
        seed: int | None = None,
        **parts: Any,
    ) -> MemoryModel:
        """A trained model. It is loaded from a finished run, resumed if interrupted, or trained.

        The same call, from this experiment or another, finds the same run.
        """
        config = self._config_of(model, variant, seed, parts)
        run = self._finished_run(config)
        if run is None:
            run = self._folder(config)
            self.say(f"training {_name_of(config)}, seed {config.seed}, in {run}")
            where = {"data_root": self.data_root, "accelerator": self.device.type}
            with torch.enable_grad():  # experiments run without gradients
                outcome = train(config, run, resume=True, **where)
            if outcome.reason != "finished":
                raise UserError(f"stopped; the same command resumes {run}")
            self._trained.add(run.name)
        elif run.name not in self._trained:
            self.found.add(run.name)
        return load(str(run), device=self.device.type).eval()

    def is_trained(
        self,
        model: str = "kpp",
        variant: str | None = None,
        *,
        seed: int | None = None,
        **parts: Any,
    ) -> bool:
        """Whether `trained` would find a finished run."""
        return self._finished_run(self._config_of(model, variant, seed, parts)) is not None

    def _config_of(
        self, model: str, variant: str | None, seed: int | None, parts: dict[str, Any]
    ) -> RunConfig:
        config = self.config(model, variant, **parts)
        return replace(config, seed=self.seed if seed is None else seed)

    def _folder(self, config: RunConfig) -> Path:
        return self.runs / f"{_name_of(config)}-{config.config_hash()[:8]}-s{config.seed}"

    def _finished_run(self, config: RunConfig) -> Path | None:
        """The folder of a finished run or of the shipped model that came from such a run, if there
        is one. It may have been trained on another kind of device, in another precision."""
        same = [replace(config, precision=p) for p in (config.precision, *PRECISIONS.values())]
        for each in same:
            if self._finished(self._folder(each), config):
                return self._folder(each)
        folders = (PRETRAINED / name for name in shipped_versions())
        return next((folder for folder in folders if read_run_config(folder) in same), None)

    @staticmethod
    def _finished(run: Path, config: RunConfig) -> bool:
        last = run / "checkpoints" / "last"
        return last.exists() and read_state(last)["progress"]["step"] >= config.steps

    # Images

    def images(self, count: int, split: str = "test", skip: int = 0) -> Pixels:
        """Images of the preset's data set as its models see them, in a fixed random order. Frames
        of one path stay adjacent."""
        return self.labelled(count, split, skip)[0]

    def labelled(
        self, count: int, split: str = "test", skip: int = 0
    ) -> tuple[Pixels, Tensor | None]:
        """The same as `images`, with their labels if the set has any."""
        config = preset(self.preset)
        if split not in self._sets:
            self._sets[split] = load_split(config, split, self.data_root)
        image_set = self._sets[split]
        order = in_order(image_set, stream("experiment", split, "order"))
        chosen = order[skip : skip + count]
        if len(chosen) < count:
            raise UserError(
                f"{self.preset} has {len(image_set)} {split} images, {skip + count} are needed"
            )
        grey, binarization = image_set.images[chosen], config.data.binarization
        pixels = data.binarize(grey, binarization, stream("experiment", split, "pixels", skip))
        labels = None if image_set.labels is None else image_set.labels[chosen]
        return data.to_float(pixels, binarization != "none").to(self.device), labels


def _name_of(config: RunConfig) -> str:
    return "-".join(filter(None, [config.preset, config.model.name, config.variant]))


C = TypeVar("C", RunConfig, ModelConfig)


def replace_options(config: C, options: dict[str, Any]) -> C:
    """Return a config with some options replaced; a dict replaces options of a group."""
    new = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in options.items()
    }
    return replace(config, **new)


def full_steps(preset_name: str) -> int:
    """Training steps with which the paper's model and baselines see as many images as `kpp`."""
    ours, theirs = preset(preset_name), preset(preset_name, "kpp-paper")
    images = ours.steps * ours.batch * ours.episode_length
    return images // (theirs.batch * theirs.episode_length)


def in_order(images: ImageSet, shuffle: torch.Generator) -> Int[Tensor, "N"]:  # noqa: F821
    """Positions in random order; in a set with paths, whole paths in random order."""
    if images.groups is None:
        return torch.randperm(len(images), generator=shuffle)
    paths = images.groups.unique_consecutive(return_inverse=True)[1]
    rank = torch.randperm(int(paths.max()) + 1, generator=shuffle)[paths]
    return rank.argsort(stable=True)


# Records and pictures


def perform(experiment: Experiment, lab: Lab, out: Path, command: str) -> dict[str, Any]:
    """Run an experiment, write OUT/NAME.json and its pictures, and return the record. Another seed
    than 0 is part of the file names, so that it replaces no other."""
    began = time.monotonic()
    finding = experiment.run(lab)
    seed = f"-s{lab.seed}" if lab.seed else ""
    name = f"{experiment.name}-{'quick' if lab.quick else lab.preset}{seed}"
    record = {
        "schema": 1,
        "kind": "reproduce",
        "name": experiment.name,
        "paper": experiment.paper,
        "claim": experiment.claim,
        "quick": lab.quick,
        "preset": lab.preset,
        "seed": lab.seed,
        "figures": finding.figures,
        "lines": finding.lines,
        "pictures": save_picture(finding, out / f"{name}.png"),
        "wall_s": round(time.monotonic() - began, 1),
        "models_found": len(lab.found),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(lab.device),
        "command": command,
    }
    write_record(record, out / f"{name}.json")
    return record


def save_picture(finding: Finding, path: Path) -> list[str]:
    """Save the picture beside the record. Return a list of its name, empty without a picture."""
    if finding.picture is None:
        return []
    make_folder(path.parent)
    write_picture(finding.picture, path)
    return [path.name]


def describe(experiment: Experiment, record: dict[str, Any]) -> str:
    """Format a record: claim, figures, verdict."""
    version = "quick version" if record["quick"] else "full protocol"
    lines = [
        f"{record['name']} ({record['paper']}), {version} on {record['preset']}",
        f"claim: {record['claim']}",
        "",
        *record["lines"],
        "",
        f"verdict: {experiment.conclusion(record)}",
    ]
    return "\n".join(lines)
