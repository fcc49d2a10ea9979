"""Measurements: what is counted, what a record holds, and how it reads."""

import json
import math
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kanerva.cli import main
from kanerva.cli.bench import make_configs
from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.evaluation.bound import Score
from kanerva.evaluation.costs import flop_per_image
from kanerva.lab.benchmark import quality, report
from kanerva.lab.benchmark.throughput import random_episodes
from kanerva.lab.benchmark.timing import matrix_rate, read_measurement, timed
from kanerva.models import build
from kanerva.presets import preset, with_options
from kanerva.training.loop import Outcome, train

CPU = torch.device("cpu")


def test_the_clock_counts_one_call():
    found = timed(lambda: time.sleep(0.01), CPU, calls=3, windows=3)
    assert 10 <= found.least <= found.ms <= found.most
    assert found.least < 30  # not the three of a window


def work(config: RunConfig) -> float:
    return flop_per_image(build(config.model).eval(), config)


def test_work_is_three_times_the_forward_products_of_a_convolution():
    """Encoder's first residual stage by hand: widen it and the difference is its convolutions."""
    config = preset("glyphs")
    deep = replace(config, model=with_options(config.model, encoder={"depth": 3}))
    side, width = 14, 16
    block = 2 * 2 * width * width * 9 * side**2  # two convolutions, two FLOP a product
    block += 2 * 2 * (2 * width) ** 2 * 9 * (side // 2) ** 2  # and at the lower resolution
    more = work(deep) - work(config)
    assert more == pytest.approx(3 * block, rel=1e-6)  # forward, and back to inputs and to weights


def test_work_does_not_depend_on_the_batch():
    config = preset("glyphs")
    assert work(config) == work(replace(config, batch=7))


def test_a_matrix_product_has_a_rate():
    assert 1e8 < matrix_rate(CPU, "32-true") < 1e14


def test_random_episodes_are_what_a_preset_trains_on():
    config = preset("glyphs")
    batch = random_episodes(config, CPU).batch_at(3)
    assert batch.shape == (config.batch, config.episode_length, *config.model.image)
    assert set(batch.unique().tolist()) == {0.0, 1.0}


SMALL = ["--preset", "glyphs", "--execution", "eager", "--steps", "1", "--episode-length", "4"]


def test_random_images_have_labels_so_that_episodes_can_be_of_one():
    config = replace(preset("mnist", "kpp-bits"), batch=2, episode_length=4)
    assert config.data.kin > 0
    assert random_episodes(config, CPU).batch_at(1).shape == (2, 4, 1, 28, 28)


def test_throughput_is_printed_filed_and_drawn(tmp_path: Path, capsys):
    folder = tmp_path / "bench"
    assert main(["bench", *SMALL, "--size", "48,64", "--results", str(folder), "--name", "a"]) == 0
    said = capsys.readouterr()
    assert "only the ratios of one run mean anything" in said.out and "measuring" in said.err
    record = read_measurement(folder / "a.json")
    assert [row["side"] for row in record["rows"]] == [48, 64]
    row = record["rows"][0]
    assert row["images_per_s"] == pytest.approx(8e3 / row["ms_per_step"])
    low, high = row["images_per_s_range"]
    assert low <= row["images_per_s"] <= high and row["finite"]
    assert row["flop_per_s"] == pytest.approx(row["flop_per_image"] * row["images_per_s"])
    parts = row["ms_by_part"]
    assert set(parts) == {"data", "forward", "backward", "update", "rest", "read"}
    assert all(parts[name] > 0 for name in ("data", "forward", "backward", "read"))
    assert record["command"] == shlex.join(["kanerva", "bench", *SMALL, "--size", "48,64"])
    assert (folder / "a.png").stat().st_size > 5000
    assert row["config_hash"] == expected(size=48).config_hash()


def expected(size: int) -> RunConfig:
    start = preset("glyphs")
    model = with_options(start.model, memory={"size": size})
    return replace(start, model=model, episode_length=4)


def test_every_combination_is_measured():
    options = {
        "preset": "mnist,cifar10", "model": "kpp,kpp-paper", "precision": None,
        "episode_length": "8,16", "size": "32", "capacity": 64, "rows": None, "images": 256,
    }  # fmt: skip
    found = make_configs(options, "cpu")
    assert len(found) == 8
    assert {(c.preset, c.model.name, c.episode_length) for c in found} == {
        (p, m, t) for p in ("mnist", "cifar10") for m in ("kpp", "kpp-paper") for t in (8, 16)
    }
    assert all(c.batch * c.episode_length == 256 and c.model.memory.size == 32 for c in found)


def test_maps_get_as_many_floats_as_rows_have():
    options = dict.fromkeys(("precision", "episode_length", "size"))
    options |= {"preset": "mnist", "model": "dkm,kpp,kpp-paper", "rows": "32,512"}
    found = make_configs(options | {"capacity": None, "images": None}, "cpu")
    floats = [math.prod(build(c.model).memory_shape(32)) for c in found]
    assert floats[:2] == [3200, 51200]
    assert floats[2:] == pytest.approx(2 * floats[:2], rel=0.03)


def test_agreement_compares_with_the_first_form(capsys):
    flags = ["--preset", "glyphs", "--execution", "eager,eager", "--steps", "2"]
    assert main(["bench", "agreement", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("32-true") and "0.0e+00" in line for line in lines) == 2


def test_a_run_stops_at_a_bound(tmp_path: Path, small_run: RunConfig, mnist_root: Path):
    config = replace(small_run, steps=30, validate_every=10)
    outcome = train(config, tmp_path / "run", until=500.0, data_root=mnist_root)
    assert outcome.reason == "bound" and outcome.step % 10 == 0 and outcome.step < 30
    assert outcome.best_nll is not None and outcome.best_nll < 500
    assert train(config, tmp_path / "run", resume=True, data_root=mnist_root).step == 30


def test_time_to_a_bound_counts_from_the_start(tmp_path: Path, small_run, mnist_root: Path):
    row = quality.time_to_bound(
        replace(small_run, steps=40), tmp_path / "run", 500.0,
        every=10, data_root=mnist_root, accelerator="cpu",
    )  # fmt: skip
    assert row["reached"] and row["test_images"] == 50 and row["steps"] <= 40
    assert row["validation_nats"] < 500 and 300 < row["test_nats"] < 600
    assert 0 < row["seconds"] <= quality.since_start()
    line = report.table(
        {"kind": "quality", "command": "c", "device": "d", "versions": {}, "date": "e"}
        | {"rows": [row | {"note": "cold"}]}
    )
    assert "below 500.0 nats after" in line and "cold" in line
    assert "start of the process" not in line


def test_only_the_first_time_to_a_bound_includes_the_start_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys
):
    """Else the second row's time includes the first row's."""
    clock = iter((100.0, 110.0, 170.0))  # end of the first row; begin and end of the second
    outcome = Outcome("bound", 1, 1, 9.0, 1)
    score = Score(9.0, 9.0, 0.0, 0.0, 0.1, 50)
    for name, found in (("train", outcome), ("load", torch.nn.Module()), ("bound", score)):
        monkeypatch.setattr(quality, name, lambda *_, found=found, **__: found)
    monkeypatch.setattr(torch.nn.Module, "device", CPU, raising=False)
    monkeypatch.setattr(quality, "since_start", lambda: next(clock))
    words = ["--preset", "glyphs", "--model", "kpp,vae", "--until", "9", "--device", "cpu"]
    assert main(["bench", "quality", *words]) == 0
    said = capsys.readouterr().out
    assert "after 100.0 s" in said and "after 60.0 s" in said
    assert said.endswith("the first time includes the start of the process\n")


def row(**changes) -> dict:
    return {
        "model": "kpp", "preset": "mnist", "variant": "store", "precision": "bf16-mixed", "T": 32,
        "batch": 32, "K": 1, "side": 64, "memory": [3, 64, 64], "capacity": 36, "form": "captured",
        "images_per_s": 2e5, "images_per_s_range": [1.9e5, 2.1e5], "ms_per_step": 5.12,
        "ms_by_part": {"data": 0.1, "forward": 2.0, "backward": 3.0, "update": 0.2, "rest": 0.1,
                       "read": 0.01},
        "peak_gib": 1.2, "first_step_s": 50.0, "flop_per_image": 8e8, "flop_per_s": 1.6e14,
        "matrix_rate": 8e14, "matrix_share": 0.2, "times_first": 6.0,
    } | changes  # fmt: skip


def test_the_table_and_picture_of_a_gpu():
    rows = [row(form=form, times_first=1.0) for form in ("eager", "compiled", "captured")]
    rows += [row(T=t, batch=1024 // t, capacity=128) for t in (8, 32, 128)]
    rows += [row(side=s, memory=[3, s, s]) for s in (32, 128, 256)]
    rows += [row(model="dkm", side=None, memory=[1, n, 100]) for n in (32, 128, 512)]
    record = {
        "kind": "throughput", "command": "kanerva bench", "device": "NVIDIA H200",
        "versions": {"torch": "2.11"}, "date": "2026-11-15", "rows": rows,
    }  # fmt: skip
    text = report.table(record)
    assert "200000  (190000-210000)" in text and "20.0%" in text and "800 TFLOP/s" in text
    lines = text.splitlines()
    assert len({len(line) for line in lines[3 : 4 + len(rows)]}) == 1  # columns stand straight
    forms, lengths, sides, sizes = report.draw([record]).axes
    assert len(lengths.lines) == len(sides.lines) == 1
    assert len(forms.patches) == 4  # three forms of kpp, one of dkm
    assert {line.get_label() for line in sizes.lines} == {
        "mnist, kpp, captured", "mnist, dkm, captured"
    }  # fmt: skip
    assert list(lengths.lines[0].get_ydata()) == pytest.approx([5.0, 5.0, 5.0])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--episode-length", "8,x"], "--episode-length: must be whole numbers joined by commas"),
        (["--size", "9" * 5000], "--size: must be whole numbers joined by commas"),
        (["--precision", "fp4"], "--precision: must be 32-true or bf16-mixed, got fp4"),
        (["--execution", "captured", "--device", "cpu"], "captured is a CUDA graph"),
        (["--execution", "fast"], "unknown execution 'fast'"),
        (["--preset", "mnsit"], "unknown preset 'mnsit'"),
        (["--episode-length", "64"], "do not fit into a memory of memory.capacity=36"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["speed"], "what"),
    ],
)
def test_mistakes_get_one_line(flags: list[str], message: str, capsys):
    assert main(["bench", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2


def test_what_is_no_record_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"kind": "evaluation"}))
    with pytest.raises(UserError, match="not a record of kanerva bench"):
        read_measurement(tmp_path / "a.json")
    with pytest.raises(UserError, match="cannot read"):
        read_measurement(tmp_path / "b.json")


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    assert main(["bench", *SMALL, "--results", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert "cannot write to folder" in error and error.count("\n") == 1  # no line "measuring"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys):
    tmp_path.chmod(0o500)
    assert main(["bench", *SMALL, "--results", str(tmp_path / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err
