"""Several processes do what one does: same losses, same order, whole checkpoints, one line."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.presets import preset
from kanerva.training.devices import make_fabric
from kanerva.training.step import form_of

SMALL = [
    "--preset", "mnist", "--encoder.width", "8", "--encoder.depth", "1", "--decoder.base", "16",
    "--decoder.depth", "1", "--readout.prior-width", "8", "--episode-length", "8", "--batch", "4",
    "--steps", "50", "--log-every", "1", "--validate-every", "25", "--validate-episodes", "4",
]  # fmt: skip


def train(root: Path, run: Path, *flags: str, processes: int = 1) -> subprocess.CompletedProcess:
    """`kanerva train` as a user starts it, in one process or under torchrun."""
    start = [sys.executable, "-m", "kanerva"]
    if processes > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc_per_node", str(processes), "-m", "kanerva", "--"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KANERVA_DATA": str(root)}
    return subprocess.run(
        [*start, "train", *flags, "--run", str(run), "--device", "cpu"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row["nll"]) for row in csv.DictReader(file)]


def furthest(one: Path, other: Path) -> float:
    a, b = losses(one), losses(other)
    assert len(a) == len(b) == 52  # 50 steps, two validations
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    done = train(mnist_root, run, *SMALL)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_give_the_loss_of_one(
    tmp_path: Path, mnist_root: Path, alone: Path, strategy: str
):
    run = tmp_path / "run"
    done = train(mnist_root, run, *SMALL, "--strategy", strategy, processes=2)
    assert done.returncode == 0, done.stderr
    assert furthest(alone, run) < 1e-5
    assert done.stdout.count("step 50 of 50") == 1  # one process speaks
    assert done.stderr.count("finished at step 50") == 1
    for name in ("last", "best"):
        mine, theirs = (
            load_file(r / "checkpoints" / name / "model.safetensors") for r in (alone, run)
        )
        assert mine.keys() == theirs.keys()
        apart = sum(float((mine[k] - theirs[k]).square().sum()) for k in mine)
        assert apart < 1e-6 * sum(float(value.square().sum()) for value in mine.values())
    state = json.loads((run / "checkpoints" / "last" / "state.json").read_text())
    assert state["about"]["processes"] == 2


def test_grey_levels_are_measured_before_weights_lie_in_shards(tmp_path: Path, mnist_root: Path):
    """Once, on the same images, whatever the processes."""
    shutil.copytree(mnist_root / "mnist", tmp_path / "fashion_mnist")  # files of one kind
    small = ["--preset", "fashion_mnist", *SMALL[2:]]
    small += ["--decoder.near-width", "8", "--decoder.near-depth", "1", "--steps", "2"]
    runs = [tmp_path / "one", tmp_path / "two"]
    done = [
        train(tmp_path, runs[0], *small),
        train(tmp_path, runs[1], *small, "--strategy", "fsdp", processes=2),
    ]
    assert [d.returncode for d in done] == [0, 0], done[-1].stderr
    one, two = (losses(run) for run in runs)
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 3
    kept = [load_file(run / "checkpoints/last/model.safetensors") for run in runs]
    for name in ("writer.outline.spread", "decoder.outline.middle"):
        torch.testing.assert_close(kept[0][name], kept[1][name])


def test_a_run_goes_on_with_more_and_fewer_processes(tmp_path: Path, mnist_root: Path, alone: Path):
    """1, then 2 (in shards), then 1: every step sees the images it would have seen."""
    run = tmp_path / "run"
    brief = ["--minutes", "1e-9", "--resume"]
    assert train(mnist_root, run, *SMALL, *brief).returncode == 0
    assert len(losses(run)) == 1
    for _ in range(2):
        done = train(mnist_root, run, *brief, "--strategy", "fsdp", processes=2)
        assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 3
    assert train(mnist_root, run, "--resume").returncode == 0
    assert furthest(alone, run) < 1e-5


def test_processes_whose_statistics_differ_do_not_wait_for_each_other(
    tmp_path: Path, mnist_root: Path
):
    """`kpp-paper`'s norms see their own process's images: one validation bound decides for all.
    Where each acted on its own, one of them thought a step the best and the other did not."""
    run = tmp_path / "run"
    flags = ["--preset", "mnist", "--model", "kpp-paper", "--encoder.width", "4", "--steps", "12"]
    flags += ["--encoder.blocks", "[1,1,1,1]", "--decoder.base", "16", "--memory.base", "16"]
    flags += ["--episode-length", "4", "--batch", "4", "--validate-every", "1"]
    flags += ["--validate-episodes", "2", "--optim.lr", "1e-7"]
    done = train(mnist_root, run, *flags, processes=2)
    assert done.returncode == 0, done.stderr
    assert "step 12 of 12" in done.stdout


def test_gradients_shared_between_graphs_are_those_of_one_process(tmp_path: Path):
    """Captured steps share gradients themselves. Here that path runs without the graphs."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, torch\n"
        "from kanerva.lab.benchmark.throughput import random_episodes\n"
        "from kanerva.data import TrainingEpisodes\n"
        "from kanerva.presets import preset\n"
        "from kanerva.training.devices import make_fabric\n"
        "from kanerva.training.step import Parts, Step, assemble\n"
        "config = preset('glyphs')\n"
        "fabric = make_fabric(config, 'cpu')\n"
        "parts = assemble(config, fabric, 'eager')\n"
        "parts = Parts(parts.model, parts.model, parts.average, parts.optimizer)\n"
        "step = Step(fabric, parts, clip=10.0, form='eager')\n"
        "step.apart = fabric.world_size > 1\n"
        "whole = random_episodes(config, fabric.device)\n"
        "episodes = TrainingEpisodes(whole.image_set, episode_length=32, batch=2, seed=0,\n"
        "    binarization='sample', rank=fabric.global_rank, world_size=fabric.world_size)\n"
        "parts.model.train()\n"
        "for i in range(4):\n"
        "    step(episodes.batch_at(i), seed=i, lr=1e-3, decay=0.9)\n"
        "if fabric.is_global_zero:\n"
        "    print(json.dumps([*vars(step.look()).values(),\n"
        "        sum(float(p.double().square().sum()) for p in parts.average.parameters())]))\n"
    )
    found = []
    for start in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]):
        done = subprocess.run(
            [sys.executable, *start, str(script)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batch", "3"], "batch=3 does not divide among 2 processes"),
        (["--preset", "mnsit"], "unknown preset 'mnsit'"),
        ([], "is not empty and holds no run"),  # found by the first process alone
        (["--strategy", "fsdp", "--step", "compiled"], "with --strategy fsdp use eager"),
    ],
)
def test_a_mistake_is_one_line_under_torchrun(
    tmp_path: Path, mnist_root: Path, flags: list[str], message: str
):
    run = tmp_path / "run"
    if not flags:
        run.mkdir()
        (run / "mine.txt").write_text("mine")
    done = train(mnist_root, run, *SMALL, *flags, processes=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("kanerva:")]
    assert len(lines) == 1 and message in lines[0]
    assert done.returncode != 0 and not (run / "config.yaml").exists()


