"""A run folder: its config, what may change on resume, and a lock."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kanerva.config import RunConfig, flatten, run_from_dict, to_dict
from kanerva.errors import UserError
from kanerva.locks import alone


def read_run_config(run: Path) -> RunConfig:
    """A run's `config.yaml`."""
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"no run at {run}: {path} is missing")
    return config_from_yaml(path)


def config_from_yaml(path: Path) -> RunConfig:
    return run_from_dict(read_yaml(path), where=str(path))


def read_yaml(path: Path) -> object:
    """A YAML file's content, or one line that says what is wrong with it."""
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not readable YAML: {reason}") from error


FREE_ON_RESUME = {"steps", "log_every", "execution"}  # all else: another run


def check_same_run(run: Path, was: dict[str, Any], now: RunConfig) -> None:
    """Going on with other options would be another run: refuse, and name the option."""
    before, after = flatten(was), flatten(to_dict(now))
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old != new and key not in FREE_ON_RESUME:
            raise UserError(
                f"{run} was started with {key}={old}, not {new}: resume it as it was, or start "
                "another --run"
            )


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep other processes out of a run folder while one trains in it."""
    try:
        with alone(run / "checkpoints", wait=False):
            yield
    except BlockingIOError as error:
        raise UserError(f"another process is training in {run}") from error


def open_run(run: Path, config: RunConfig, resume: bool) -> None:
    """Make the run folder, or check that it may be gone on with. Never overwrites a run."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; a run needs a folder")
    if run.is_dir() and any(run.iterdir()) and not resume:
        if not (run / "config.yaml").exists() and not (run / "checkpoints").exists():
            raise UserError(f"{run} is not empty and holds no run; name another --run")
        raise UserError(f"{run} already holds a run; add --resume to go on, or name another --run")
    try:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run / "samples").mkdir(exist_ok=True)
        temporary = run / ".config.yaml.tmp"
        temporary.write_text(yaml.safe_dump(to_dict(config), sort_keys=False))
        os.replace(temporary, run / "config.yaml")
    except OSError as error:
        raise UserError(f"cannot write to run folder {run}: {error.strerror}") from error
