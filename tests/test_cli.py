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
from typing import get_args

import pytest
import torch
import yaml
from PIL import Image

import kanerva
from kanerva import cli
from kanerva.cli import VERBS, main
from kanerva.cli.evaluate import MemoryDtype
from kanerva.cli.options import spell_flag
from kanerva.cli.recall import Cue
from kanerva.cli.train import read_config, to_flag
from kanerva.config import (
    MODEL_CONFIGS,
    RunConfig,
    flatten,
    option_names,
    run_from_dict,
    to_dict,
)
from kanerva.errors import UserError
from kanerva.evaluation.noise import CUES
from kanerva.memory.quantise import BITS
from kanerva.training.loop import Outcome

RUN = [
    "--preset", "mnist", "--encoder.width", "4", "--decoder.base", "8", "--readout.size", "4",
    "--readout.prior-width", "4", "--episode-length", "8", "--batch", "2",
    "--validate-every", "4", "--validate-episodes", "2", "--device", "cpu",
]  # fmt: skip
SMALL = [*RUN, "--encoder.depth", "1", "--decoder.depth", "1", "--memory.size", "18"]
PAPER = [
    *RUN, "--model", "kpp-paper", "--memory.base", "8", "--memory.size", "16",
    "--memory.block", "8", "--keys.hidden", "8", "--readout.hidden", "8",
]  # fmt: skip
HEAVY = ("torch", "matplotlib", "lightning_fabric", "torch._dynamo")


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
    "name, small",
    [("kpp-store", SMALL), ("kpp-paper", PAPER)],
)
def test_train_resume_evaluate_compare(
    name: str, small: list[str], capsys: pytest.CaptureFixture[str]
):
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
    assert capsys.readouterr().out.splitlines()[1].split()[4:6] == ["1", lines[1].split()[5]]


