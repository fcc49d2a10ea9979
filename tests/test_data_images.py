"""Folders and files of pictures: written here in several formats, broken ones among them."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kanerva.data import images, packing, picture_files
from kanerva.data.images import load_folder, load_images
from kanerva.errors import UserError

SPLITS = ("train", "validation", "test")


def picture(seed: int, height: int = 8, width: int = 8) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KANERVA_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty PNGs in a tree."""
    for number in range(60):
        path = tmp_path / "set" / f"part{number % 3}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    return tmp_path / "set"


def as_set(pixels: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in pixels}


def test_every_image_is_in_exactly_one_split_unchanged(folder: Path):
    splits = [as_set(load_folder(folder, split, (8, 8), 3).images) for split in SPLITS]
    expected = {np.asarray(picture(n)).transpose(2, 0, 1).tobytes() for n in range(60)}
    assert set.union(*splits) == expected and sum(map(len, splits)) == 60
    assert len(splits[0]) > 35


def test_one_more_image_moves_no_other(folder: Path):
    before = {split: as_set(load_folder(folder, split, (8, 8)).images) for split in SPLITS}
    picture(99).save(folder / "another.png")
    for split in SPLITS:
        assert before[split] <= as_set(load_folder(folder, split, (8, 8)).images)


def test_a_large_folder_is_dealt_as_a_small_one_is(folder: Path, monkeypatch: pytest.MonkeyPatch):
    small = [load_folder(folder, split, (8, 8)).fingerprint() for split in SPLITS]
    monkeypatch.setattr(images, "SMALL_FOLDER", 10)
    assert small == [load_folder(folder, split, (8, 8)).fingerprint() for split in SPLITS]


@pytest.mark.parametrize("count", range(3, 12))
def test_three_images_are_enough_for_three_splits(tmp_path: Path, count: int):
    for number in range(count):
        picture(number).save(tmp_path / f"{number}.png")
    (tmp_path / "0broken.png").write_bytes(b"not a picture")
    with pytest.warns(UserWarning, match=r"skipped 1 of \d+ files, such as 0broken\.png"):
        sizes = [len(load_folder(tmp_path, split, (8, 8))) for split in SPLITS]
    assert min(sizes) >= 1 and sum(sizes) == count


def test_other_shapes_are_cropped_about_the_centre(tmp_path: Path):
    """A wide picture: red, green and blue thirds. The green one is kept."""
    wide = np.zeros((12, 36, 3), np.uint8)
    for channel in range(3):
        wide[:, 12 * channel : 12 * channel + 12, channel] = 255
    Image.fromarray(wide).save(tmp_path / "wide.bmp")
    pixels = load_images([tmp_path / "wide.bmp"], (3, 6, 6), resize=True)
    assert pixels[0, 1, :, 1:-1].min() == 255 and pixels[0, [0, 2], :, 1:-1].max() == 0
    assert pixels[0, 1].min() > 200  # only the edge blends with what was cropped


@pytest.mark.parametrize("suffix", ["png", "webp", "gif", "bmp", "tiff", "jpg"])
def test_formats_are_read_in_grey(tmp_path: Path, suffix: str):
    grey = Image.fromarray(np.full((8, 8), 200, np.uint8))
    grey.save(tmp_path / f"grey.{suffix}")
    pixels = load_images([tmp_path], (1, 8, 8))
    assert pixels.shape == (1, 1, 8, 8) and (pixels.int() - 200).abs().max() <= 1


