"""The loop: it learns, resumes to the same weights, stops well, and gives up on bad numbers."""

import csv
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kanerva.config import RunConfig
from kanerva.errors import NumbersWentBad, UserError
from kanerva.presets import preset, with_options
from kanerva.training import loop
from kanerva.training.loop import train

SPLITS = ("train", "validation")


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / name / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("last", "best"):
        a, b = weights(one, name), weights(other, name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a), name


_FINISHED: list[Path] = []  # trained by the first test that asks


@pytest.fixture
def finished(
    tmp_path: Path,
    small_run: RunConfig,
    mnist_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A copy of `small_run`, trained to its end without a stop."""
    if not _FINISHED:
        run = tmp_path_factory.mktemp("finished") / "run"
        outcome = train(small_run, run, data_root=mnist_root)
        assert (outcome.reason, outcome.step, outcome.total) == ("finished", 12, 12)
        _FINISHED.append(run)
    return shutil.copytree(_FINISHED[0], tmp_path / "finished")


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_what_the_design_lists(finished: Path):
    run = finished
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints", "config.yaml", "log.txt", "metrics.csv", "samples",
    ]  # fmt: skip
    assert [p.name for p in sorted((run / "samples").iterdir())] == [
        f"step-{s:07d}.png" for s in (4, 8, 12)
    ]
    table = rows(run)
    assert [r["step"] for r in table if r["split"] == "validation"] == ["4", "8", "12"]
    for row in table:
        terms = float(row["recon"]) + float(row["kl_z"]) + float(row["kl_y"])
        assert float(row["nll"]) == pytest.approx(terms, rel=1e-4)


def gained(run: Path) -> float:
    """Nats between the first step's bound and the last validation's."""
    found = {name: [float(r["nll"]) for r in rows(run) if r["split"] == name] for name in SPLITS}
    return found["train"][0] - found["validation"][-1]


def test_training_lowers_the_bound(tmp_path: Path, small_run: RunConfig, mnist_root: Path):
    config = replace(small_run, steps=40, validate_every=40, log_every=1)
    train(config, tmp_path / "run", data_root=mnist_root)
    assert gained(tmp_path / "run") > 40


@pytest.mark.parametrize("grey", [False, True])
def test_kpp_learns_and_resumes_to_the_same_weights(tmp_path: Path, mnist_root: Path, grey: bool):
    """Deals, unwritten samples, block noise, averaged weights: all from the step's own stream; and
    what grey levels are measured by is taken once."""
    start = preset("fashion_mnist" if grey else "mnist")
    near = {"near_width": 8, "neighbours": 1} if grey else {}
    model = with_options(
        start.model,
        encoder={"width": 8, "depth": 1},
        memory={"noise": 0.1},
        decoder={"base": 16, "depth": 1} | near,
        readout={"prior_width": 8},
    )
    config = replace(
        start,
        model=model,
        data=replace(start.data, set="mnist"),
        episode_length=8,
        batch=4,
        steps=12,
        log_every=1,
        validate_every=6,
        validate_episodes=2,
    )
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    train(config, whole, data_root=mnist_root)
    for _ in range(2):
        train(config, pieces, minutes=1e-9, resume=True, data_root=mnist_root)
    assert train(config, pieces, resume=True, data_root=mnist_root).step == config.steps
    assert_same_weights(whole, pieces)
    assert gained(whole) > 40
    if grey:
        state = load_file(whole / "checkpoints/last/model.safetensors")
        assert state["writer.outline.spread"].std() > 0
        assert torch.equal(state["writer.outline.middle"], state["decoder.outline.middle"])


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_run_stopped_anywhere_resumes_to_the_same_weights(
    tmp_path: Path, finished: Path, small_run: RunConfig, mnist_root: Path, monkeypatch, ema: float
):
    """Stopped at step 6, in the middle of an interval, and killed (no save) at step 11."""
    config = replace(small_run, optim=replace(small_run.optim, ema=ema))
    whole, pieces = finished, tmp_path / "pieces"
    if ema:
        whole = tmp_path / "whole"
        train(config, whole, data_root=mnist_root)

    real, ending = loop.Step.__call__, {6: signal.SIGTERM, 11: None}

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        count.append(1)
        if len(count) in ending:
            number = ending[len(count)]
            if number is None:
                raise MemoryError("as if killed")
            os.kill(os.getpid(), number)

    count: list[int] = []
    monkeypatch.setattr(loop.Step, "__call__", interrupted)
    assert train(config, pieces, data_root=mnist_root).reason == "SIGTERM"
    with pytest.raises(MemoryError):
        train(config, pieces, resume=True, data_root=mnist_root)
    assert train(config, pieces, resume=True, data_root=mnist_root).reason == "finished"
    assert_same_weights(whole, pieces)
    timeless = [{k: v for k, v in r.items() if k != "images_per_s"} for r in rows(pieces)]
    assert timeless == [{k: v for k, v in r.items() if k != "images_per_s"} for r in rows(whole)]


def test_minutes_stop_and_save_but_do_not_change_the_schedule(
    tmp_path: Path, finished: Path, small_run: RunConfig, mnist_root: Path
):
    pieces = tmp_path / "pieces"
    for _ in range(14):  # the clock is over at once: one step a call
        outcome = train(small_run, pieces, minutes=1e-9, resume=True, data_root=mnist_root)
        if outcome.reason == "finished":
            break
        assert outcome.reason == "minutes"
    assert outcome.step == 12
    assert_same_weights(finished, pieces)


def test_a_finished_run_has_nothing_left_to_do(
    finished: Path, small_run: RunConfig, mnist_root: Path
):
    before = weights(finished)
    assert train(small_run, finished, resume=True, data_root=mnist_root).step == 12
    assert all(torch.equal(v, before[k]) for k, v in weights(finished).items())


def test_a_run_may_be_lengthened(finished: Path, small_run: RunConfig, mnist_root: Path):
    run, longer = finished, replace(small_run, steps=16)
    assert train(longer, run, resume=True, data_root=mnist_root).step == 16
    assert [r["step"] for r in rows(run) if r["split"] == "validation"] == ["4", "8", "12", "16"]


def test_seeds_differ_and_repeat(
    tmp_path: Path, finished: Path, small_run: RunConfig, mnist_root: Path
):
    for name, seed in (("again", 0), ("other", 1)):
        train(replace(small_run, seed=seed), tmp_path / name, data_root=mnist_root)
    assert_same_weights(finished, tmp_path / "again")
    other = weights(tmp_path / "other")
    assert any(not torch.equal(v, other[k]) for k, v in weights(finished).items())


def test_a_bad_step_changes_nothing_but_the_count(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, monkeypatch
):
    """An episode of NaNs: weights, running statistics and spectral vectors stay as they were."""
    real = loop.TrainingEpisodes.batch_at
    seen: dict[str, torch.Tensor] = {}

    def poisoned(self, step: int):
        batch = real(self, step)
        return batch * float("nan") if step == 5 else batch

    def watched(self, step: int) -> None:
        before = {k: v.clone() for k, v in self.model.state_dict().items()}
        step_of(self, step)
        assert self.step.look().streak == (step == 5)
        if step == 5:
            seen.update(before)
            assert all(torch.equal(v, before[k]) for k, v in self.model.state_dict().items())

    step_of = loop.Trainer._step
    monkeypatch.setattr(loop.TrainingEpisodes, "batch_at", poisoned)
    monkeypatch.setattr(loop.Trainer, "_step", watched)
    outcome = train(small_run, tmp_path / "run", data_root=mnist_root)
    assert seen and outcome.reason == "finished"
    assert [r["skipped"] for r in rows(tmp_path / "run") if r["split"] == "train"][-1] == "1"


def test_ten_bad_steps_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path, monkeypatch
):
    real = loop.TrainingEpisodes.batch_at
    monkeypatch.setattr(
        loop.TrainingEpisodes,
        "batch_at",
        lambda self, step: real(self, step) * (float("nan") if step >= 5 else 1),
    )
    config = replace(small_run, steps=40)
    with pytest.raises(
        NumbersWentBad, match="10 steps in a row, up to step 14; .*last is the last good checkpoint"
    ):
        train(config, tmp_path / "run", data_root=mnist_root)
    progress = loop.Progress(**_progress(tmp_path / "run"))
    assert progress.step == 12 and progress.skipped == 7  # a skipped step changes no weights
    assert all(torch.isfinite(v).all() for v in weights(tmp_path / "run").values())


def _progress(run: Path) -> dict:
    return json.loads((run / "checkpoints" / "last" / "state.json").read_text())["progress"]


def test_input_is_checked_before_anything_is_written(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    run = tmp_path / "run"
    for config, message in (
        (replace(small_run, episode_length=500), "episode_length=500 is larger than the data"),
        (replace(small_run, batch=100), "batch"),
        (replace(small_run, model=replace(small_run.model, image=(1, 8, 8))), r"image=\(1, 8, 8\)"),
    ):
        with pytest.raises(UserError, match=message):
            train(config, run, data_root=mnist_root)
        assert not run.exists()
    with pytest.raises(UserError, match="mnist not found"):
        train(small_run, run, data_root=tmp_path)
    assert not run.exists()


def test_a_run_is_never_overwritten(tmp_path: Path, small_run: RunConfig, mnist_root: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        train(small_run, run, data_root=mnist_root)
    assert [p.name for p in run.iterdir()] == ["notes.txt"]


def test_a_damaged_checkpoint_is_not_resumed_and_not_touched(
    finished: Path, small_run: RunConfig, mnist_root: Path
):
    run = finished
    file = run / "checkpoints" / "last" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="model.safetensors is truncated or was altered"):
        train(replace(small_run, steps=20), run, resume=True, data_root=mnist_root)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_a_run_stops_when_its_bound_is_reached(
    tmp_path: Path, small_run: RunConfig, mnist_root: Path
):
    outcome = train(small_run, tmp_path / "run", until=1e9, data_root=mnist_root)
    assert (outcome.reason, outcome.step) == ("bound", 4)
    assert _progress(tmp_path / "run")["step"] == 4


def test_lines_off_a_terminal_say_how_long_it_takes(finished: Path):
    """The first step and each validation; then one every ten seconds."""
    lines = (finished / "log.txt").read_text().splitlines()
    assert "steps 0 to 12 of 2 episodes of 8, eager" in lines[0]
    assert re.search(r"step 1/12 bound .* img/s, \d+:\d\d:\d\d left", lines[1])
    assert sum("validation bound" in line for line in lines) == 3
    assert "finished at step 12 of 12" in lines[-1]
