"""Several processes do what one does: same losses, same order, whole checkpoints, one line."""

import csv
import json
import os
import shutil
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
from kanerva.errors import UserError
from kanerva.presets import preset, with_options
from kanerva.training.devices import make_fabric
from kanerva.training.step import form_of

PATIENCE = 300.0  # seconds: a busy machine takes long to import torch


def small(name: str = "mnist", **changes) -> RunConfig:
    """A `kpp` of fifty steps, every size small."""
    start = preset(name)
    model = with_options(
        start.model,
        encoder={"width": 8, "depth": 1},
        decoder={"base": 16, "depth": 1},
        readout={"prior_width": 8},
    )
    options = {"batch": 4, "steps": 50, "log_every": 1, "validate_every": 25}
    options |= {"episode_length": 8, "validate_episodes": 4, "model": model}
    return replace(start, **options | changes)


# As `kanerva train` ends it: taking a group of processes apart may wait for one that is gone.
PROGRAM = """
import os, sys
from pathlib import Path
from kanerva.runs import config_from_yaml
from kanerva.training.loop import train
run, minutes = Path(sys.argv[1]), float(sys.argv[2])
config = config_from_yaml(run.with_name(run.name + ".yaml"))
outcome = train(config, run, resume=True, minutes=minutes, accelerator="cpu")
if os.environ.get("RANK", "0") == "0":
    print(f"step {outcome.step} of {outcome.total}", flush=True)
os._exit(0)
"""


def command(words: list[str], processes: int) -> list[str]:
    """Python words, in one process or under torchrun."""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(many if processes > 1 else []), *words]


def environment(root: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "KANERVA_DATA": str(root)}


def prepare(config: RunConfig, run: Path) -> list[str]:
    """Write a run's config and the program that trains it, both beside the run."""
    run.parent.mkdir(parents=True, exist_ok=True)
    run.with_name(f"{run.name}.yaml").write_text(yaml.safe_dump(to_dict(config)))
    script = run.with_name(f"{run.name}.py")
    script.write_text(PROGRAM)
    return [str(script), str(run)]


