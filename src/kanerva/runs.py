"""A run folder: its config, the options that may change on resume, and its lock."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from kanerva.config import RunConfig, flatten, run_from_dict, to_dict
from kanerva.errors import UserError
from kanerva.locks import alone
from kanerva.plain_files import read_sealed, read_yaml, reason, write_whole


def read_run_config(run: Path) -> RunConfig:
    """Read a run's `config.yaml`; refuse it if it differs from the run's checkpoint."""
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"no run at {run}: {path} is missing")
    config, saved = config_from_yaml(path), saved_config(run / "checkpoints" / "last")
    if saved is not None and (key := _difference(saved, config)):
        raise UserError(f"{path} was altered: {key} differs from the run's checkpoint")
    return config


def saved_config(checkpoint: Path) -> RunConfig | None:
    """The run config in a resumable checkpoint, protected by a digest; None without one."""
    path = checkpoint / "state.json"
    if not path.is_file():
        return None
    about = read_sealed(path).get("about")
    config = about.get("config") if isinstance(about, dict) else None
    return run_from_dict(config, where=str(path))


def config_from_yaml(path: Path) -> RunConfig:
    return run_from_dict(read_yaml(path), where=str(path))


FREE_ON_RESUME = {"steps", "log_every", "execution"}  # any other change makes another run


def _difference(was: RunConfig, now: RunConfig) -> str | None:
    """The first option that makes two configs different runs; None if they are the same."""
    before, after = flatten(to_dict(was)), flatten(to_dict(now))
    keys = sorted((before.keys() | after.keys()) - FREE_ON_RESUME)
    return next((key for key in keys if before.get(key) != after.get(key)), None)


def check_same_run(run: Path, was: RunConfig, now: RunConfig) -> None:
    """Refuse to resume a run with other options; the message names the first that differs."""
    if key := _difference(was, now):
        old, new = (flatten(to_dict(config)).get(key) for config in (was, now))
        raise UserError(
            f"{run} was started with {key}={old}, not {new}: resume it as it was, or start "
            "another --run"
        )


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep other processes out of a run folder while one trains in it."""
    for name in ("checkpoints", "samples"):
        if (run / name).is_symlink():
            raise UserError(f"{run / name} is a link, and a run writes into its own folder only")
    with alone(run / "checkpoints", busy=f"another process is training in {run}"):
        yield


def make_run(run: Path, resume: bool) -> None:
    """Make the run folder, or check that it may be resumed. Never overwrites a run."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; a run needs a folder")
    if run.is_dir() and any(run.iterdir()) and not resume:
        if not (run / "config.yaml").exists() and not (run / "checkpoints").exists():
            raise UserError(f"{run} is not empty and holds no run; name another --run")
        raise UserError(
            f"{run} already holds a run; add --resume to continue it, or name another --run"
        )
    try:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run / "samples").mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to run folder {run}: {reason(error)}") from error


def write_run_config(run: Path, config: RunConfig) -> None:
    write_whole(run / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
