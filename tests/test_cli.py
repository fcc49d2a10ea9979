"""The command line as a user types it: verbs work, mistakes get one line and exit 2."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import kanerva
from kanerva import cli
from kanerva.cli import main

SMALL = [
    "--preset", "mnist", "--encoder.width", "4", "--encoder.blocks", "[1,1,1,1]",
    "--memory.base", "8", "--memory.size", "16", "--memory.block", "8", "--keys.hidden", "8",
    "--readout.size", "4", "--readout.hidden", "8", "--readout.prior-width", "4",
    "--decoder.base", "8", "--episode-length", "8", "--batch", "2", "--validate-every", "4",
    "--validate-episodes", "2", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KANERVA_DATA", str(mnist_root))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    run = tmp_path_factory.mktemp("cli") / "run"
    options = ["--run", str(run), "--steps", "8", "--data-root", str(mnist_root)]
    assert main(["train", *SMALL, *options]) == 0
    return run


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that bad input gets."""
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("kanerva: "), lines
    return lines[0]


# What works


@pytest.mark.parametrize(
    "name, flags",
    [
        ("kpp-store", []),
        ("kpp-generate", ["--variant", "generate", "--memory.size", "8", "--memory.block", "1"]),
        ("kpp-paper", ["--model", "kpp-paper"]),
    ],
)
def test_train_resume_evaluate_compare(
    name: str, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    small = [*SMALL, *flags]
    assert main(["train", *small, "--steps", "4"]) == 0
    run = Path(f"runs/mnist-{name}-s0")
    assert yaml.safe_load((run / "config.yaml").read_text())["episode_length"] == 8
    assert main(["train", *small, "--steps", "8", "--resume"]) == 0
    with (run / "metrics.csv").open() as file:
        steps = [r["step"] for r in csv.DictReader(file) if r["split"] == "validation"]
    assert steps == ["4", "8"]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--iwae", "3", "--results", "results"]) == 0
    out = capsys.readouterr().out
    assert "bound" in out and "  zeroed" in out and "iwae_3" in out
    record = json.loads((run / "evaluation.json").read_text())
    filed = f"results/mnist/{name}-s0.json"
    assert record == json.loads(Path(filed).read_text())
    assert main(["compare", str(run), filed]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1] == lines[2]
    assert lines[1].split()[5] == f"{record['bound']['nll_nats']:.2f}"
    assert main(["compare", "results/mnist", filed, "--over-seeds"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4:6] == ["2", lines[1].split()[5]]
    if "kpp-paper" in flags:
        assert main(["generate", str(run), "--drawn"]) == 2
        assert "--drawn is for kpp" in capsys.readouterr().err


def test_a_run_says_what_its_config_says(trained: Path):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["memory"]["size"] == 16 and config["encoder"]["blocks"] == [1, 1, 1, 1]
    assert kanerva.load(trained).config.memory.size == 16


def test_config_file_then_flags(trained: Path):
    Path("mine.yaml").write_text("preset: mnist\nmemory: {channels: 2}\nseed: 5\n")
    argv = [*SMALL[2:], "--config", "mine.yaml", "--seed", "6", "--steps", "2"]
    assert main(["train", *argv]) == 0
    config = yaml.safe_load(Path("runs/mnist-kpp-store-s6/config.yaml").read_text())
    assert config["memory"]["channels"] == 2 and config["memory"]["size"] == 16


def test_pictures_are_drawn_from_test_data_and_from_files(trained: Path, capsys):
    images = []
    for index in range(3):
        Image.new("L", (28, 28), 60 * index).save(f"{index}.png")
        images.append(f"{index}.png")
    for argv in (
        ["generate", str(trained), "--num", "5"],
        ["generate", str(trained), "--num", "5", "--drawn"],
        ["recall", str(trained), "--steps", "2", "--cue", "lower_half_hidden"],
        ["denoise", str(trained), "--steps", "2"],
        ["recall", str(trained), *images, "--out", "mine.png", "--save-memory", "m.safetensors"],
        ["recall", str(trained), *images, "--out", "again.png", "--memory", "m.safetensors"],
    ):
        assert main(argv) == 0
        path = Path(capsys.readouterr().out.splitlines()[0])
        with Image.open(path) as picture:
            assert picture.width > 50 and picture.height > 50
    assert kanerva.Memory.load("m.safetensors").map.shape == (3, 16, 16)
    below = (0, 30, 200, 200)  # the first label names what was written, or what is asked for
    mine, again = (Image.open(f"{name}.png").crop(below).tobytes() for name in ("mine", "again"))
    assert mine == again


def test_evaluate_options_reach_the_record(trained: Path, mnist_root: Path):
    argv = ["evaluate", str(trained), "--split", "validation", "--episodes", "2", "--controls", "8"]
    assert main([*argv, "--variant", "wide", "--results", "results"]) == 0
    record = json.loads(Path("results/mnist/kpp-wide-s0-validation.json").read_text())
    assert record["split"] == "validation" and record["partial"] and record["n_images"] == 16
    assert record["controls"]["n_images"] == 8 and record["variant"] == "wide"
    assert (trained / "evaluation-validation-partial.json").is_file()


def test_fewer_bits_or_another_memory_never_replace_a_runs_own_record(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    part = ["evaluate", str(trained), "--episodes", "3", "--controls", "8"]
    file = ["--variant", "bits", "--results", "results"]
    assert main([*part, *file]) == 0
    own = (trained / "evaluation-partial.json").read_text()
    assert main([*part, "--memory-dtype", "int4"]) == 0
    assert main([*part, "--episode-length", "12", "--size", "32", "--capacity", "256"]) == 0
    assert (trained / "evaluation-partial.json").read_text() == own
    rounded = json.loads((trained / "evaluation-int4-partial.json").read_text())
    moved = json.loads((trained / "evaluation-T12-side32-partial.json").read_text())
    assert rounded["memory"]["bits_per_image"] == (3 * 16 * 16 * 4 + 32) / 8
    assert moved["memory"]["floats_per_image"] == 3 * 32 * 32 / 12
    assert moved["bound"]["kl_y"] == pytest.approx(math.log(256))
    assert rounded["bound"]["nll_nats"] != json.loads(own)["bound"]["nll_nats"]
    capsys.readouterr()
    assert "another memory" in complaint(capsys, *part, *file, "--memory-dtype", "int8")


def test_a_memory_is_drawn_without_what_was_freed(trained: Path, capsys):
    assert main(["memory", str(trained), "--free", "[1,2]"]) == 0
    path, said = capsys.readouterr().out.splitlines()
    assert said == "6 of 36 blocks held; handles 0, 3, 4, 5, 6, 7"
    with Image.open(path) as picture:
        assert picture.width > picture.height > 600
    assert "handle 9 is not held" in complaint(capsys, "memory", str(trained), "--free", "[9]")


def test_seed_and_spread_change_what_is_generated(trained: Path):
    for out, more in (("a", []), ("b", []), ("c", ["--seed", "3"]), ("d", ["--spread", "2"])):
        assert main(["generate", str(trained), "--num", "4", "--out", f"{out}.png", *more]) == 0
    a, b, c, d = (Path(f"{name}.png").read_bytes() for name in "abcd")
    assert a == b and len({a, c, d}) == 3


def test_data_list_says_what_is_here(capsys: pytest.CaptureFixture[str], mnist_root: Path):
    assert main(["data", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert " here " in lines["mnist"] and "not here" in lines["omniglot"]


@pytest.mark.parametrize("verb", ["train", "evaluate", "generate", "recall", "compare", "data"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    try:
        assert main([verb, "--help"]) == 0
    except SystemExit as stop:
        assert stop.code == 0
    out = capsys.readouterr().out
    assert f"usage: kanerva {verb}" in out and "_every" not in out


# What does not, one line each


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fly"], "unknown verb 'fly'"),
        (["train"], "--preset"),
        (["train", "--preset", "nope"], "unknown preset 'nope'"),
        (["train", "--preset", "mnist", "--memory.sise", "3"], "--memory.sise"),
        (["train", "--preset", "mnist", "--memory.size", "big"], "--memory.size: expected int"),
        (["train", "--preset", "mnist", "--memory.read", "soft", "--memory.size", "8"], "exceeds"),
        (["train", "--preset", "mnist", "--model", "gpt"], "unknown model 'gpt'"),
        (["train", "--preset", "mnist", "--variant", "shop"], "unknown variant 'shop'"),
        (["train", "--preset", "mnist", "--model", "kpp-paper", "--memory.read", "hard"], "cells"),
        (["train", "--preset", "mnist", "--memory.capacity", "37"], "use 36"),
        (["train", "--preset", "mnist", "--memory.reads", "2"], "memory.reads=1"),
        (["train", "--preset", "mnist", "--episode-length", "64"], "memory.capacity=36"),
        (["train", "--preset", "mnist", "--steps", "5", "--epochs", "2"], "--steps and --epochs"),
        (["train", "--preset", "mnist", "--steps", "0"], "steps"),
        (["train", "--preset", "mnist", "--minutes", "-1"], "--minutes"),
        (["train", "--preset", "omniglot"], "omniglot not found"),
        (["train", "--preset", "images"], "--data.folder"),
        (["train", "--preset", "images", "--data.folder", "nowhere"], "nowhere"),
        (["train", "--preset", "mnist", "--episode-length", "5000"], "episode_length=5000"),
        (["train", "--preset", "mnist", "--image", "[1,8,8]"], "image=(1, 8, 8)"),
        (["train", "--preset", "mnist", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--run", "nowhere", "--resume"], "nothing to resume at nowhere"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate"], "run"),
        (["generate", "nowhere"], "nowhere"),
        (["recall", "nowhere"], "nowhere"),
        (["compare", "nowhere.json"], "nowhere.json"),
        (["data", "fetch"], "kanerva data fetch NAME"),
        (["data", "fetch", "imagenet"], "imagenet"),
        (["data", "burn"], "burn"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_line(argv: list[str], says: str, capsys, tmp_path: Path):
    assert says in complaint(capsys, *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory: {sise: 3}", "unknown key 'sise'"),
        ("memory: {size: big}", "size must be int, got 'big'"),
        ("memory: 7", "memory"),
        ("seeed: 1", "unknown key 'seeed'"),
        ("- 1", "must hold options"),
        ("a: [", "not readable YAML"),
        ("optim: {optimiser: sgd}", "optimiser must be one of"),
    ],
)
def test_a_bad_config_names_file_and_key(text: str, says: str, capsys):
    Path("bad.yaml").write_text(text)
    line = complaint(capsys, "train", "--preset", "mnist", "--config", "bad.yaml")
    assert says in line and "bad.yaml" in line


def test_images_that_do_not_fit_are_named(trained: Path, capsys):
    Image.new("L", (30, 28)).save("wide.png")
    Path("note.txt").write_text("no image")
    Path("empty").mkdir()
    line = complaint(capsys, "recall", str(trained), "wide.png")
    assert "wide.png" in line and "30" in line and "--resize" in line
    assert "note.txt" in complaint(capsys, "recall", str(trained), "note.txt")
    assert "empty" in complaint(capsys, "recall", str(trained), "empty")
    assert main(["recall", str(trained), "wide.png", "--resize", "--out", "x.png"]) == 0


def test_a_run_is_not_overwritten_and_not_resumed_as_another(trained: Path, capsys):
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    line = complaint(capsys, "train", *SMALL, "--run", str(trained))
    assert "already holds a run" in line and "--resume" in line
    line = complaint(capsys, "train", "--run", str(trained), "--resume", "--memory.channels", "4")
    assert "memory.channels=3, not 4" in line
    assert before == {p: p.stat().st_mtime_ns for p in trained.rglob("*")}


def test_a_damaged_checkpoint_is_named(trained: Path, capsys, tmp_path: Path):
    import shutil

    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    weights = run / "checkpoints" / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    assert "model.safetensors" in complaint(capsys, "evaluate", str(run))
    config = run / "checkpoints" / "best" / "config.json"
    config.write_text(config.read_text().replace('"size"', '"sise"', 1))
    assert "unknown key 'sise'" in complaint(capsys, "generate", str(run))


def test_a_memory_that_does_not_fit_is_named(trained: Path, capsys):
    kanerva.Memory(torch.zeros(3, 12, 12)).save("other.safetensors")
    line = complaint(capsys, "recall", str(trained), "--memory", "other.safetensors")
    assert "(3, 12, 12)" in line
    Path("broken.safetensors").write_bytes(b"x" * 40)
    line = complaint(capsys, "recall", str(trained), "--memory", "broken.safetensors")
    assert "broken.safetensors" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_run_folder_is_named(capsys, tmp_path: Path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked" in complaint(capsys, "train", *SMALL, "--run", "locked/run")


def test_a_run_folder_under_a_file_is_named(capsys):
    Path("file").write_text("")
    assert "file" in complaint(capsys, "train", *SMALL, "--run", "file/run")
    assert "file" in complaint(capsys, "train", *SMALL, "--run", "file")


# As a process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_first(number: signal.Signals, code: int, tmp_path: Path):
    argv = [*SMALL, "--run", "run", "--steps", "100000", "--validate-every", "50000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kanerva", "train", *argv], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").is_file()


def test_non_finite_numbers_exit_3(capsys: pytest.CaptureFixture[str]):
    argv = [*SMALL, "--steps", "40", "--optim.lr", "1e30", "--run", "run", "--validate-every", "40"]
    assert main(["train", *argv]) == 3
    lines = capsys.readouterr().err.strip().splitlines()
    assert "not finite" in lines[-1] and "Traceback" not in "".join(lines)


def test_a_warning_is_one_line_and_the_compilers_own_are_not_shown(
    capsys: pytest.CaptureFixture[str],
):
    cli.warn("not kept:\n  no room", UserWarning, "/x/kanerva/data/cache.py", 3)
    cli.warn("check is deprecated", FutureWarning, "/x/torch/_prims_common/__init__.py", 3)
    cli.warn("softmax is disabled", UserWarning, "/x/torch/_inductor/ir.py", 3)
    assert capsys.readouterr().err == "kanerva: not kept: no room\n"
