"""kill -9 at ten moments, half of them while a checkpoint is being written: nothing is lost. And
signals before there is anything to lose."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kanerva.config import RunConfig, to_dict

KILLS = 10


def start(config: Path, run: Path, root: Path, **options: bool) -> subprocess.Popen[str]:
    """A training process; one thread, so that sums are taken in one order."""
    program = "import torch; torch.set_num_threads(1); from kanerva.cli import entry; entry()"
    flags = ["--config", str(config), "--run", str(run), "--data-root", str(root)]
    argv = [sys.executable, "-c", program, "train", *flags, "--resume", "--device", "cpu"]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, **options)


def wait_for(condition, process: subprocess.Popen[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_while_the_first_step_compiles_is_obeyed_at_once(
    number: signal.Signals, tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    """To the whole group, as a scheduler sends it: the compiler's helpers die of it as well."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(to_dict(replace(small_run, step="compiled"))))
    process = start(config, tmp_path / "run", mnist_root, start_new_session=True)
    log = tmp_path / "run" / "log.txt"
    assert wait_for(lambda: log.exists() and "compiles" in log.read_text(), process, 60)
    time.sleep(1.0)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "kanerva: stopped before the first step, nothing to save"


def test_a_run_killed_ten_times_ends_with_the_same_weights(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    config = tmp_path / "config.yaml"
    plan = replace(
        small_run, steps=900, validate_every=6, validate_episodes=1, batch=2, episode_length=4
    )
    config.write_text(yaml.safe_dump(to_dict(plan)))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = start(config, whole, mnist_root)
    dice, saving = random.Random(0), 0
    last, half = killed / "checkpoints" / "last", killed / "checkpoints" / ".last.tmp"
    for kill in range(KILLS):
        process = start(config, killed, mnist_root)
        log = killed / "log.txt"
        before = log.stat().st_size if log.exists() else 0
        if kill > 0:  # the first may fall anywhere, even before the folder is there
            assert wait_for(lambda: log.exists() and log.stat().st_size > before, process, 60)  # noqa: B023
        time.sleep(dice.uniform(0.0, 0.6))
        if kill % 2:
            wait_for(lambda: half.exists(), process, 30)
            time.sleep(dice.uniform(0.0, 0.004))
        process.kill()
        process.communicate()
        assert process.returncode == -9, "the run ended before it could be killed"
        saving += half.exists() or not last.exists()
    end = start(config, killed, mnist_root)
    for process in (end, reference):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert saving >= 3, "no kill fell into a save"
    for name in ("last", "best"):
        mine = load_file(killed / "checkpoints" / name / "model.safetensors")
        theirs = load_file(whole / "checkpoints" / name / "model.safetensors")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), name
    with (killed / "metrics.csv").open() as a, (whole / "metrics.csv").open() as b:
        for mine, theirs in zip(csv.DictReader(a), csv.DictReader(b), strict=True):
            assert mine | {"images_per_s": ""} == theirs | {"images_per_s": ""}
