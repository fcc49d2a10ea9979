"""The examples run, at toy size. Those of `BlockMemory` are in test_block_memory.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from kanerva.cli import main

FOLDER = Path(__file__).parents[1] / "examples"
SHARED = Path(__file__).parents[2] / "shared" / "data"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_of_ones_own_images(tmp_path: Path):
    module = example("own_images")
    folder = module.draw_folder(tmp_path / "mine", count=120)
    few = ["--steps", "3", "--image", "[3,16,16]", "--validate-episodes", "1", "--device", "cpu"]
    assert module.main(folder, tmp_path / "run", few) == 0
    for name in ("recall.png", "memory.png"):
        with Image.open(tmp_path / "run" / name) as image:
            assert image.width > 8 * 16 * 2


def test_malloc_and_free(tmp_path: Path):
    run = tmp_path / "run"
    small = ["--encoder.width", "4", "--decoder.base", "8", "--readout.prior-width", "4"]
    argv = ["train", "--preset", "glyphs", "--run", str(run), "--steps", "2", *small]
    assert main([*argv, "--validate-episodes", "1", "--device", "cpu"]) == 0
    picture = tmp_path / "heap.png"
    assert example("malloc_and_free").main(str(run), str(picture)) == 0
    with Image.open(picture) as image:
        assert image.height > image.width


def test_fewer_bits(tmp_path: Path):
    picture = tmp_path / "fewer_bits.png"
    bits = example("fewer_bits").main(str(picture))
    assert bits == sorted(bits, reverse=True) and bits[0] > 110
    # a block may exceed its cap, 16 bits, only by its last integer
    assert 16 <= bits[-1] < 20
    with Image.open(picture) as image:
        assert image.height > 500


@pytest.mark.skipif(not (SHARED / "omniglot").is_dir(), reason="no Omniglot here")
def test_dreams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KANERVA_DATA", str(SHARED))
    picture = tmp_path / "dreams.png"
    example("dreams").main(str(picture))
    with Image.open(picture) as image:
        assert image.height > 300


def test_every_example_has_a_test():
    tested = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert all(f'"{path.stem}"' in tested for path in FOLDER.glob("*.py"))


def test_a_folder_of_photographs_in_a_store(tmp_path: Path, capsys):
    module = example("find_photographs")
    folder = module.paint_folder(tmp_path / "mine", count=120)
    picture = module.main(folder, steps=2, work=tmp_path / "work")
    with Image.open(picture) as image:
        assert image.width > 4 * 32
    said = capsys.readouterr().out
    found = [line.split(": ")[1] for line in said.splitlines() if "png" in line and "none" in line]
    assert [name.split()[0] for name in found[:4]] == ["0007.png"] * 4
    assert found[0].endswith("1.000, none of them 0.000") and found[4].endswith(
        "none of them 1.000"
    )
    assert "0 found after" in said
