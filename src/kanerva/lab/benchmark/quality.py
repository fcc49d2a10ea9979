"""The time it takes to train to a bound."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kanerva.config import RunConfig
from kanerva.data.splits import fixed_episodes, load_split
from kanerva.evaluation.bound import bound
from kanerva.models.loading import load
from kanerva.training.loop import train

_LOADED = time.monotonic()


def since_start() -> float:
    """Seconds since this process started, imports included if the system reports its start."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.monotonic() - _LOADED


def time_to_bound(
    config: RunConfig,
    run: Path,
    target: float,
    *,
    every: int,
    data_root: Path | None,
    accelerator: str,
    since: float = 0.0,
) -> dict[str, Any]:
    """Train until the validation bound reaches the target, then score the test split.

    The whole validation split is scored every `every` steps. `seconds` is the time from `since`,
    in seconds after the start of the process, to the end of training.
    """
    count = len(load_split(config, "validation", data_root)) // config.episode_length
    config = replace(config, validate_every=every, validate_episodes=max(count, 1))
    outcome = train(config, run, until=target, data_root=data_root, accelerator=accelerator)
    seconds = since_start() - since
    model = load(run, device=accelerator)
    episodes = fixed_episodes(config, load_split(config, "test", data_root), model.device)
    test = bound(model, episodes)
    return {
        "preset": config.preset,
        "model": config.model.name,
        "precision": config.precision,
        "target_nats": target,
        "reached": outcome.reason == "bound",
        "seconds": seconds,
        "steps": outcome.step,
        "of_steps": outcome.total,
        "validation_nats": outcome.best_nll,
        "test_nats": test.nll_nats,
        "test_images": test.n_images,
    }
