"""Several processes do what one does: same losses, same order, whole checkpoints, one line."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kanerva.config import RunConfig, to_dict
from kanerva.data import TrainingEpisodes
from kanerva.errors import UserError
from kanerva.presets import preset, with_options
from kanerva.training.devices import make_fabric
from kanerva.training.loop import train
from kanerva.training.step import Step, assemble, form_of
from test_step import little, random_episodes

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


def small_grey() -> RunConfig:
    """Two steps on grey levels: their spread is measured before the first."""
    config = small("fashion_mnist", steps=2)
    near = {"near_width": 8, "neighbours": 1}
    return replace(config, model=with_options(config.model, decoder=near))


def small_paper() -> RunConfig:
    """`kpp-paper`, whose norms see their own process's images, judged after each step."""
    start = preset("mnist", "kpp-paper")
    model = with_options(
        start.model,
        encoder={"width": 4},
        memory={"base": 16, "size": 16, "block": 8},
        keys={"hidden": 16},
        readout={"hidden": 16, "prior_width": 4},
        decoder={"base": 16},
    )
    options = {"episode_length": 4, "batch": 4, "steps": 12, "validate_every": 1}
    options |= {"validate_episodes": 2, "optim": replace(start.optim, lr=1e-7)}
    return replace(start, model=model, **options)


def small_bits() -> RunConfig:
    """Two steps of `kpp-bits`."""
    start = preset("mnist", "kpp-bits")
    model = with_options(
        start.model,
        encoder={"width": 8, "depth": 1},
        decoder={"base": 16, "depth": 1},
        readout={"prior_width": 8},
        code={"width": 16, "maps": 8, "depth": 1},
    )
    options = {"batch": 4, "steps": 2, "log_every": 1, "validate_every": 2}
    options |= {"episode_length": 8, "validate_episodes": 2, "model": model}
    return replace(start, **options)


# Trains the runs it is given, one after the other. It ends as `kanerva train` does: taking a group
# of processes apart may wait for one that is gone.
PROGRAM = """
import os, sys
from pathlib import Path
from kanerva.runs import config_from_yaml
from kanerva.training.loop import train
for word in sys.argv[1:]:
    run, minutes = word.split("=")
    config = config_from_yaml(Path(run + ".yaml"))
    outcome = train(config, Path(run), resume=True, minutes=float(minutes), accelerator="cpu")
    if os.environ["RANK"] == "0":
        print(f"{Path(run).name}: {outcome.step} of {outcome.total}", flush=True)
os._exit(0)
"""


