"""CelebA in its published layout, written here: faces that are numbered, some missing or broken."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kanerva.config import DataConfig, RunConfig
from kanerva.data import celeba, is_present, picture_files
from kanerva.data.loading import fetch, load
from kanerva.data.splits import load_split
from kanerva.errors import UserError
from kanerva.presets import preset

PARTITION = ("0", "0", "1", "0", "2", "0", "2")  # of 000001.jpg to 000007.jpg


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KANERVA_CACHE", str(folder))
    return folder


def face(number: int) -> Image.Image:
    """178 x 218: a soft pattern that survives JPEG, another for each number."""
    down, across = np.mgrid[:218, :178]
    waves = [np.sin((down * (number + c) + across * (3 - c)) / 40) for c in range(3)]
    return Image.fromarray((127 + 120 * np.stack(waves, -1)).astype(np.uint8))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for number in range(1, 8):
        face(number).save(folder / f"{number:06d}.jpg", quality=95)
    lines = [f"{number:06d}.jpg {split}" for number, split in enumerate(PARTITION, start=1)]
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def expected(path: Path) -> torch.Tensor:
    with Image.open(path) as picture:
        small = picture.resize((64, 64), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(small).transpose(2, 0, 1).copy())


def test_the_partition_file_decides_and_pictures_are_squeezed_whole(root: Path):
    assert is_present("celeba", root)
    numbers = {"train": [1, 2, 4, 6], "validation": [3], "test": [5, 7]}
    for split, members in numbers.items():
        found = load("celeba", split, root)
        assert (found.name, found.split, found.image_shape) == ("celeba", split, (3, 64, 64))
        for image, number in zip(found.images, members, strict=True):
            file = root / "celeba" / "img_align_celeba" / f"{number:06d}.jpg"
            assert torch.equal(image, expected(file))


def test_a_crop_is_a_square_about_the_centre(root: Path):
    cropped = load("celeba", "validation", root, crop=148)
    file = root / "celeba" / "img_align_celeba" / "000003.jpg"
    with Image.open(file) as picture:
        square = picture.crop((15, 35, 163, 183)).resize((64, 64), Image.Resampling.LANCZOS)
    assert np.array_equal(cropped.images[0].permute(1, 2, 0).numpy(), np.asarray(square))
    assert not torch.equal(cropped.images, load("celeba", "validation", root).images)


def test_the_second_load_decodes_nothing(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = load("celeba", "train", root).fingerprint()
    monkeypatch.setattr(celeba, "open_picture", None)
    assert load("celeba", "train", root).fingerprint() == first
    assert not list((cache / "built").glob("*.tmp"))  # nothing half written is left


def test_another_file_crop_or_partition_is_packed_anew(root: Path):
    before = load("celeba", "test", root)
    file = root / "celeba" / "img_align_celeba" / "000005.jpg"
    face(40).save(file, quality=95)
    after = load("celeba", "test", root)
    assert torch.equal(after.images[0], expected(file))
    assert torch.equal(after.images[1], before.images[1])
    (root / "celeba" / "list_eval_partition.txt").write_text("000001.jpg 2\n")
    assert len(load("celeba", "test", root)) == 1


def test_missing_and_broken_files_are_left_out_counted_and_said_each_time(root: Path):
    folder = root / "celeba" / "img_align_celeba"
    (folder / "000002.jpg").unlink()
    whole = (folder / "000004.jpg").read_bytes()
    (folder / "000004.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "000006.jpg").write_bytes(b"")
    for _ in range(2):
        with pytest.warns(UserWarning) as said:
            found = load("celeba", "train", root)
        assert [str(warning.message) for warning in said] == [
            f"{folder}: 1 of 4 train images are missing, such as 000002.jpg",
            f"{folder}: skipped 2 of 3 files, such as 000004.jpg: not an image that Pillow reads",
        ]
        assert len(found) == 1 and torch.equal(found.images[0], expected(folder / "000001.jpg"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("celeba", "test", root)  # nothing amiss there


def test_a_split_of_which_nothing_is_left_is_an_error(root: Path):
    folder = root / "celeba" / "img_align_celeba"
    (folder / "000003.jpg").write_bytes(b"no")
    with pytest.raises(UserError, match="1 of 1 files cannot be read"):
        load("celeba", "validation", root)
    (folder / "000003.jpg").unlink()
    with pytest.raises(UserError, match="holds none of the 1 validation images"):
        load("celeba", "validation", root)
    with pytest.warns(UserWarning, match="too small for crop=200"):
        Image.new("RGB", (220, 230)).save(folder / "000005.jpg")
        assert len(load("celeba", "test", root, crop=200)) == 1


def test_a_bomb_and_a_pipe_are_left_out(root: Path, monkeypatch: pytest.MonkeyPatch):
    folder = root / "celeba" / "img_align_celeba"
    (folder / "000001.jpg").unlink()
    os.mkfifo(folder / "000001.jpg")  # opening it would wait for ever
    Image.new("1", (10_000, 10_000)).save(folder / "000002.jpg", "PNG", compress_level=1)
    with (
        pytest.warns(UserWarning, match="1 of .* images are missing, such as 000001.jpg"),
        pytest.warns(UserWarning, match="skipped 1 .* 10000 x 10000 is too many pixels"),
    ):
        assert len(load("celeba", "train", root)) == 2
    monkeypatch.setattr(picture_files, "MAX_SET", 1000)
    with pytest.raises(UserError, match=r"2 images of 3 x 64 x 64 are 0\.0 GB, more than"):
        load("celeba", "test", root)


@pytest.mark.parametrize(
    "text, complaint",
    [
        (b"000001.jpg 0\n000002.jpg\n", "line 2 is '000002.jpg', expected something like"),
        (b"000001.jpg 3\n", "line 1 is '000001.jpg 3'"),
        (b"../000001.jpg 0\n", "line 1 is '../000001.jpg 0'"),
        (b"/etc/passwd 0\n", "line 1 is '/etc/passwd 0'"),
        (b"000001.jpg 1\n", "names no train images"),
        (b"", "names no train images"),
        (b"\xff\xd8\xff", "not a list of images and splits"),
    ],
)
def test_a_partition_file_that_is_none_is_one_line(root: Path, text: bytes, complaint: str):
    (root / "celeba" / "list_eval_partition.txt").write_bytes(text)
    with pytest.raises(UserError, match=complaint) as error:
        load("celeba", "train", root)
    assert "list_eval_partition.txt" in str(error.value) and "\n" not in str(error.value)


def test_the_publishers_own_folders_are_found_too(root: Path):
    images = load("celeba", "train", root).images
    folder = root / "celeba"
    for name, parent in (("img_align_celeba", "Img"), ("list_eval_partition.txt", "Eval")):
        (folder / parent).mkdir()
        (folder / name).rename(folder / parent / name)
    assert is_present("celeba", root)
    assert torch.equal(load("celeba", "train", root).images, images)


@pytest.mark.parametrize("gone", ["img_align_celeba", "list_eval_partition.txt"])
def test_a_missing_set_says_where_it_was_looked_for_and_what_to_do(root: Path, gone: str):
    (root / "celeba" / gone).rename(root / "elsewhere")
    assert not is_present("celeba", root)
    with pytest.raises(UserError) as error:
        load("celeba", "test", root)
    assert str(error.value) == (
        f"celeba not found in {root}: put img_align_celeba/ and list_eval_partition.txt from "
        "mmlab.ie.cuhk.edu.hk into celeba/, or point --data-root or $KANERVA_DATA at a folder "
        "that holds celeba/"
    )
    with pytest.raises(UserError, match="celeba cannot be fetched: put img_align_celeba/"):
        fetch("celeba", root)


# The crop as an option of a run


def test_a_run_crops_when_asked(root: Path):
    run = preset("celeba")
    cropped = replace(run, data=replace(run.data, crop=120))
    whole, square = load_split(run, "test", root), load_split(cropped, "test", root)
    assert torch.equal(square.images, load("celeba", "test", root, crop=120).images)
    assert not torch.equal(square.images, whole.images)


def test_a_crop_is_for_celeba_and_positive(tmp_path: Path):
    with pytest.raises(UserError, match="data.crop must be positive, got 0"):
        DataConfig(set="celeba", crop=0)
    with pytest.raises(UserError, match="crop=9 is for the data set celeba, not for images"):
        load("images", "train", folder=tmp_path, crop=9)
    with pytest.raises(UserError, match="crop=9 is for the data set celeba, not for mnist"):
        load("mnist", "train", tmp_path, crop=9)


def test_a_crop_changes_what_was_trained():
    plain, cropped = (
        RunConfig(data=DataConfig(set="celeba", crop=crop)).config_hash() for crop in (None, 148)
    )
    assert plain != cropped
