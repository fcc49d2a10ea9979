"""A mistake gets one line that says what to do: see `mistakes.py`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import kanerva
from kanerva.cli.options import Parser
from kanerva.data import load_images
from kanerva.errors import UserError
from kanerva.models.base import MemoryModel

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """In a process of its own: here, shapes are checked before any code of ours runs."""
    script = [sys.executable, str(HERE / "mistakes.py")]
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    place = tmp_path_factory.mktemp("mistakes")
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(script, capture_output=True, text=True, cwd=place, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_every_mistake_is_told_in_one_line(found: dict[str, dict]):
    said = found["said"]
    assert len(said) >= 20
    for name, text in said.items():
        assert text and "\n" not in text and len(text) < 400, (name, text)
        raw = re.match(r"(\w+(Error|Exception|Exit)|nothing|exit \d+): ", text)
        assert raw is None and "Traceback" not in text, (name, text)


def test_lines_say_what_to_do(found: dict[str, dict]):
    said = found["said"]
    for name in ("numpy array", "list", "None", "uint8", "greys"):
        assert "kanerva.prepare(images, model)" in said[f"model.write({name})"]
    assert "[None]" in said["model.write(one image)"]
    assert "did you mean glyphs?" in said["kanerva.load('glpyhs')"]
    assert "did you mean glyphs?" in said["kanerva train --preset glyph"]
    assert "kanerva.load(NAME, capacity=40)" in said["model.write(too many)"]
    assert "make demo" in said["kanerva recall runs/none"]
    assert "--steps" in said["kanerva recall glyphs --stepz 3"]
    assert "model=" in said["kanerva.Store(made with a model, opened without)"]


def test_what_looks_wrong_but_is_clear_works(found: dict[str, dict]):
    assert found["works"] and all(found["works"].values()), found["works"]


def test_flags_may_stand_anywhere():
    parser = Parser()
    parser.add_option("run", type=str)
    parser.add_option("images", type=str, nargs="*", default=[])
    parser.add_argument("--resize", action="store_true")
    parser.add_option("--steps", type=int, default=1)
    words = ["--resize", "mnist", "--steps", "3", "a.png", "--resize", "b.png"]
    options = parser.parse_args(parser.words_first(words)).as_dict()
    assert options == {"run": "mnist", "images": ["a.png", "b.png"], "resize": True, "steps": 3}
    assert parser.words_first(["m", "--steps=3", "x", "--", "--y"])[-2:] == ["--", "--y"]


def test_a_folder_is_read_without_its_broken_files(tmp_path: Path):
    Image.new("L", (28, 28), 255).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="skipped 1 of 2 files, such as broken.png"):
        assert load_images([tmp_path], (1, 28, 28)).shape == (1, 1, 28, 28)
    with pytest.raises(UserError, match="broken.png"):  # a file that is named is meant
        load_images([tmp_path / "broken.png"], (1, 28, 28))


# What images a model takes


@pytest.fixture(scope="module")
def glyphs() -> MemoryModel:
    return kanerva.load("glyphs")


@pytest.fixture(scope="module")
def colour() -> MemoryModel:
    torch.manual_seed(0)
    return kanerva.build(kanerva.preset("images", image=(3, 16, 12)).model).eval()


def test_a_model_says_what_it_takes(glyphs: MemoryModel, colour: MemoryModel):
    assert (glyphs.pixels.image, glyphs.pixels.binary) == ((1, 28, 28), True)
    assert str(glyphs.pixels) == "1 x 28 x 28, 0 or 1, as floats"
    assert str(colour.pixels) == "3 x 16 x 12, 8-bit: k/255 on [0, 1], or uint8"


def test_prepare_takes_pictures_of_every_kind(glyphs: MemoryModel, colour: MemoryModel):
    grey = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    expected = torch.from_numpy((grey > 127)[:, None]).float()
    kinds = [
        grey,
        grey[:, None],
        grey[..., None],
        grey / 255,
        torch.from_numpy(grey),
        list(grey),
        [Image.fromarray(one) for one in grey],
        grey.astype(np.int64),
        expected.bool(),
        expected,
        expected.byte(),  # 0 and 1 are no greys
        expected.long().numpy(),
    ]
    for kind in kinds:
        assert torch.equal(kanerva.prepare(kind, glyphs), expected)
    one = kanerva.prepare(grey[0], glyphs)
    assert torch.equal(one, expected[:1])
    assert torch.equal(kanerva.prepare(expected[None], glyphs), expected[None])  # episodes
    pixels = np.random.default_rng(1).integers(0, 256, (2, 16, 12, 3), dtype=np.uint8)
    levels = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    for kind in (pixels, levels, list(pixels), [Image.fromarray(one) for one in pixels]):
        torch.testing.assert_close(kanerva.prepare(kind, colour), levels)
    torch.testing.assert_close(kanerva.prepare(pixels[0], colour), levels[:1])
    torch.testing.assert_close(kanerva.prepare(levels[0], colour), levels[:1])


def test_prepare_crops_resizes_and_changes_colours(glyphs: MemoryModel, colour: MemoryModel):
    picture = Image.new("RGB", (90, 40), "black")
    assert kanerva.prepare(picture, glyphs).shape == (1, 1, 28, 28)
    assert bool((kanerva.prepare(picture, glyphs) == 0).all())
    clear = Image.new("RGBA", (30, 30), (0, 0, 0, 0))  # what is transparent is white
    assert bool((kanerva.prepare([clear, picture], glyphs)[0] == 1).all())
    grey = kanerva.prepare(np.full((50, 50), 51, dtype=np.uint8), colour)
    assert grey.shape == (1, 3, 16, 12) and bool((grey * 255 == 51).all())


def test_prepare_names_a_picture_that_cannot_be_read(tmp_path: Path, glyphs: MemoryModel):
    Image.new("L", (300, 300), 255).save(tmp_path / "whole.bmp")
    (tmp_path / "cut.bmp").write_bytes((tmp_path / "whole.bmp").read_bytes()[:5000])
    with Image.open(tmp_path / "cut.bmp") as cut:
        with pytest.raises(UserError, match="cannot read a picture"):
            kanerva.prepare(cut, glyphs)


def test_prepare_warns_of_dark_ink_on_paper(glyphs: MemoryModel, colour: MemoryModel):
    """A model that knows white ink on black cannot hold it, and would not say so."""
    paper = Image.new("L", (28, 28), 255)
    paper.paste(0, (12, 4, 15, 24))
    with pytest.warns(UserWarning, match="white ink on black"):
        images = kanerva.prepare(paper, glyphs)
    assert torch.equal(kanerva.prepare(1 - images, glyphs), 1 - images)  # inverted: no warning
    kanerva.prepare(paper, colour)  # has no ink


def test_prepare_samples_with_a_generator(glyphs: MemoryModel):
    half = np.full((8, 28, 28), 100, dtype=np.uint8)
    pixels = kanerva.prepare(half, glyphs, generator=torch.Generator().manual_seed(0))
    assert 0.35 < float(pixels.mean()) < 0.43 and bool(((pixels == 0) | (pixels == 1)).all())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.full((28, 28), 2.0), "floats lie on"),
        (np.full((28, 28), np.nan), "floats lie on"),
        (np.full((28, 28), 256), "integers are 0 to 255"),
        (np.zeros((2, 5, 28, 28)), "1, 3 or 4 channels"),
        (np.zeros(28), "dimensions"),
        (np.zeros((4, 784)), "reshape"),
        ([], "no images"),
        ({}, "Pillow's"),
    ],
)
def test_prepare_refuses(glyphs: MemoryModel, wrong: object, message: str):
    with pytest.raises(UserError, match=message):
        kanerva.prepare(wrong, glyphs)


def test_what_is_written_or_scored_is_pixels_and_cues_are_any_numbers(
    glyphs: MemoryModel, colour: MemoryModel
):
    binary = torch.bernoulli(torch.full((2, 1, 28, 28), 0.2))
    levels = torch.randint(256, (2, 3, 16, 12)) / 255
    for model, images in ((glyphs, binary), (colour, levels)):
        memory = model.write(images)
        for wrong in (images + 1e-2 * torch.rand(images.shape), -images, images * 2, images / 0):
            for verb in (model.write, model.elbo):
                with pytest.raises(UserError):
                    verb(wrong)
            for verb in (model.append, model.familiarity):
                with pytest.raises(UserError):
                    verb(memory, wrong)
        cue = 3 * torch.randn(images.shape)
        assert model.recall(memory, cue, steps=1).isfinite().all()
        bytes_as_floats = (images * 255).round()
        for wrong in (bytes_as_floats, bytes_as_floats.long()):
            with pytest.raises(UserError, match="divide it by 255"):
                model.find(memory, wrong)
        with pytest.raises(UserError, match="divide it by 255"):
            model.recall(memory, bytes_as_floats)
        model.recall(memory, 255 * cue, steps=1)  # no bytes: any finite numbers may be a cue
        with pytest.raises(UserError, match="finite"):
            model.recall(memory, cue / 0)
        with pytest.raises(UserError, match="finite"):
            model.find(memory, cue / 0)