def test_transparency_is_white_and_sixteen_bits_keep_their_upper_byte(tmp_path: Path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "a_clear.png")
    Image.fromarray(np.full((4, 4), 0x8012, np.uint16)).save(tmp_path / "b_deep.png")
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30] * 256)
    palette.save(tmp_path / "c_palette.png", transparency=bytes([255]))
    pixels = load_images([tmp_path], (3, 4, 4))
    assert pixels[0].min() == 255 and pixels[1].unique().tolist() == [0x80]
    assert pixels[2, :, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("most", [1.0, 255.0, 65280.0])
def test_floats_are_scaled_as_other_levels_are(tmp_path: Path, most: float):
    Image.fromarray(np.array([[0, most / 2, most]], np.float32)).save(tmp_path / "float.tiff")
    levels = load_images([tmp_path], (1, 1, 3)).flatten().tolist()
    assert levels in ([0, 127, 255], [0, 128, 255]) if most < 256 else levels == [0, 127, 255]


def test_a_photograph_on_its_side_is_set_upright(tmp_path: Path):
    turned = Image.new("L", (4, 2))
    turned.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees, clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    pixels = load_images([tmp_path / "turned.png"], (1, 4, 2))
    assert pixels[0, 0, 0].tolist() == [0, 255]


def test_files_keep_the_order_given_and_folders_that_of_their_names(folder: Path):
    given = [folder / "part1" / "04.png", folder / "part0"]
    expected = [4, *range(0, 60, 3)]
    pixels = load_images(given, (3, 8, 8))
    for image, number in zip(pixels, expected, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(picture(number)))


def test_a_wrong_size_names_file_size_and_remedy(tmp_path: Path):
    picture(0, height=9, width=7).save(tmp_path / "odd.png")
    with pytest.raises(UserError, match=r"odd\.png: 7 x 9 where 8 x 8 is needed: use --resize"):
        load_images([tmp_path / "odd.png"], (3, 8, 8))
    assert load_images([tmp_path / "odd.png"], (3, 8, 8), resize=True).shape == (1, 3, 8, 8)


def test_a_truncated_or_huge_picture_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    picture(0, 64, 64).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:3000])
    with pytest.raises(UserError, match=r"half\.png: not an image"):
        load_images([tmp_path / "half.png"], (3, 64, 64))
    monkeypatch.setattr(picture_files, "MAX_PIXELS", 64 * 64 - 1)
    with pytest.raises(UserError, match=r"whole\.png: 64 x 64 is too many pixels"):
        load_images([tmp_path / "whole.png"], (3, 64, 64))


@pytest.mark.parametrize("width", [10_000, 20_000])  # over our limit; over Pillow's too
def test_a_bomb_is_refused_without_unpacking_it(tmp_path: Path, width: int):
    Image.new("1", (width, 10_000)).save(tmp_path / "bomb.png", compress_level=1)
    with pytest.raises(UserError, match=r"bomb\.png"):
        load_images([tmp_path / "bomb.png"], (1, 8, 8), resize=True)


