"""Memory, what a user holds: files that survive, files that do not, and a picture."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kanerva.errors import UserError
from kanerva.memory import Memory


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8), (1, 5, 6, 7)])
def test_a_memory_comes_back_from_its_file_as_it_was(tmp_path: Path, shape: tuple[int, ...]):
    memory = Memory(torch.randn(shape))
    memory.save(tmp_path / "a.safetensors")
    back = Memory.load(str(tmp_path / "a.safetensors"))
    assert torch.equal(back.map, memory.map) and back.is_batch == memory.is_batch


def test_a_memory_that_still_carries_gradient_or_a_stride_can_be_saved(tmp_path: Path):
    whole = torch.randn(2, 8, 8, 3, requires_grad=True)
    Memory(whole.movedim(-1, 1)[1]).save(tmp_path / "m")
    assert torch.equal(Memory.load(tmp_path / "m").map, whole.movedim(-1, 1)[1].detach())


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path):
    for value in (0.0, 1.0):
        Memory(torch.full((1, 2, 2), value)).save(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert (Memory.load(tmp_path / "m").map == 1).all()


def damaged(folder: Path, kind: str) -> Path:
    path = folder / "m.safetensors"
    if kind == "missing":
        return path
    if kind == "folder":
        path.mkdir()
        return path
    Memory(torch.randn(3, 8, 8)).save(path)
    whole = path.read_bytes()
    if kind == "weights":
        save_file({"map": torch.zeros(3, 8, 8)}, path, metadata={"format": "pt"})
    elif kind == "no metadata":
        save_file({"map": torch.zeros(3, 8, 8)}, path)
    elif kind == "no map":
        save_file({"m": torch.zeros(3, 8, 8)}, path, metadata={"format": "kanerva-memory-1"})
    elif kind == "wrong rank":
        save_file(
            {"map": torch.zeros(1, 1, 3, 8, 8)}, path, metadata={"format": "kanerva-memory-1"}
        )
    else:
        cut = {
            "empty": b"",
            "truncated": whole[:-10],
            "header only": whole[:40],
            "text": b"hi\n" * 9,
        }
        path.write_bytes(cut[kind])
    return path


@pytest.mark.parametrize(
    "kind",
    ["missing", "folder", "empty", "truncated", "header only", "text", "weights", "no metadata"]
    + ["no map", "wrong rank"],
)
def test_a_file_that_is_no_memory_is_one_line_of_error(tmp_path: Path, kind: str):
    path = damaged(tmp_path, kind)
    with pytest.raises(UserError) as error:
        Memory.load(path)
    assert "\n" not in str(error.value)
    if kind != "wrong rank":
        assert str(path) in str(error.value)


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere"):
        Memory(torch.zeros(1, 2, 2)).save(tmp_path / "nowhere" / "m")


# Fails: the temporary file stays when the replacement does (heap.py:56).
def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "m").mkdir()
    with pytest.raises(UserError, match="m"):
        Memory(torch.zeros(1, 2, 2)).save(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_floats_counts_one_episodes_numbers():
    assert Memory(torch.zeros(3, 64, 64)).floats == 3 * 64 * 64
    assert Memory(torch.zeros(7, 3, 64, 64)).floats == 3 * 64 * 64


def test_a_batch_gives_its_episodes_memories():
    maps = torch.randn(3, 2, 4, 4)
    assert torch.equal(Memory(maps)[1].map, maps[1])
    with pytest.raises(UserError, match="one episode"):
        Memory(maps)[1][0]


def test_a_map_of_another_rank_is_an_error_that_gives_its_shape():
    with pytest.raises(UserError, match=r"\(1, 2, 3, 4, 4\)"):
        Memory(torch.zeros(1, 2, 3, 4, 4))


def test_a_memory_moves_and_keeps_its_numbers():
    maps = torch.randn(2, 4, 4)
    assert torch.equal(Memory(maps).to("cpu").map, maps)
    assert Memory(maps).to(torch.device("meta")).map.device.type == "meta"


@pytest.mark.parametrize(
    "shape, mode, size",
    [
        ((3, 8, 6), "RGB", (6, 8)),
        ((4, 3, 8, 6), "RGB", (24, 8)),  # a batch in a row
        ((2, 8, 6), "L", (12, 8)),  # channels side by side
        ((2, 5, 8, 6), "L", (60, 8)),
        ((1, 8, 6), "L", (6, 8)),
    ],
)
@pytest.mark.parametrize("scale", [1, 4])
def test_a_picture_has_a_square_for_every_cell(shape, mode: str, size, scale: int):
    picture = Memory(torch.randn(shape)).to_image(scale)
    assert picture.mode == mode
    assert picture.size == (size[0] * scale, size[1] * scale)


def test_a_picture_shows_the_map_from_its_lowest_to_its_highest_value():
    maps = torch.tensor([[[-3.0, 1.0], [0.0, 5.0]]])
    picture = Memory(maps).to_image(scale=1)
    assert [[picture.getpixel((x, y)) for x in (0, 1)] for y in (0, 1)] == [[0, 128], [96, 255]]


def test_colours_keep_their_channels():
    maps = torch.zeros(3, 1, 3)
    maps[0, 0, 0] = maps[1, 0, 1] = maps[2, 0, 2] = 1
    picture = Memory(maps).to_image(scale=1)
    reds = [picture.getpixel((x, 0)) for x in range(3)]
    assert reds == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_a_flat_memory_still_has_a_picture():
    assert Memory(torch.full((3, 2, 2), 7.0)).to_image().getpixel((0, 0)) == (0, 0, 0)