def train(
    root: Path, run: Path, config: RunConfig, *, processes: int = 1, minutes: float = 1e9
) -> subprocess.CompletedProcess:
    """Train, or go on, in so many processes."""
    words = [*prepare(config, run), str(minutes)]
    done = subprocess.run(
        command(words, processes),
        env=environment(root), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


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
    train(mnist_root, run, small())
    return run


def test_two_processes_give_the_loss_of_one(tmp_path: Path, mnist_root: Path, alone: Path):
    run = tmp_path / "run"
    done = train(mnist_root, run, small(), processes=2)
    assert furthest(alone, run) < 1e-5
    assert done.stdout.count("step 50 of 50") == 1
    assert done.stderr.count("finished at step 50") == 1  # one process reports
    for name in ("last", "best"):
        mine, theirs = (
            load_file(r / "checkpoints" / name / "model.safetensors") for r in (alone, run)
        )
        assert mine.keys() == theirs.keys()
        apart = sum(float((mine[k] - theirs[k]).square().sum()) for k in mine)
        assert apart < 1e-6 * sum(float(value.square().sum()) for value in mine.values())
    state = json.loads((run / "checkpoints" / "last" / "state.json").read_text())
    assert state["about"]["processes"] == 2


@pytest.mark.slow  # compiles
def test_two_compiled_processes_give_the_loss_of_one(tmp_path: Path, mnist_root: Path, alone: Path):
    """The share of the noise goes through the compiler's wrapper and DDP's."""
    run = tmp_path / "run"
    train(mnist_root, run, small(execution="compiled"), processes=2)
    assert furthest(alone, run) < 1e-4


def test_grey_levels_are_measured_once_for_all_processes(tmp_path: Path, mnist_root: Path):
    """On the same images, whatever the processes."""
    shutil.copytree(mnist_root / "mnist", tmp_path / "fashion_mnist")  # files of one kind
    config = small("fashion_mnist", steps=2)
    near = {"near_width": 8, "neighbours": 1}
    config = replace(config, model=with_options(config.model, decoder=near))
    runs = {count: tmp_path / str(count) for count in (1, 2)}
    for count, run in runs.items():
        train(tmp_path, run, config, processes=count)
    one, two = (losses(run) for run in runs.values())
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 3
    kept = [load_file(run / "checkpoints/last/model.safetensors") for run in runs.values()]
    for name in ("writer.outline.spread", "decoder.outline.middle"):
        torch.testing.assert_close(kept[0][name], kept[1][name])


def test_a_run_goes_on_with_more_and_fewer_processes(tmp_path: Path, mnist_root: Path, alone: Path):
    """1, then 2, then 1: every step sees the images it would have seen."""
    run = tmp_path / "run"
    for count, (processes, minutes) in enumerate([(1, 1e-9), (2, 1e-9), (1, 1e9)], start=1):
        train(mnist_root, run, small(), processes=processes, minutes=minutes)
        assert len(losses(run)) == (52 if minutes > 1 else count)
    assert furthest(alone, run) < 1e-5


def test_processes_whose_statistics_differ_do_not_wait_for_each_other(
    tmp_path: Path, mnist_root: Path
):
    """`kpp-paper`'s norms see their own process's images: one validation bound decides for all.
    Where each acted on its own, one of them thought a step the best and the other did not."""
    start = preset("mnist", "kpp-paper")
    model = with_options(
        start.model,
        encoder={"width": 4},
        memory={"base": 16, "size": 16, "block": 8},
        keys={"hidden": 16},
        readout={"hidden": 16, "prior_width": 4},
        decoder={"base": 16},
    )
    config = replace(
        start,
        model=model,
        optim=replace(start.optim, lr=1e-7),
        episode_length=4,
        batch=4,
        steps=12,
        validate_every=1,
        validate_episodes=2,
    )
    done = train(mnist_root, tmp_path / "run", config, processes=2)
    assert "step 12 of 12" in done.stdout


def test_gradients_shared_between_graphs_are_those_of_one_process(tmp_path: Path):
    """Captured steps share gradients themselves. Here that path runs without the graphs."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, torch\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_step import random_episodes\n"
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
    for processes in (1, 2):
        done = subprocess.run(
            command([str(script), str(Path(__file__).parent)], processes),
            env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batch", "3"], "batch=3 does not divide among 2 processes"),
        ([], "is not empty and holds no run"),  # found by the first process alone
    ],
)
def test_a_mistake_is_one_line_under_torchrun(
    tmp_path: Path, mnist_root: Path, flags: list[str], message: str
):
    run = tmp_path / "run"
    if not flags:
        run.mkdir()
        (run / "mine.txt").write_text("mine")
    words = ["train", "--preset", "mnist", "--episode-length", "8", "--batch", "4", *flags]
    words += ["--run", str(run), "--device", "cpu"]
    done = subprocess.run(
        command(["-m", "kanerva", "--", *words], 2),
        env=environment(mnist_root), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("kanerva:")]
    assert len(lines) == 1 and message in lines[0]
    assert done.returncode != 0 and not (run / "config.yaml").exists()


def test_a_signal_to_one_process_stops_all_after_saving(tmp_path: Path, mnist_root: Path):
    """torchrun hands SIGTERM on at slightly different moments: no process may wait for ever."""
    run = tmp_path / "run"
    words = [*prepare(small(steps=100_000), run), "1e9"]
    process = subprocess.Popen(
        command(words, 2),
        env=environment(mnist_root),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + PATIENCE
        while not (run / "metrics.csv").exists() or len(losses(run)) < 4:
            assert process.poll() is None and time.monotonic() < end, "training did not begin"
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=PATIENCE)
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
    with pytest.raises(UserError, match="unknown execution 'quick'"):
        form_of("quick", cpu)


def test_how_a_step_is_run_does_not_name_another_run():
    config = RunConfig()
    assert RunConfig(execution="eager").config_hash() == config.config_hash()
    assert RunConfig(batch=16).config_hash() != config.config_hash()