def test_missing_empty_and_unreadable_folders_are_errors(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load_folder(tmp_path / "nowhere", "train")
    with pytest.raises(UserError, match="nowhere: no such file"):
        load_images([tmp_path / "nowhere"], (3, 8, 8))
    with pytest.raises(UserError, match="holds no images"):
        load_folder(tmp_path, "train")
    (tmp_path / "a.png").write_bytes(b"no")
    with pytest.raises(UserError, match="1 of 1 files cannot be read"):
        load_folder(tmp_path, "train")


def test_hidden_files_and_other_files_are_passed_over(tmp_path: Path):
    for name in ("a.png", ".hidden.png", ".cache/b.png"):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(0).save(path)
    (tmp_path / "set" / "notes.txt").write_text("notes")
    assert len(load_images([tmp_path / "set"], (3, 8, 8))) == 1


def test_two_channels_are_refused(folder: Path):
    with pytest.raises(UserError, match="channels=2"):
        load_folder(folder, "train", (8, 8), channels=2)


# Limits


def test_a_file_too_large_to_be_a_picture_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for number in range(4):
        picture(number).save(tmp_path / f"{number}.png")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(picture_files.MAX_FILE + 1)  # takes no room on the disk
    with pytest.raises(UserError, match=r"huge\.png: 256000001 bytes is too large a file"):
        load_images([tmp_path / "huge.png"], (3, 8, 8))
    with pytest.warns(UserWarning, match=r"skipped 1 of 5 files, such as huge\.png: 256000001 by"):
        load_folder(tmp_path, "train", (8, 8))


def test_bombs_in_a_folder_are_counted_among_the_skipped(folder: Path):
    Image.new("1", (10_000, 10_000)).save(folder / "0bomb.png", compress_level=1)
    Image.new("1", (20_000, 10_000)).save(folder / "1bomb.png", compress_level=1)
    with pytest.warns(UserWarning, match=r"skipped 2 of 62 files, such as 0bomb\.png: 10000 x 100"):
        load_folder(folder, "train", (8, 8))
    with pytest.raises(UserError, match=r"1bomb\.png: too many pixels"):
        load_images([folder / "1bomb.png"], (1, 8, 8), resize=True)


def test_more_pixels_than_any_set_needs_are_refused_before_decoding(folder: Path):
    side = 40_000
    with pytest.raises(UserError) as error:
        load_folder(folder, "train", (side, side))
    assert str(error.value) == (
        f"{folder}: 60 images of 3 x 40000 x 40000 are 288.0 GB, more than 32.0: "
        "use fewer or smaller ones"
    )
    with pytest.raises(UserError, match=r"60 images of 3 x 40000 x 40000 are 288\.0 GB"):
        load_images([folder], (3, side, side), resize=True)


def test_a_file_is_what_its_bytes_are_and_only_in_known_formats(tmp_path: Path):
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    picture(0).save(tmp_path / "a.png", "EPS")
    with pytest.raises(UserError, match=r"a\.png: not an image"):
        load_images([tmp_path / "a.png"], (3, 8, 8))
    picture(0).save(tmp_path / "b.jpg", "PNG")
    assert len(load_images([tmp_path / "b.jpg"], (3, 8, 8))) == 1


def test_pipes_and_broken_links_are_passed_over(folder: Path):
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to(folder / "nothing.png")
    (folder / "folder.png").mkdir()
    assert sum(len(load_folder(folder, split, (8, 8))) for split in SPLITS) == 60


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "tiff", "bmp", "ppm"])
def test_every_cut_and_many_flips_of_a_file_are_errors_or_pictures(tmp_path: Path, suffix: str):
    """Nothing but one line may come of a broken file."""
    path = tmp_path / f"a.{suffix}"
    picture(0, 16, 16).save(path)
    raw = path.read_bytes()
    random = np.random.default_rng(0)
    broken = [raw[:end] for end in range(0, len(raw), max(1, len(raw) // 40))]
    for _ in range(60):
        flipped = bytearray(raw)
        for place in random.integers(0, min(len(raw), 120), 3):
            flipped[place] = random.integers(256)
        broken.append(bytes(flipped))
    refused = 0
    for content in broken:
        path.write_bytes(content)
        try:
            assert load_images([path], (3, 8, 8), resize=True).shape == (1, 3, 8, 8)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 20


# Packed folders


@pytest.fixture
def large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sixty, treated as a large one."""
    monkeypatch.setattr(images, "SMALL_FOLDER", 10)
    monkeypatch.setattr(images, "PACKED_FROM", 0)
    return folder


def test_a_packed_folder_holds_the_same_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
):
    plain = [load_folder(folder, split, (8, 8)).fingerprint() for split in SPLITS]
    assert not (cache / "built").exists()  # a small one is read each time
    monkeypatch.setattr(images, "SMALL_FOLDER", 10)
    monkeypatch.setattr(images, "PACKED_FROM", 0)
    assert plain == [load_folder(folder, split, (8, 8)).fingerprint() for split in SPLITS]
    assert len(list((cache / "built").glob("images-*/images.npy"))) == 3
    monkeypatch.setattr(images, "open_picture", None)  # a second time nothing is decoded
    assert plain == [load_folder(folder, split, (8, 8)).fingerprint() for split in SPLITS]


def test_size_channels_and_changed_files_are_packed_anew(large: Path):
    first = load_folder(large, "train", (8, 8))
    assert load_folder(large, "train", (4, 8)).image_shape == (3, 4, 8)
    assert load_folder(large, "train", (8, 8), channels=1).image_shape == (1, 8, 8)
    named = dict(images.image_files(large))
    picture(500).save(next(named[name] for name in named if images.split_of(name) == "train"))
    again = load_folder(large, "train", (8, 8))
    assert (again.images != first.images).flatten(1).any(1).sum() == 1


def test_an_older_file_of_the_same_size_is_packed_anew(large: Path):
    """As `cp -p`, `unzip` and `rsync -a` leave it; and two files that have changed names."""
    train = [path for name, path in images.image_files(large) if images.split_of(name) == "train"]
    for number, path in enumerate(train):
        picture(number).save(path.with_suffix(".bmp"))  # all of one size
        path.unlink()
        os.utime(path.with_suffix(".bmp"), ns=(0, 10**18 + number))
    named = images.image_files(large)
    one, other = [path for name, path in named if images.split_of(name) == "train"][:2]
    before = load_folder(large, "train", (8, 8))
    picture(500).save(one)
    os.utime(one, ns=(0, 10**17))
    replaced = load_folder(large, "train", (8, 8))
    assert (replaced.images != before.images).flatten(1).any(1).tolist()[:2] == [True, False]
    for source, target in ((one, "kept"), (other, one), (large / "kept", other)):
        source.rename(large / target)
    swapped = load_folder(large, "train", (8, 8))
    assert torch.equal(swapped.images[:2], replaced.images[:2].flip(0))


def test_what_a_packed_folder_skipped_is_said_each_time(large: Path):
    name = next(n for n in map(str, range(100)) if images.split_of(f"{n}.png") == "test")
    (large / f"{name}.png").write_bytes(b"no")
    for _ in range(2):
        with pytest.warns(UserWarning, match=rf"skipped 1 of \d+ files, such as {name}\.png"):
            load_folder(large, "test", (8, 8))
    for _, path in images.image_files(large):
        path.write_bytes(b"no")
    with pytest.raises(UserError, match=r"(\d+) of \1 files cannot be read"):
        load_folder(large, "train", (8, 8))


def test_an_interrupted_packing_leaves_nothing_and_is_begun_again(
    large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing.Packing, "finish", interrupt)
        load_folder(large, "train", (8, 8))
    assert not list((cache / "built").glob("*images*/*"))
    (draft,) = (lock.with_suffix(".tmp") for lock in (cache / "built").glob(".*.lock"))
    draft.mkdir()
    (draft / "images.npy").write_bytes(b"half")  # as a kill would leave it
    assert len(load_folder(large, "train", (8, 8))) > 35 and not draft.exists()


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


TOGETHER = """
import sys, time
from pathlib import Path
from kanerva.data import images

images.SMALL_FOLDER, images.PACKED_FROM = 10, 0
plain, decoded = images.open_picture, []

def slow(path, channels):
    decoded.append(path)
    time.sleep(0.01)
    return plain(path, channels)

images.open_picture = slow
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(images.load_folder(Path(sys.argv[1]), "train", (8, 8)).fingerprint(), len(decoded))
"""


def test_of_two_processes_one_packs_and_the_other_waits(folder: Path, tmp_path: Path):
    command = [sys.executable, "-c", TOGETHER, str(folder), str(tmp_path / "go")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (tmp_path / "go").touch()
    said = sorted(process.communicate()[0].split() for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][0] == said[1][0] == load_folder(folder, "train", (8, 8)).fingerprint()
    counts = sorted(int(count) for _, count in said)
    assert counts[0] == 0 and counts[1] > 35


def test_reading_leaves_the_filters_of_warnings_as_they_were(folder: Path):
    before = list(warnings.filters)
    load_folder(folder, "train", (8, 8))
    load_images([folder], (3, 8, 8))
    assert list(warnings.filters) == before
