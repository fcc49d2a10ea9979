"""CIFAR-10 batches written here record by record, as a folder and as the published archive."""

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from kanerva.data.cifar10 import load as load_cifar10
from kanerva.data.loading import load
from kanerva.errors import UserError

PER_BATCH, TEST = 4, 3


@pytest.fixture
def batches() -> dict[str, np.ndarray]:
    """Six files of records: a label, then red, green and blue planes."""
    random = np.random.default_rng(0)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    records = {}
    for name in names:
        records[name] = random.integers(
            0, 256, (TEST if "test" in name else PER_BATCH, 3073), dtype=np.uint8
        )
        records[name][:, 0] %= 10
    return records


def write_folder(root: Path, batches: dict[str, np.ndarray]) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, records in batches.items():
        (folder / name).write_bytes(records.tobytes())


def write_archive(root: Path, batches: dict[str, np.ndarray]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in reversed(batches):  # the published archive is in no useful order either
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = batches[name].nbytes
            archive.addfile(member, BytesIO(batches[name].tobytes()))
    return path


def test_folder_and_archive_give_each_split(tmp_path: Path, batches: dict[str, np.ndarray]):
    write_folder(tmp_path / "a", batches)
    write_folder(tmp_path / "b" / "cifar10", batches)
    write_archive(tmp_path / "c", batches)
    write_archive(tmp_path / "d" / "cifar10", batches)
    training = np.concatenate([batches[f"data_batch_{number}.bin"] for number in range(1, 6)])
    expected = {"train": training[:18], "validation": training[18:]}
    expected["test"] = batches["test_batch.bin"]
    for place in "abcd":
        for split, records in expected.items():
            found = load("cifar10", split, root=tmp_path / place)
            assert found.labels is not None and found.labels.tolist() == records[:, 0].tolist()
            assert np.array_equal(found.images.numpy(), records[:, 1:].reshape(-1, 3, 32, 32))


def test_a_red_record_is_a_red_image(tmp_path: Path, batches: dict[str, np.ndarray]):
    batches["test_batch.bin"][0] = [3] + [255] * 1024 + [0] * 2048
    write_folder(tmp_path, batches)
    found = load_cifar10("test", tmp_path)
    assert found is not None
    assert found.images[0, 0].min() == 255 and found.images[0, 1:].max() == 0


def test_a_batch_cut_short_is_named(tmp_path: Path, batches: dict[str, np.ndarray]):
    write_folder(tmp_path, batches)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"data_batch_3\.bin is truncated: 12287 bytes"):
        load_cifar10("train", tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"data_batch_3\.bin missing"):
        load_cifar10("validation", tmp_path)
    assert load_cifar10("test", tmp_path) is not None


@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_an_archive_cut_short_is_named(tmp_path: Path, batches: dict[str, np.ndarray], keep: int):
    path = write_archive(tmp_path, batches)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError) as error:
        load_cifar10("train", tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_cifar_is_none(tmp_path: Path):
    assert load_cifar10("test", tmp_path) is None