def test_a_signal_to_one_process_stops_all_after_saving(tmp_path: Path, mnist_root: Path):
    """torchrun hands SIGTERM on at slightly different moments: no process may wait for ever."""
    run = tmp_path / "run"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = [*SMALL, "--steps", "100000", "--run", str(run), "--device", "cpu"]
    process = subprocess.Popen(
        [*start, "-m", "kanerva", "--", "train", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "KANERVA_DATA": str(mnist_root)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        for _ in range(600):
            if (run / "metrics.csv").exists() and len(losses(run)) > 3:
                break
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (run / "checkpoints" / "last" / "state.json").exists()
    assert "SIGTERM at step" in (run / "log.txt").read_text()


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="batch=2 does not divide among 3 processes"):
        make_fabric(preset("glyphs"), "cpu")


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes need 2 CUDA devices, this machine shows 1"):
        make_fabric(preset("glyphs"), "cuda")


def test_forms_that_cannot_run_are_refused():
    cpu = torch.device("cpu")
    assert form_of("auto", cpu) == "eager" and form_of("compiled", cpu) == "compiled"
    with pytest.raises(UserError, match="captured is a CUDA graph"):
        form_of("captured", cpu)
    with pytest.raises(UserError, match="with --strategy fsdp use eager"):
        form_of("compiled", torch.device("cuda"), sharded=True)


def test_how_a_step_is_run_does_not_name_another_run():
    config = RunConfig()
    for change in ({"step": "eager"}, {"strategy": "fsdp"}):
        assert RunConfig(**change).config_hash() == config.config_hash()
    assert RunConfig(batch=16).config_hash() != config.config_hash()
