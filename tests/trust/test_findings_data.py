"""Data files that were altered, that pretend, that unpack to more than any memory holds."""

import gzip
import os
import resource
import struct
import tarfile
import threading
import tracemalloc
import warnings
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kanerva.data import cifar10, download, loading, omniglot
from kanerva.data.array_files import damage_named, read_npy
from kanerva.data.idx import read_idx
from kanerva.data.images import load_images, split_of
from kanerva.data.packing import Packing, packed
from kanerva.data.picture_files import open_picture
from kanerva.errors import UserError

MEGABYTE = 2**20


def bomb(size: int) -> bytes:
    """So many zeros, gzipped: a thousandth of them."""
    whole = BytesIO()
    with gzip.GzipFile(fileobj=whole, mode="wb", compresslevel=1) as file:
        for _ in range(size // MEGABYTE):
            file.write(bytes(MEGABYTE))
    return whole.getvalue()


@pytest.fixture
def frugal():
    """The test fails if it takes more than 300 MB of Python's and numpy's memory at once."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * MEGABYTE


def write_cifar(place: Path, member: str = "test_batch.bin", records: int = 20) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    content = np.random.default_rng(0).integers(0, 256, records * cifar10.RECORD, dtype=np.uint8)
    path = place / cifar10.ARCHIVE
    with tarfile.open(path, "w:gz") as archive:
        about = tarfile.TarInfo(f"cifar-10-batches-bin/{member}")
        about.size = content.nbytes
        archive.addfile(about, BytesIO(content.tobytes()))
    return path


# 1: a flipped bit


def test_1_a_flipped_bit_of_cifar10_is_noticed(tmp_path: Path):
    """Noise is stored as it is, so that a flipped bit unpacks well: only the checksum tells."""
    path = write_cifar(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a complete archive"):
        cifar10.load("test", tmp_path)


def test_1_a_file_that_claims_to_be_the_published_one_is_compared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_cifar(tmp_path / "cifar10")
    size = path.stat().st_size
    monkeypatch.setattr(
        cifar10, "FILES", (download.RemoteFile(path.name, "http://example.org", "0" * 32, size),)
    )
    with pytest.raises(UserError, match="is not the published file"):
        loading.load("cifar10", "test", tmp_path)
    path.write_bytes(path.read_bytes() + b"more")  # of another size, it makes no such claim
    with pytest.raises(UserError, match="not a complete archive"):
        loading.load("cifar10", "test", tmp_path)


# 3: pictures


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\nshowpage\n%%EOF\n"


@pytest.fixture
def omniglot_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path / "cache"))

    def place(content: bytes) -> Path:
        with zipfile.ZipFile(tmp_path / "images_evaluation.zip", "w") as archive:
            archive.writestr("images_evaluation/0965_01.png", content)
        return tmp_path

    return place


def test_3_an_eps_in_omniglots_zip_reaches_no_interpreter(omniglot_place, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("was run"))
    with pytest.raises(UserError, match="not readable as Omniglot"):
        omniglot.load("test", omniglot_place(EPS))


@pytest.mark.parametrize("side", [2_000, 15_000])
def test_3_a_drawing_of_too_many_pixels_is_refused(omniglot_place, side: int, frugal):
    content = BytesIO()
    Image.new("1", (side, side)).save(content, "png")
    with pytest.raises(UserError, match="too many pixels"):
        omniglot.load("test", omniglot_place(content.getvalue()))


# 9: bombs


def test_9_an_idx_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, frugal):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    count = 2**30 // 784
    head = gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28))
    path.write_bytes(head + bomb(count * 784 // MEGABYTE * MEGABYTE))
    with pytest.raises(UserError, match="bytes, more than"):
        read_idx(path)


def test_9_an_idx_file_that_goes_on_after_its_values_is_not_read_on(tmp_path: Path, frugal):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    head = gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 1, 28, 28) + bytes(784))
    path.write_bytes(head + bomb(1024 * MEGABYTE))
    with pytest.raises(UserError, match="longer than it says"):
        read_idx(path)


def test_9_a_cifar_bomb_is_refused(tmp_path: Path, frugal):
    with tarfile.open(tmp_path / cifar10.ARCHIVE, "w:gz", compresslevel=1) as archive:
        for name in ("padding", "test_batch.bin"):
            about = tarfile.TarInfo(name)
            about.size = 600 * MEGABYTE
            with open("/dev/zero", "rb") as zeros:
                archive.addfile(about, zeros)
    with pytest.raises(UserError, match="unpacks to more than"):
        cifar10.load("test", tmp_path)


def test_9_an_omniglot_bomb_is_refused(tmp_path: Path, monkeypatch, frugal):
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(
        tmp_path / "images_evaluation.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1
    ) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as member:
            head = {"descr": "|b1", "fortran_order": False, "shape": (1024, 1, 1024, 1024)}
            np.lib.format.write_array_header_1_0(member, head)
            for _ in range(1024):
                member.write(bytes(MEGABYTE))
    with pytest.raises(UserError, match="bytes, more than"):
        omniglot.load("test", tmp_path)


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("mode", ["I;16", "RGBA"])
def test_9_a_deep_or_transparent_picture_takes_little_more_than_its_pixels(
    tmp_path: Path, mode: str
):
    """25 million pixels: 50 or 100 MB as they are. As 64-bit numbers they were 200, twice."""
    Image.new(mode, (5000, 5000)).save(tmp_path / "a.png", compress_level=1)
    before, peak, done = rss(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], rss() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        open_picture(tmp_path / "a.png", channels=1)
    done.set()
    watcher.join()
    assert peak[0] < 220 * MEGABYTE


# 12 and 13: oddities


def test_12_npy_files_that_are_odd_are_one_line(tmp_path: Path):
    path = tmp_path / "a.npy"
    for shape in ("(-1, 64, 64, 3)", "(99999999999, 64, 64, 3)", "(True,)", "(1, 64, 64, '3')"):
        head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n")
        with pytest.raises(UserError, match=r"a\.npy"), damage_named(path, "an array"):
            read_npy(path)


def test_12_a_member_that_is_encrypted_or_oddly_packed_is_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "images_evaluation.zip", "w") as archive:
        archive.writestr("0965_01.png", bytes(100))
    path = tmp_path / "images_evaluation.zip"
    whole = path.read_bytes()
    central = whole.index(b"PK\x01\x02")
    for local, entry, value in ((6, 8, 1), (8, 10, 77)):  # flags: encrypted; method: unknown
        content = bytearray(whole)
        content[local], content[central + entry] = value, value
        path.write_bytes(content)
        with pytest.raises(UserError, match="not readable as Omniglot"):
            omniglot.load("test", tmp_path)


def test_12_a_file_name_that_is_not_utf8_is_a_name(tmp_path: Path):
    name = os.fsdecode(b"caf\xe9.png")
    Image.new("L", (28, 28)).save(tmp_path / name)
    assert split_of(name) in ("train", "validation", "test")
    found = loading.load("images", split_of(name), folder=tmp_path, size=(28, 28), channels=1)
    assert len(found) == 1


def test_13_a_pipe_in_place_of_packed_images_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KANERVA_CACHE", str(tmp_path))

    def fill(packing: Packing) -> None:
        packing.add(np.ones((2, 1, 4, 4), np.uint8))

    packed("some", "key", 2, (1, 4, 4), fill)
    (images,) = tmp_path.glob("built/some-*/images.npy")
    images.unlink()
    os.mkfifo(images)
    assert packed("some", "key", 2, (1, 4, 4), fill).images.shape == (2, 1, 4, 4)
    assert images.is_file()


def test_13_a_pipe_named_like_a_picture_does_not_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.png"):
        load_images([tmp_path / "a.png"], (1, 28, 28))
