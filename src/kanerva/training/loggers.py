"""Log a run's metrics to TensorBoard or Weights & Biases too. Each is an optional extra."""

import os
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lightning_fabric.loggers import Logger, TensorBoardLogger

from kanerva.config import RunConfig, flatten, to_dict
from kanerva.plain_files import write_whole

LoggerName = Literal["tensorboard", "wandb"]


def require_logger(name: LoggerName | None) -> None:
    """Fail early, before the first step, if the logger's package is missing."""
    if name is not None:
        import_module(name)


def make_logger(name: LoggerName | None, run: Path, config: RunConfig, step: int) -> Logger | None:
    """Make the logger of a run that is at `step`. A resumed run continues its earlier log."""
    if name is None:
        return None
    if name == "wandb":
        return WandbLogger(run, flatten(to_dict(config)), goes_on=step > 0)
    return TensorBoardLogger(run, name="tensorboard", version="", purge_step=step + 1)


class WandbLogger(Logger):
    """A Weights & Biases run, named after the run folder.

    `wandb` reads its own environment variables: WANDB_PROJECT, WANDB_MODE=offline and others.
    Fabric has no such logger, and the one for Lightning needs all of `lightning`.
    """

    def __init__(self, run: Path, options: dict[str, Any], goes_on: bool) -> None:
        saved_id = run / "wandb-id.txt"
        id = saved_id.read_text().strip() if goes_on and saved_id.is_file() else None
        project = os.environ.get("WANDB_PROJECT", "kanerva")
        self._run = import_module("wandb").init(
            project=project, name=run.name, dir=run, config=options, id=id, resume="allow"
        )
        write_whole(saved_id, f"{self._run.id}\n")

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def version(self) -> str:
        return self._run.id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        self._run.config.update(params if isinstance(params, dict) else vars(params))

    def finalize(self, status: str) -> None:
        self._run.finish()
