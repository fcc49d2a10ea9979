"""kill -9 at any moment, also while a checkpoint is being written: nothing is lost. And signals
before there is anything to lose."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kanerva.config import RunConfig, to_dict
from kanerva.training.loop import train

PATIENCE = 300.0  # seconds: a busy machine takes long to import torch

# One thread, so that sums are taken in one order. `DIE` ends it from within, at an exact moment.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from kanerva.runs import config_from_yaml
from kanerva.training.loop import Trainer, train
from kanerva.training import checkpoint

def die_at(owner, name, number, when=lambda *args: True):
    real, calls = getattr(owner, name), []
    def counted(*args, **kwargs):
        calls.extend([1] if when(*args) else [])
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(owner, name, counted)

{die}
config, run, root = map(Path, sys.argv[1:])
train(config_from_yaml(config), run, resume=True, data_root=root, accelerator="cpu")
"""


def start(
    config: RunConfig, run: Path, root: Path, die: str = "", **options: object
) -> subprocess.Popen[str]:
    """A training process of its own."""
    file = run.with_name(f"{run.name}.yaml")
    file.write_text(yaml.safe_dump(to_dict(config)))
    argv = [sys.executable, "-c", PROGRAM.format(die=die), str(file), str(run), str(root)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, **options)  # pyright: ignore


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


def assert_same_run(one: Path, other: Path) -> None:
    """The same weights, bit for bit, and the same metrics but for the clock."""
    for name in ("last", "best"):
        mine, theirs = (
            load_file(r / f"checkpoints/{name}/model.safetensors") for r in (one, other)
        )
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), name
    with (one / "metrics.csv").open() as a, (other / "metrics.csv").open() as b:
        for mine, theirs in zip(csv.DictReader(a), csv.DictReader(b), strict=True):
            assert mine | {"images_per_s": ""} == theirs | {"images_per_s": ""}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_a_killed_run_ends_with_the_same_weights(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    """Killed in the middle of step 6, after a save at 4; then, at step 8, while `last` stands under
    no name: its new files are written, its old ones moved away."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    moments = (
        'die_at(Trainer, "_look", 6)',
        'die_at(checkpoint.os, "rename", 1, lambda a, b: Path(b).name == "last")',
    )
    for count, die in enumerate(moments):
        process = start(small_run, killed, mnist_root, die)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL, errors
        assert (killed / "checkpoints" / "last").exists() == (count == 0)
    assert (killed / "checkpoints" / ".last.tmp" / "state.json").exists()
    assert train(small_run, killed, resume=True, data_root=mnist_root).step == 12
    train(small_run, whole, data_root=mnist_root)
    assert_same_run(whole, killed)
    assert "steps 4 to 12" in (killed / "log.txt").read_text()


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_with_the_same_weights(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    """At random moments, half of them while a checkpoint is being written."""
    plan = replace(
        small_run, steps=900, validate_every=6, validate_episodes=1, batch=2, episode_length=4
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = start(plan, whole, mnist_root)
    dice, saving = random.Random(0), 0
    last, half = killed / "checkpoints" / "last", killed / "checkpoints" / ".last.tmp"
    for kill in range(10):
        process = start(plan, killed, mnist_root)
        log = killed / "log.txt"
        before = log.stat().st_size if log.exists() else 0
        if kill > 0:  # the first may fall anywhere, even before the folder is there
            assert wait_for(lambda: log.exists() and log.stat().st_size > before, process)  # noqa: B023
        time.sleep(dice.uniform(0.0, 0.6))
        if kill % 2:
            wait_for(half.exists, process)
            time.sleep(dice.uniform(0.0, 0.004))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
        saving += half.exists() or not last.exists()
    end = start(plan, killed, mnist_root)
    for process in (end, reference):
        _, errors = process.communicate(timeout=2 * PATIENCE)
        assert process.returncode == 0, errors
    assert saving >= 3, "no kill fell into a save"
    assert_same_run(whole, killed)


def test_a_signal_while_the_first_step_compiles_is_obeyed_at_once(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    """To the whole group, as a scheduler sends it: the compiler's helpers die of it as well."""
    config = replace(small_run, execution="compiled")
    processes = {
        number: start(
            config,
            tmp_path / number.name,
            mnist_root,
            start_new_session=True,
            # nothing compiled before: compiling takes many seconds
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache-{number.name}")},
        )
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    for number, process in processes.items():
        log = tmp_path / number.name / "log.txt"
        assert wait_for(lambda: log.exists() and "compiles" in log.read_text(), process)  # noqa: B023
    time.sleep(1.0)
    for number, process in processes.items():
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 128 + number
        assert errors.splitlines()[-1] == "kanerva: stopped before the first step, nothing to save"