@pytest.mark.parametrize("best, warned", [(40, True), (79, True), (80, False), (100, False)])
def test_weights_that_are_best_before_the_rate_came_down_are_told_of(
    best: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    outcome = Outcome("finished", 100, 100, 9.0, best)
    monkeypatch.setattr("kanerva.training.loop.train", lambda *_, **__: outcome)
    assert main(["train", "--preset", "glyphs", "--run", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert (f"best at step {best}" in said) == warned
    assert best != 40 or "about --steps 50 may end lower" in said


def test_a_run_says_what_its_config_says(trained: Path):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["memory"]["size"] == 18 and config["encoder"]["depth"] == 1
    assert to_dict(kanerva.load(trained).config)["memory"]["size"] == 18


def test_config_file_then_flags(trained: Path):
    Path("mine.yaml").write_text("preset: mnist\nmemory: {channels: 2}\nseed: 5\n")
    argv = [*SMALL[2:], "--config", "mine.yaml", "--seed", "6", "--steps", "2"]
    assert main(["train", *argv]) == 0
    config = yaml.safe_load(Path("runs/mnist-kpp-store-s6/config.yaml").read_text())
    assert config["memory"]["channels"] == 2 and config["memory"]["size"] == 18


def test_pictures_are_drawn_from_test_data_and_from_files(trained: Path, capsys):
    images = []
    for index in range(3):
        Image.new("L", (28, 28), 60 * index).save(f"{index}.png")
        images.append(f"{index}.png")
    for argv in (
        ["generate", str(trained), "--num", "5"],
        ["generate", str(trained), "--num", "5", "--sample-pixels"],
        ["recall", str(trained), "--steps", "2", "--cue", "lower_half_hidden"],
        ["denoise", str(trained), "--steps", "2"],
        ["recall", str(trained), *images, "--out", "mine.png", "--save-memory", "m.safetensors"],
        ["recall", str(trained), *images, "--out", "again.png", "--memory", "m.safetensors"],
    ):
        assert main(argv) == 0
        path = Path(capsys.readouterr().out.splitlines()[0])
        with Image.open(path) as picture:
            assert picture.width > 50 and picture.height > 50
    assert kanerva.Memory.load("m.safetensors").map.shape == (3, 18, 18)
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
    assert main([*part, "--episode-length", "12", "--size", "48", "--capacity", "256"]) == 0
    assert (trained / "evaluation-partial.json").read_text() == own
    rounded = json.loads((trained / "evaluation-int4-partial.json").read_text())
    moved = json.loads((trained / "evaluation-T12-side48-partial.json").read_text())
    assert rounded["memory"]["bits_per_image"] == (3 * 18 * 18 * 4 + 32) / 8
    assert moved["memory"]["floats_per_image"] == 3 * 48 * 48 / 12
    assert moved["bound"]["kl_y"] == pytest.approx(math.log(256))
    assert rounded["bound"]["nll_nats"] != json.loads(own)["bound"]["nll_nats"]
    capsys.readouterr()
    assert "another memory" in complaint(capsys, *part, *file, "--memory-dtype", "int8")


def test_a_memory_is_drawn_without_what_was_freed(trained: Path, capsys):
    assert main(["memory", str(trained), "--free", "[1,2]"]) == 0
    path, said = capsys.readouterr().out.splitlines()
    assert said == "6 of 36 blocks held, 5184 bits; handles 0, 3, 4, 5, 6, 7"
    with Image.open(path) as picture:
        assert picture.width > picture.height > 600
    assert "handle 9 is not held" in complaint(capsys, "memory", str(trained), "--free", "[9]")


def test_seed_and_spread_change_what_is_generated(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", *PAPER, "--steps", "2", "--run", "paper"]) == 0
    for out, more in (("a", []), ("b", []), ("c", ["--seed", "3"]), ("d", ["--spread", "2"])):
        assert main(["generate", "paper", "--num", "4", "--out", f"{out}.png", *more]) == 0
    a, b, c, d = (Path(f"{name}.png").read_bytes() for name in "abcd")
    assert a == b and len({a, c, d}) == 3
    capsys.readouterr()
    line = complaint(capsys, "generate", str(trained), "--spread", "2")
    assert "kpp has no keys to move a little: leave out --spread" in line


def test_data_list_says_what_is_here(capsys: pytest.CaptureFixture[str], mnist_root: Path):
    assert main(["data", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert " here " in lines["mnist"] and "not here" in lines["omniglot"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: kanerva {verb}" in out and "--data_root" not in out and "_every" not in out


def test_help_shows_the_options_and_defaults_of_the_model(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--model", "dkm-tsm", "--preset", "glyphs", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--encoder.shift" in out and "--rows.charge" in out and "--memory.size" not in out
    assert "--encoder.width WIDTH Channels of the first stage; " in out  # the field's docstring
    assert "8 * width numbers. (type: int, default: 16)" in out  # glyphs' own, not the model's


def test_without_a_verb_usage_and_exit_2(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert "usage: kanerva VERB" in out and all(verb in out for verb in VERBS)
    assert main(["--help"]) == 0 and capsys.readouterr().out == out
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"{kanerva.__version__}\n"


def test_underscores_and_equals_signs_are_accepted():
    assert read_config(["--preset", "mnist"]).episode_length != 8
    words = ["--preset=mnist", "--episode_length=8", "--optim.weight_decay", "0"]
    config = read_config([spell_flag(word) for word in words])
    assert config.episode_length == 8 and config.optim.weight_decay == 0


def test_values_are_of_the_types_of_the_options():
    assert read_config(["--preset", "images", "--image", "3,8,8"]).model.image == (3, 8, 8)
    words = ["--data.crop", "null", "--optim.lr", "1e-3", "--image", "[3,8,8]", "--seed", "7"]
    config = read_config(["--preset", "cifar10", "--memory.outline", "false", *words])
    assert (config.data.crop, config.optim.lr, config.seed) == (None, 1e-3, 7)
    assert config.model.image == (3, 8, 8) and flatten(to_dict(config))["memory.outline"] is False


def test_choices_are_those_of_the_library():
    assert set(get_args(Cue)) == set(CUES) and set(get_args(MemoryDtype)) == set(BITS)


# What does not, one line each


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fly"], "unknown verb 'fly'"),
        (["tain"], "did you mean train?"),
        (["--verbose"], "unknown option --verbose"),
        (["generate", "glyphs", "--spred", "1"], "unknown option --spred; did you mean --spread?"),
        (["train"], "--preset"),
        (["train", "--preset", "nope"], "unknown preset 'nope'"),
        (["train", "--preset", "mnist", "--memory.sise", "3"], "did you mean --memory.size?"),
        (["train", "--preset", "mnist", "--resum"], "did you mean --resume?"),
        (["train", "--preset", "mnist", "--memory", "7"], "--memory is a group"),
        (["train", "--preset", "mnist", "--memory.size", "big"], "--memory.size: must be int"),
        (["train", "--preset", "mnist", "--likelihood", "gauss"], "--likelihood: must be one of"),
        (["train", "--preset", "mnist", "--image", "[1,2"], "--image: must be a list of 3 values"),
        (["train", "--preset", "mnist", "--steps"], "--steps: expected one argument"),
        (["train", "--preset", "mnist", "--model", "gpt"], "unknown model 'gpt'"),
        (["train", "--preset", "mnist", "--variant", "shop"], "unknown variant 'shop'"),
        (["train", "--preset", "mnist", "--memory.capacity", "37"], "use 36"),
        (["train", "--preset", "mnist", "--variant", "generate"], "retired; kpp-bits makes new"),
        (["train", "--preset", "mnist", "--keys.hidden", "9"], "kpp does not use --keys.hidden"),
        (["train", "--preset", "mnist", "--memory.placement", "cells"], "it was retired"),
        (["train", "--preset", "mnist", "--memory.reads", "2"],
         "kpp does not use --memory.reads (kpp-paper, no-memory do)"),
        (["train", "--preset", "mnist", "--encoder.shift", "0"],
         "kpp does not use --encoder.shift (kpp-paper, no-memory, dkm-tsm do)"),
        (["train", "--preset", "mnist", "--model", "dnc", "--rows.address", "4"],
         "dnc does not use --rows.address (km does)"),
        (["train", "--preset", "mnist", "--episode-length", "64"], "memory.capacity=36"),
        (["train", "--preset", "mnist", "--epochs", "2"], "unknown option --epochs; use --steps"),
        (["train", "--preset", "mnist", "--step", "eager"], "use --execution"),
        (["train", "--preset", "mnist", "--data.set", "omniglot"], "is not for data.set=omniglot"),
        (["train", "--preset", "mnist", "--steps", "0"], "steps"),
        (["train", "--preset", "mnist", "--minutes", "-1"], "--minutes"),
        (["train", "--preset", "mnist", "--minutes", "nan"], "--minutes"),
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
        (["data", "burn"], "action: must be one of list, fetch, got 'burn'"),
        (["recall", "nowhere", "--cue", "fog"], "--cue: must be one of salt_pepper"),
        (["recall", "nowhere", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["evaluate", "nowhere", "--episode-length", "0"], "--episode-length must be at least 1"),
        (["bench", "quality", "--preset", "glyphs"], "bench quality on glyphs needs --until"),
        (["bench", "--model", "dkm", "--size", "8"], "--size: dkm has no memory.size"),
        (["bench", "--size", "many"], "--size: must be whole numbers"),
        (["reproduce"], "kanerva reproduce NAME"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_line(argv: list[str], says: str, capsys, tmp_path: Path):
    assert says in complaint(capsys, *argv)
    assert not list(tmp_path.iterdir())


OPTIONS = {name: set(option_names(config)) for name, config in MODEL_CONFIGS.items()}
FOREIGN = [
    (model, option)
    for model, own in OPTIONS.items()
    for option in sorted(set().union(*OPTIONS.values()) - own)
]


def test_every_option_of_another_model_is_refused(capsys: pytest.CaptureFixture[str]):
    assert len(FOREIGN) > 100
    for model, option in FOREIGN:
        flag = to_flag(option)
        line = complaint(capsys, "train", "--preset", "glyphs", "--model", model, flag, "1")
        users = [name for name, own in OPTIONS.items() if option in own]
        assert line.startswith(f"kanerva: {model} does not use {flag} ({', '.join(users)} do")
        with pytest.raises(
            UserError, match=f"{model} does not use {option}|{option}=1 was retired"
        ):
            group, _, name = option.partition(".")
            run_from_dict({"model": model, group: {name: 1}})
    assert not list(Path().iterdir())


@pytest.mark.parametrize("model", MODEL_CONFIGS)
def test_every_option_of_a_model_is_a_flag(model: str):
    start = read_config(["--preset", "glyphs", "--model", model])
    options = flatten(to_dict(start))
    known = {*option_names(type(start.model)), *option_names(RunConfig), "model"}
    assert options.keys() == known
    words = [w for name, value in options.items() for w in (to_flag(name), yaml.safe_dump(value))]
    words = [word.removesuffix("\n").removesuffix("\n...") for word in words]
    assert read_config(words) == start


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory: {sise: 3}", "unknown option memory.sise; did you mean memory.size?"),
        ("memory: {size: big}", "size must be int, got 'big'"),
        ("memory: 7", "memory"),
        ("memory: {reads: 3}", "kpp does not use memory.reads (kpp-paper, no-memory do)"),
        ("rows: {count: 3}", "kpp does not use rows.count (km, dkm, dkm-tsm, dnc do)"),
        (
            "model: vae\nmemory: {size: 8}",
            "vae does not use memory.size (kpp, kpp-bits, kpp-empty, kpp-bits-empty, ",
        ),
        ("epochs: 3", "unknown option epochs; use steps"),
        ("likelihood: {kind: bernoulli}", "use likelihood"),
        ("seeed: 1", "unknown option seeed; did you mean seed?"),
        ("- 1", "must hold options"),
        ("a: [", "not readable YAML"),
        ("optim: {optimiser: sgd}", "optimiser must be one of"),
    ],
)
def test_a_bad_config_names_file_and_key(text: str, says: str, capsys):
    Path("bad.yaml").write_text(text)
    line = complaint(capsys, "train", "--preset", "mnist", "--config", "bad.yaml")
    assert says in line and "bad.yaml" in line


def test_a_long_run_on_a_cpu_begins_with_an_estimate(tmp_path: Path, capsys, monkeypatch):
    """And draws the numbers that it draws without one."""
    sizes = ["--encoder.width", "4", "--decoder.base", "8", "--validate-episodes", "1"]
    argv = ["train", "--preset", "glyphs", "--steps", "3", "--device", "cpu", *sizes]
    assert main([*argv, "--run", str(tmp_path / "short")]) == 0
    assert "about" not in capsys.readouterr().err
    monkeypatch.setattr("kanerva.cli.train.LONG", 3)
    assert main([*argv, "--run", str(tmp_path / "long")]) == 0
    said = capsys.readouterr().err
    assert "glyphs: 3 steps of 2 x 32 images 1x28x28, about a minute here" in said
    weights = [tmp_path / name / "checkpoints/last/model.safetensors" for name in ("short", "long")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


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
    assert "unknown option memory.sise" in complaint(capsys, "generate", str(run))


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


# What is loaded, and how soon


def loaded_after(program: str) -> set[str]:
    """The heavy modules that a program loads."""
    report = f"; import sys; print(*[name for name in {HEAVY} if name in sys.modules], sep=',')"
    done = subprocess.run(
        [sys.executable, "-c", program + report], capture_output=True, text=True, check=True
    )
    return set(filter(None, done.stdout.splitlines()[-1].split(",")))


def test_nothing_heavy_is_loaded_for_help_and_usage_errors():
    assert loaded_after("import torch") >= {"torch"}  # the check can fail
    calls = [["--help"], ["fly"], ["train"], ["train", "--preset", "mnist", "--memory.sise", "1"]]
    calls += [[verb, "--help"] for verb in VERBS] + [["bench", "--size", "x"], ["data", "fetch"]]
    program = "import kanerva, kanerva.cli, os, sys; sys.stdout = open(os.devnull, 'w')"
    program += (
        f"; codes = [kanerva.cli.main(words) for words in {calls}]; sys.stdout = sys.__stdout__"
    )
    program += "; assert set(codes) == {0, 2}, codes"
    assert loaded_after(program) == set()


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS)], ids=str)
def test_help_is_quick(words: list[str]):
    """0.3 s on a quiet core; the best of three, with room for a busy one."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call = [sys.executable, "-m", "kanerva", *words, "--help"]
        subprocess.run(call, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < (1.0 if words else 0.5) * 2


def test_training_without_fabric_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in [n for n in sys.modules if n.startswith("kanerva.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    line = complaint(capsys, "train", *SMALL)
    assert line == "kanerva: training needs lightning-fabric: pip install 'kanerva[train]'"
    assert not list(tmp_path.iterdir())


# As a process


def test_torchrun_needs_no_separator(tmp_path: Path, mnist_root: Path):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = [*SMALL, "--steps", "2", "--validate-every", "2", "--run-folder", "shared"]
    done = subprocess.run(
        [sys.executable, *start, "-m", "kanerva", "train", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shared: step 2 of 2")
    assert (tmp_path / "shared" / "checkpoints" / "best" / "model.safetensors").is_file()


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
    cli.print_warning("not kept:\n  no room", UserWarning, "/x/kanerva/data/cache.py", 3)
    cli.print_warning("check is deprecated", FutureWarning, "/x/torch/_prims_common/__init__.py", 3)
    cli.print_warning("softmax is disabled", UserWarning, "/x/torch/_inductor/ir.py", 3)
    assert capsys.readouterr().err == "kanerva: not kept: no room\n"