def torchrun(*words: str) -> list[str]:
    """Two processes of a Python program."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, "--nproc_per_node", "2", *words]


def environment(root: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "KANERVA_DATA": str(root)}


def prepare(place: Path, configs: dict[str, RunConfig]) -> str:
    """Write the configs of runs, and the program that trains them."""
    for name, config in configs.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(to_dict(config)))
    (place / "program.py").write_text(PROGRAM)
    return str(place / "program.py")


def train_in_pairs(
    root: Path, place: Path, configs: dict[str, RunConfig], brief: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Train runs in two processes, to their ends; those named in `brief` for one step."""
    words = [f"{place / name}={1e-9 if name in brief else 1e9}" for name in configs]
    done = subprocess.run(
        torchrun(prepare(place, configs), *words),
        env=environment(root), capture_output=True, text=True, timeout=2 * PATIENCE,
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
def root(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    """A data root with mnist, and the same images as grey levels."""
    root = tmp_path_factory.mktemp("data")
    for name in ("mnist", "fashion_mnist"):  # files of one kind
        shutil.copytree(mnist_root / "mnist", root / name)
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A folder of runs by one process, this one."""
    place = tmp_path_factory.mktemp("alone")
    train(small(), place / "plain", data_root=root, accelerator="cpu")
    train(small_grey(), place / "grey", data_root=root, accelerator="cpu")
    train(small_bits(), place / "bits", data_root=root, accelerator="cpu")
    return place


@dataclass(frozen=True)
class Pair:
    """A folder of runs, and what its two processes said."""

    place: Path
    said: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Pair:
    """The same runs by two processes that torchrun starts, and more; `resumed` is at step 2, the
    first of which one process took."""
    place = tmp_path_factory.mktemp("pair")
    train(small(), place / "resumed", minutes=1e-9, data_root=root, accelerator="cpu")
    configs = {"plain": small(), "resumed": small(), "grey": small_grey(), "paper": small_paper()}
    configs["bits"] = small_bits()
    return Pair(place, train_in_pairs(root, place, configs, brief=("resumed",)))


def test_two_processes_give_the_loss_of_one(alone: Path, pair: Pair):
    one, two = alone / "plain", pair.place / "plain"
    assert furthest(one, two) < 1e-5
    assert pair.said.stdout.count("plain: 50 of 50") == 1
    assert pair.said.stderr.count("finished at step 50") == 1  # one process reports
    for name in ("last", "best"):
        mine, theirs = (load_file(r / f"checkpoints/{name}/model.safetensors") for r in (one, two))
        assert mine.keys() == theirs.keys()
        apart = sum(float((mine[k] - theirs[k]).square().sum()) for k in mine)
        assert apart < 1e-6 * sum(float(value.square().sum()) for value in mine.values())
    state = json.loads((two / "checkpoints" / "last" / "state.json").read_text())
    assert state["about"]["processes"] == 2


@pytest.mark.slow  # compiles
def test_two_compiled_processes_give_the_loss_of_one(tmp_path: Path, root: Path, alone: Path):
    """The share of the noise goes through the compiler's wrapper and DDP's."""
    train_in_pairs(root, tmp_path, {"plain": small(execution="compiled")})
    assert furthest(alone / "plain", tmp_path / "plain") < 1e-4


def test_grey_levels_are_measured_once_for_all_processes(alone: Path, pair: Pair):
    """On the same images, whatever the processes."""
    runs = [alone / "grey", pair.place / "grey"]
    one, two = (losses(run) for run in runs)
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 3
    kept = [load_file(run / "checkpoints/last/model.safetensors") for run in runs]
    for name in ("writer.outline.spread", "decoder.outline.middle"):
        torch.testing.assert_close(kept[0][name], kept[1][name])


def test_half_of_the_rows_are_the_same_half_in_every_process(alone: Path, pair: Pair):
    """The bound does not include the pixel code; the gradient does."""

    def first_norm(run: Path) -> float:
        with (run / "metrics.csv").open() as file:
            return float(next(csv.DictReader(file))["grad_norm"])

    one, two = (first_norm(place / "bits") for place in (alone, pair.place))
    assert one == pytest.approx(two, rel=1e-5)


def test_a_run_goes_on_with_more_and_fewer_processes(
    tmp_path: Path, root: Path, alone: Path, pair: Pair
):
    """1, then 2, then 1: every step sees the images it would have seen."""
    run = shutil.copytree(pair.place / "resumed", tmp_path / "run")
    assert len(losses(run)) == 2 and "minutes at step 2" in (run / "log.txt").read_text()
    train(small(), run, resume=True, data_root=root, accelerator="cpu")
    assert furthest(alone / "plain", run) < 1e-5


def test_processes_whose_statistics_differ_do_not_wait_for_each_other(pair: Pair):
    """One validation bound decides for all. Where each acted on its own, one of them thought a step
    the best and the other did not."""
    assert "paper: 12 of 12" in pair.said.stdout


def four_steps() -> list[float]:
    """Figures and the average's size after four steps, gradients shared as captured steps do."""
    config = little()
    fabric = make_fabric(config, "cpu")
    parts = assemble(config, fabric, "eager")
    assert parts.average is not None
    step = Step(fabric, replace(parts, wrapped=parts.model), clip=10.0, form="eager")
    step.apart = fabric.world_size > 1
    episodes = TrainingEpisodes(
        random_episodes(config, fabric.device).image_set,
        episode_length=config.episode_length,
        batch=config.batch,
        seed=0,
        binarization="sample",
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    parts.model.train()
    for number in range(4):
        step(episodes.batch_at(number), seed=number, lr=1e-3, decay=0.9)
    size = sum(float(p.detach().double().square().sum()) for p in parts.average.parameters())
    return [*vars(step.look()).values(), size]


def test_gradients_shared_between_graphs_are_those_of_one_process(tmp_path: Path):
    """Captured steps share gradients themselves. Here that path runs without the graphs."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_devices import four_steps\n"
        "found = json.dumps(four_steps())\n"
        "if os.environ['RANK'] == '0':\n"
        "    print(found, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        torchrun(str(script), str(Path(__file__).parent)),
        env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout.strip().splitlines()[-1])
    torch.testing.assert_close(torch.tensor(two), torch.tensor(four_steps()), rtol=1e-5, atol=1e-6)


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
        torchrun("-m", "kanerva", "--", *words),
        env=environment(mnist_root), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("kanerva:")]
    assert len(lines) == 1 and message in lines[0]
    assert done.returncode != 0 and not (run / "config.yaml").exists()


def test_a_signal_to_one_process_stops_all_after_saving(tmp_path: Path, mnist_root: Path):
    """torchrun hands SIGTERM on at slightly different moments: no process may wait for ever."""
    run = tmp_path / "run"
    program = prepare(tmp_path, {"run": small(steps=100_000)})
    process = subprocess.Popen(
        torchrun(program, f"{run}=1e9"),
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
    with pytest.raises(UserError, match="2 processes need 2 CUDA devices, this machine has 1"):
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
