"""`kanerva bench latency`, and threads that sleep while they wait."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kanerva
from kanerva.cli import main

SOURCE = Path(__file__).parents[1] / "src"


def test_one_call_of_each_verb_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["bench", "latency", "--preset", "glyphs", "--held", "3", "--steps", "1"]
    assert main([*words, "--device", "cpu", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "latency-glyphs.json").read_text())
    verbs = [row["verb"] for row in record["rows"]]
    assert {"write one image", "find", "recall", "nearest neighbour, numpy"} <= set(verbs)
    assert {row["held"] for row in record["rows"]} == {3}
    for row in record["rows"]:
        assert 0 < row["least_ms"] <= row["ms"] <= row["most_ms"] and row["first_ms"] > 0
    said = capsys.readouterr().out
    assert "familiarity" in said and "first ms" in said
    assert main(["bench", "latency", "--preset", "glyphs", "--held", "100000"]) == 2
    assert "test images" in capsys.readouterr().err
    assert main(["bench", "latency", "--preset", "cifar10"]) == 2  # none ships


def test_latency_is_of_shipped_models_only_and_each_row_names_its_own(
    tmp_path: Path,
    mnist_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("KANERVA_DATA", str(mnist_root))
    words = ["bench", "latency", "--held", "2", "--steps", "1", "--device", "cpu"]
    words += ["--preset", "glyphs,mnist", "--results", str(tmp_path)]
    assert main([*words, "--model", "vae"]) == 2
    error = capsys.readouterr().err
    assert "leave out --model" in error and error.count("\n") == 1
    assert main(words) == 0
    record = json.loads((tmp_path / "latency-glyphs-mnist.json").read_text())
    own = {name: kanerva.load(name).config.name for name in ("glyphs", "mnist")}
    assert {row["preset"]: row["model"] for row in record["rows"]} == own
    assert record["model"] == ",".join(dict.fromkeys(own.values()))
    lines = capsys.readouterr().out.splitlines()
    for name, model in own.items():
        assert sum(line.split()[:2] == [name, model] for line in lines) == len(record["rows"]) / 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "PASSIVE None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "100"}, "None 100"),
    ],
)
def test_threads_sleep_while_they_wait_unless_the_user_says(given: dict[str, str], expected: str):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment |= given | {"PYTHONPATH": str(SOURCE)}
    ask = "import os, sys, kanerva; assert 'torch' not in sys.modules; "
    ask += "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True)
    assert found.stdout.decode().strip() == expected
