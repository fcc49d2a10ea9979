"""A run that was stopped goes on as if it had not been: every model, on one process and on two;
with another number of processes; while the clock goes backwards; on a disk that fills up."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kills import child, state_of
from shim import Shim, fail, watching

from kanerva.cli import main
from kanerva.config import MODEL_CONFIGS, RunConfig, to_dict
from kanerva.errors import UserError
from kanerva.presets import with_options
from kanerva.runs import read_run_config
from kanerva.training.loop import train

TINY = {
    "encoder": {"width": 2, "depth": 1},
    "memory": {"channels": 1, "size": 8, "block": 4, "base": 8, "capacity": 4},
    "keys": {"hidden": 8},
    "readout": {"size": 2, "hidden": 8, "prior_width": 4, "channels": 1},
    "decoder": {"base": 8, "depth": 1, "layers": 2},
    "rows": {"count": 4, "width": 12, "address": 4},
    "code": {"groups": 4, "radius": 2, "width": 8, "depth": 1, "maps": 4},
}


def tiny_run(small_run: RunConfig, model: str) -> RunConfig:
    options = {k: v for k, v in TINY.items() if k != "keys" or model not in ("kpp", "kpp-bits")}
    config = with_options(MODEL_CONFIGS[model](image=(1, 28, 28)), **options)
    sizes = {"episode_length": 4, "steps": 4, "validate_every": 2, "validate_episodes": 1}
    return replace(small_run, model=config, **sizes)


@pytest.mark.trust
@pytest.mark.parametrize("model", MODEL_CONFIGS)
def test_a_killed_run_of_any_model_ends_as_one_that_was_not(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, model: str
):
    config = tiny_run(small_run, model)
    with watching(Shim(tmp_path)) as shim:
        train(config, tmp_path / "whole", data_root=mnist_root, accelerator="cpu")
    killed = tmp_path / "killed"
    for share in (0.6, 0.5):
        number = int(share * shim.count)
        assert child(config, killed, mnist_root, number, None) == -signal.SIGKILL
    assert child(config, killed, mnist_root, 0, None) == 0
    assert state_of(killed) == state_of(tmp_path / "whole")


PROGRAM = """
import os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from kanerva.runs import config_from_yaml
from kanerva.training import loop
config, run, root, last = *map(Path, sys.argv[1:4]), int(sys.argv[4])
real = loop.Trainer._step
def step(self, number):
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, number)
loop.Trainer._step = step
loop.train(config_from_yaml(config), run, resume=True, data_root=root, accelerator="cpu")
"""


def together(config: RunConfig, run: Path, root: Path, processes: int, last: int) -> int:
    """Train on several processes; all are killed before step `last`."""
    file, program = run.with_suffix(".yaml"), run.with_suffix(".py")
    file.write_text(yaml.safe_dump(to_dict(config)))
    program.write_text(PROGRAM)
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(processes),
        "--master_port",
        "0",
    ]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(program)]
    done = subprocess.run(
        [sys.executable, *words, str(file), str(run), str(root), str(last)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.returncode


@pytest.mark.trust
@pytest.mark.parametrize("model", MODEL_CONFIGS)
def test_two_processes_that_were_killed_end_as_two_that_were_not(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, model: str
):
    config = tiny_run(small_run, model)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert together(config, whole, mnist_root, 2, -1) == 0
    assert together(config, killed, mnist_root, 2, 3) != 0
    assert together(config, killed, mnist_root, 2, -1) == 0
    assert state_of(killed) == state_of(whole)


@pytest.mark.trust
def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    """Sums are rounded otherwise, so weights are close and not the same; rows are all there."""
    config = tiny_run(small_run, "kpp")
    run = tmp_path / "run"
    assert together(config, run, mnist_root, 2, 3) != 0
    assert train(config, run, resume=True, data_root=mnist_root, accelerator="cpu").step == 4
    again = replace(config, steps=6)
    assert together(again, run, mnist_root, 2, -1) == 0
    assert read_run_config(run).steps == 6
    assert (run / "metrics.csv").read_text().splitlines()[-1].startswith("6,")


def test_a_clock_that_goes_backwards_changes_no_run(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, monkeypatch
):
    config = tiny_run(small_run, "kpp")
    train(config, tmp_path / "whole", data_root=mnist_root, accelerator="cpu")
    now = [time.time()]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", back)
    run = tmp_path / "run"
    assert child(config, run, mnist_root, 40, None) == -signal.SIGKILL
    train(config, run, resume=True, data_root=mnist_root, accelerator="cpu")
    assert state_of(run) == state_of(tmp_path / "whole")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_a_disk_that_fills_up_ends_a_run_in_one_line_and_loses_nothing(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, share: float
):
    config = tiny_run(small_run, "kpp")
    with watching(Shim(tmp_path)) as shim:
        train(config, tmp_path / "whole", data_root=mnist_root, accelerator="cpu")
    run = tmp_path / "run"
    act = fail(errno.ENOSPC)
    with watching(Shim(tmp_path, int(share * shim.count), act)), pytest.raises(UserError):
        train(config, run, resume=True, data_root=mnist_root, accelerator="cpu")
    train(config, run, resume=True, data_root=mnist_root, accelerator="cpu")
    assert state_of(run) == state_of(tmp_path / "whole")


@pytest.mark.trust
def test_a_disk_that_fills_up_ends_reproduce_in_one_line(tmp_path: Path, capsys):
    """At whichever write of its pictures and its record; the next run makes them all."""
    words = ["reproduce", "spatial-transformer", "--quick", "--device", "cpu"]

    def reproduce(place: Path, number: int) -> tuple[int, Shim]:
        folders = ["--out", str(place / "out"), "--runs", str(place / "runs")]
        with watching(Shim(place, number, fail(errno.ENOSPC))) as shim:
            return main([*words, *folders]), shim

    operations = reproduce(tmp_path / "whole", 0)[1].count
    for number in range(1, operations + 1):
        code, shim = reproduce(tmp_path / str(number), number)
        harmless = ("unlink", "mkdir")  # of a folder that is there already
        assert code == 2 or shim.struck in harmless, (number, shim.struck)
        assert "Traceback" not in capsys.readouterr().err
        assert reproduce(tmp_path / str(number), 0)[0] == 0
        made = sorted(path.name for path in (tmp_path / str(number) / "out").iterdir())
        assert made == sorted(path.name for path in (tmp_path / "whole" / "out").iterdir())
