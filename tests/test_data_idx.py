"""idx files written here byte by byte, then read back; and the real files where they are."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from kanerva.data import fashion_mnist, mnist
from kanerva.data.download import RemoteFile
from kanerva.data.idx import load_idx_set, read_idx
from kanerva.data.loading import load
from kanerva.errors import UserError

SHARED = Path(os.environ.get("KANERVA_DATA") or Path(__file__).parents[2] / "shared" / "data")


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_set(folder: Path, images: np.ndarray, labels: np.ndarray, part: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 5), (2, 1, 3, 4)])
def test_values_of_any_shape_come_back_plain_and_gzipped(tmp_path: Path, shape: tuple[int, ...]):
    values = random_bytes(*shape)
    plain, zipped = tmp_path / "values", tmp_path / "values.gz"
    plain.write_bytes(idx_bytes(values))
    zipped.write_bytes(gzip.compress(idx_bytes(values)))
    for path in (plain, zipped):
        assert np.array_equal(read_idx(path).numpy(), values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:3],
        lambda raw: raw[:9],
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: b"\x00\x00\x0d" + raw[3:],  # float values
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, damage, suffix: str):
    raw = damage(idx_bytes(random_bytes(4, 3, 3)))
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    with pytest.raises(UserError) as error:
        read_idx(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-20], lambda raw: b"<html>" + raw])
def test_a_damaged_gzip_is_named_too(tmp_path: Path, spoil):
    path = tmp_path / "values.gz"
    path.write_bytes(spoil(gzip.compress(idx_bytes(random_bytes(400)))))
    with pytest.raises(UserError, match=r"values\.gz"):
        read_idx(path)


def test_the_end_of_the_training_file_is_for_validation(tmp_path: Path):
    images, labels = random_bytes(12, 5, 4), random_bytes(12)
    write_set(tmp_path, images, labels)
    train = load_idx_set("mnist", "train", tmp_path)
    validation = load_idx_set("mnist", "validation", tmp_path)
    assert train and validation and train.labels is not None and validation.labels is not None
    assert np.array_equal(train.images[:, 0].numpy(), images[:10])
    assert np.array_equal(validation.images[:, 0].numpy(), images[10:])
    assert train.labels.tolist() + validation.labels.tolist() == labels.tolist()
    assert load_idx_set("mnist", "test", tmp_path) is None


def test_the_dotted_names_are_found_and_labels_are_optional(tmp_path: Path):
    images = random_bytes(3, 4, 4)
    (tmp_path / "fashion_mnist").mkdir()
    (tmp_path / "fashion_mnist" / "t10k-images.idx3-ubyte").write_bytes(idx_bytes(images))
    found = load("fashion_mnist", "test", root=tmp_path)
    assert found.labels is None and found.image_shape == (1, 4, 4)
    assert np.array_equal(found.images[:, 0].numpy(), images)


def test_labels_that_do_not_match_the_images_are_refused(tmp_path: Path):
    write_set(tmp_path, random_bytes(3, 4, 4), random_bytes(4), part="t10k")
    with pytest.raises(UserError, match="4 labels for 3 images"):
        load_idx_set("mnist", "test", tmp_path)


@pytest.mark.skipif(not (SHARED / "mnist").is_dir(), reason="no MNIST here")
def test_mnist_is_split_and_as_noisy_as_stated():
    """45.5 nats of pixel noise per test image."""
    sizes = {split: len(load("mnist", split, root=SHARED)) for split in ("train", "validation")}
    test = load("mnist", "test", root=SHARED)
    assert sizes == {"train": 50_000, "validation": 10_000} and len(test) == 10_000
    bright = test.images.double() / 255
    entropy = torch.special.entr(bright) + torch.special.entr(1 - bright)
    assert entropy.flatten(1).sum(1).mean().item() == pytest.approx(45.5, abs=0.1)
    assert test.labels is not None and test.labels[:5].tolist() == [7, 2, 1, 0, 4]


@pytest.mark.parametrize(
    ("name", "files"), [("mnist", mnist.FILES), ("fashion_mnist", fashion_mnist.FILES)]
)
def test_the_known_hashes_are_those_of_the_files(name: str, files: tuple[RemoteFile, ...]):
    import hashlib

    if not (SHARED / name).is_dir():
        pytest.skip(f"no {name} here")
    for file in files:
        raw = (SHARED / name / file.name).read_bytes()
        assert hashlib.md5(raw).hexdigest() == file.md5
