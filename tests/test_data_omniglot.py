"""Omniglot from npz, zip and folder: the same drawings give the same pixels in the same order."""

import os
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kanerva.data import omniglot
from kanerva.data.loading import load
from kanerva.data.omniglot import load as load_omniglot
from kanerva.errors import UserError

SHARED = Path(os.environ.get("KANERVA_DATA") or Path(__file__).parents[2] / "shared" / "data")
# Alphabets whose published numbers run against the order of their names.
CHARACTERS = [("Zulu", 1), ("Zulu", 2), ("Arcadian", 1), ("Arcadian", 2), ("Arcadian", 3)]
DRAWERS = 4


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def paper() -> np.ndarray:
    """Strokes of black on white, True for paper, as published."""
    random = np.random.default_rng(0)
    drawings = np.ones((len(CHARACTERS), DRAWERS, 105, 105), bool)
    for drawing in drawings.reshape(-1, 105, 105):
        for row, column in random.integers(0, 90, (6, 2)):
            drawing[row : row + 12, column : column + 3] = False
    return drawings


def pngs(paper: np.ndarray, first: int):
    """(path in the archive, PNG bytes), out of order as archives are."""
    for number, (alphabet, character) in reversed(list(enumerate(CHARACTERS))):
        for drawer in range(DRAWERS):
            raw = BytesIO()
            Image.fromarray(paper[number, drawer]).save(raw, "png")
            name = f"{first + number:04d}_{drawer + 1:02d}.png"
            yield f"{alphabet}/character{character:02d}/{name}", raw.getvalue()


def write_zip(path: Path, paper: np.ndarray, first: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in pngs(paper, first):
            archive.writestr(f"{path.stem}/{name}", raw)


def test_npz_zip_and_folder_agree(tmp_path: Path, paper: np.ndarray):
    npz, zipped, folder = tmp_path / "npz", tmp_path / "zip", tmp_path / "folder"
    for place in (npz, zipped, folder):
        place.mkdir()
    np.savez_compressed(npz / "images_evaluation.npz", images=paper)
    write_zip(zipped / "images_evaluation.zip", paper, 965)
    for name, raw in pngs(paper, 965):
        path = folder / "images_evaluation" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    expected = load_omniglot("test", npz)
    assert expected is not None and expected.labels is not None
    assert expected.labels.tolist() == [c for c in range(964, 969) for _ in range(DRAWERS)]
    for place in (zipped, folder):
        found = load_omniglot("test", place)
        assert found is not None and found.labels is not None
        assert torch.equal(found.images, expected.images)
        assert torch.equal(found.labels, expected.labels)


def test_ink_is_bright_and_resized_as_pillow_does(tmp_path: Path, paper: np.ndarray):
    np.savez(tmp_path / "images_evaluation.npz", images=paper)
    found = load_omniglot("test", tmp_path)
    ink = Image.fromarray(np.where(paper[2, 1], 0, 255).astype(np.uint8))
    small = np.asarray(ink.resize((28, 28), Image.Resampling.BILINEAR))
    assert found is not None
    assert np.array_equal(found.images[2 * DRAWERS + 1, 0].numpy(), small)
    assert found.images.float().mean() < 64


def test_background_is_parted_into_training_and_validation(tmp_path: Path, paper: np.ndarray):
    write_zip(tmp_path / "images_background.zip", paper, 1)
    train, validation = load_omniglot("train", tmp_path), load_omniglot("validation", tmp_path)
    assert train is not None and validation is not None
    assert (len(train), len(validation)) == (16, 4)
    both = {image.numpy().tobytes() for image in torch.cat([train.images, validation.images])}
    assert len(both) == 20
    assert load_omniglot("test", tmp_path) is None


def test_the_second_time_comes_from_the_cache_until_the_source_changes(
    tmp_path: Path, paper: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "images_evaluation.zip"
    write_zip(source, paper, 965)
    first = load_omniglot("test", tmp_path)
    monkeypatch.setattr(omniglot, "resize_ink", lambda ink: np.zeros((28, 28), np.uint8))
    second = load_omniglot("test", tmp_path)
    assert first is not None and second is not None
    assert torch.equal(first.images, second.images)
    os.utime(source, (1, 1))
    third = load_omniglot("test", tmp_path)
    assert third is not None and third.images.max() == 0


@pytest.mark.parametrize("name", ["images_evaluation.zip", "images_evaluation.npz"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, paper: np.ndarray, name: str):
    write_zip(tmp_path / "whole.zip", paper, 965)
    raw = (tmp_path / "whole.zip").read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError) as error:
        load_omniglot("test", tmp_path)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_spoilt_drawing_in_a_sound_looking_zip_is_noticed(tmp_path: Path, paper: np.ndarray):
    source = tmp_path / "images_evaluation.zip"
    write_zip(source, paper, 965)
    raw = bytearray(source.read_bytes())
    raw[300] ^= 0xFF
    source.write_bytes(raw)
    with pytest.raises(UserError, match=r"images_evaluation\.zip: not readable as Omniglot"):
        load_omniglot("test", tmp_path)


def test_a_zip_of_something_else_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "images_evaluation.zip", "w") as archive:
        archive.writestr("readme.txt", "no drawings")
    with pytest.raises(UserError, match="holds no drawings"):
        load_omniglot("test", tmp_path)


@pytest.mark.skipif(not (SHARED / "omniglot").is_dir(), reason="no Omniglot here")
def test_omniglot_is_split_and_as_noisy_as_stated():
    """65.5 nats of pixel noise per test image, 61.7 per background image (data/README.md)."""
    sets = {
        split: load("omniglot", split, root=SHARED) for split in ("train", "validation", "test")
    }
    assert {split: len(found) for split, found in sets.items()} == {
        "train": 17_280,
        "validation": 2_000,
        "test": 13_180,
    }
    background = torch.cat([sets["train"].images, sets["validation"].images])
    for images, nats in ((background, 61.7), (sets["test"].images, 65.5)):
        bright = images.double() / 255
        entropy = torch.special.entr(bright) + torch.special.entr(1 - bright)
        assert entropy.flatten(1).sum(1).mean().item() == pytest.approx(nats, abs=0.06)
    labels = [sets[split].labels for split in ("train", "test")]
    assert labels[0] is not None and labels[1] is not None
    assert labels[0].max() == 963 and labels[1].min() == 964 and labels[1].max() == 1622


def test_characters_know_their_alphabets():
    """Published numbers: Angelic/character01 is 0965, Malayalam/character05 is 1276,
    Sylheti/character25 is 1527, Tibetan/character14 is 1569."""
    numbers = {965: "Angelic", 1276: "Malayalam", 1527: "Sylheti", 1569: "Tibetan", 1623: "ULOG"}
    found = omniglot.alphabets_of(torch.tensor(list(numbers)) - 1)
    assert [list(omniglot.ALPHABETS)[i] for i in found.tolist()] == list(numbers.values())
    assert sum(omniglot.ALPHABETS.values()) == 659 and len(omniglot.ALPHABETS) == 20
    assert min(omniglot.ALPHABETS.values()) >= 20  # twenty ways within each
    with pytest.raises(ValueError, match="evaluation set"):
        omniglot.alphabets_of(torch.tensor([12, 1000]))
