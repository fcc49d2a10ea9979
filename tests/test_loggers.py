"""`kanerva train --logger`: the figures of metrics.csv for TensorBoard and Weights & Biases."""

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kanerva.cli import main
from kanerva.config import RunConfig
from kanerva.training.loop import train

SMALL = ["--preset", "glyphs", "--steps", "1", "--encoder.width", "4", "--decoder.base", "8"]


def read_figures(run: Path) -> dict[tuple[str, int], float]:
    """Every figure of metrics.csv, by name and step."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        (f"{row['split']}/{name}", int(row["step"])): float(value)
        for row in rows
        for name, value in row.items()
        if name not in ("step", "epoch", "split") and value
    }


def test_tensorboard_has_the_figures_of_the_table(
    small_run: RunConfig, mnist_root: Path, tmp_path: Path
):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    where = {"data_root": mnist_root, "accelerator": "cpu"}
    train(small_run, run, until=1e9, logger="tensorboard", **where)  # stops at step 4
    train(small_run, run, resume=True, logger="tensorboard", **where)
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    found = {
        (tag, event.step): event.value
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    }
    expected = read_figures(run)
    assert ("validation/nll", 12) in expected and ("train/nll", 2) in expected
    assert found == pytest.approx(expected, rel=1e-6)


class FakeWandb(ModuleType):
    """What `wandb.init` gave and was given; nothing is sent."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: dict[tuple[str, int], float] = {}
        self.finished = 0

    def init(self, **settings: Any) -> SimpleNamespace:
        self.begun.append(settings)
        name, id = settings["name"], settings["id"] or f"id-{len(self.begun)}"
        return SimpleNamespace(name=name, id=id, log=self.log, finish=self.finish, config={})

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged |= {(name, step): value for name, value in figures.items()}

    def finish(self) -> None:
        self.finished += 1


def test_wandb_has_them_too_and_a_resumed_run_goes_on(
    small_run: RunConfig, mnist_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wandb, run = FakeWandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    where = {"data_root": mnist_root, "accelerator": "cpu"}
    train(small_run, run, until=1e9, logger="wandb", **where)
    train(small_run, run, resume=True, logger="wandb", **where)
    assert [start["id"] for start in wandb.begun] == [None, "id-1"] and wandb.finished == 2
    assert wandb.begun[0]["name"] == "run" and wandb.begun[0]["config"]["memory.size"] == 12
    assert wandb.logged == pytest.approx(read_figures(run), rel=1e-6)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_and_nothing_is_written(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setitem(sys.modules, name, None)
    run = tmp_path / "run"
    assert main(["train", *SMALL, "--run", str(run), "--logger", name, "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"kanerva: --logger {name} needs {name}: pip install 'kanerva[{name}]'"
    assert not run.exists()


def test_another_logger_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *SMALL, "--logger", "paper"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--logger" in line and "paper" in line
