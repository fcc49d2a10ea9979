"""Memory, what a user holds: files that survive, files that do not, a picture, and a heap whose
handles stay what they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kanerva.config import (
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
)
from kanerva.errors import UserError
from kanerva.files import write_tensors
from kanerva.memory.heap import Memory
from kanerva.memory.map_picture import principal_components
from kanerva.models.kpp import Kpp


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


def test_a_deep_memory_is_shown_by_the_three_directions_in_which_it_differs_most():
    """Ten channels of which three directions hold all there is: distances between pixels stay."""
    directions = torch.linalg.qr(torch.randn(10, 3)).Q
    colours = torch.randn(3, 20) * torch.tensor([5.0, 2.0, 1.0])[:, None]
    maps = (directions @ colours).view(10, 4, 5) + torch.randn(10, 1, 1)
    found = principal_components(maps).flatten(1)
    torch.testing.assert_close(torch.cdist(found.T, found.T), torch.cdist(colours.T, colours.T))
    assert found.var(1).tolist() == sorted(found.var(1).tolist(), reverse=True)
    batch = torch.stack([maps, torch.randn(10, 4, 5)])
    picture = Memory(batch).to_image(scale=2)
    assert picture.mode == "RGB" and picture.size == (20, 8)
    assert Memory(torch.randn(12, 1, 2)).to_image(scale=1).size == (2, 1)  # fewer pixels than three


# The heap

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])


def heap() -> Kpp:
    """A `kpp` of milliseconds with room for eight: two rows of four cells, 8 x 4 pixels each."""
    config = KppConfig(
        image=(1, 8, 8),
        encoder=KppEncoderConfig(width=8, depth=1),
        memory=KppMemoryConfig(channels=2, size=16, capacity=8),
        readout=KppReadoutConfig(size=4, channels=1, prior_width=8),
        decoder=KppDecoderConfig(base=8, depth=1),
    )
    model = Kpp(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for _ in range(10):
            model(images(20)[None, :8])  # running statistics of some images
    return model.eval()


def images(count: int) -> Tensor:
    return torch.bernoulli(torch.rand(count, 1, 8, 8))


def as_they_lie(memory: Memory) -> dict[int, tuple[int, list[float]]]:
    """Handle to slot and point, by hand: the middle of one of 2 x 4 cells."""

    def middle(slot: int) -> list[float]:
        return [(2 * (slot % 4) + 1) / 4 - 1, (2 * (slot // 4) + 1) / 2 - 1]

    slots = {handle: memory.slot_of(handle) for handle in memory.handles}
    return {handle: (slot, middle(slot)) for handle, slot in slots.items()}


def by_hand(model: Kpp, memory: Memory, written: dict[int, Tensor]) -> Tensor:
    """The map as the sum of the blocks of some images, each sliced into its handle's cell."""
    total = torch.zeros_like(memory.map)
    for handle, image in written.items():
        block = model.writer(model.encoder(image[None, None]), image[None, None])[0, 0].detach()
        slot = memory.slot_of(handle)
        top, left = slot // 4 * 8, slot % 4 * 4
        total[:, top : top + 8, left : left + 4] += block
    return total


def test_handles_stay_what_they_are_through_free_and_append():
    model = heap()
    memory = model.write(images(5))
    assert memory.handles == [0, 1, 2, 3, 4] and len(memory) == 5 and memory.capacity == 8
    before = as_they_lie(memory)
    less = memory.free(1, 3)
    assert less.handles == [0, 2, 4] and len(less) == 3 and less.capacity == 8
    more = model.append(less, images(4))
    assert more.handles == [0, 2, 4, 5, 6, 7, 8]  # 1 and 3 are never given out again
    after = as_they_lie(more)
    assert all(after[handle] == before[handle] for handle in (0, 2, 4))
    assert len({slot for slot, _ in after.values()}) == 7
    assert memory.handles == [0, 1, 2, 3, 4]  # what was there is another memory still


def test_a_map_is_the_sum_of_what_is_held():
    """Written, freed and appended in turn: each block by hand, whatever happened in between."""
    model, first, second = heap(), images(6), images(3)
    memory = model.append(model.write(first).free(4, 0), second)
    memory = memory.free(2, 7)
    held = {1: first[1], 3: first[3], 5: first[5], 6: second[0], 8: second[2]}
    assert memory.handles == sorted(held)
    torch.testing.assert_close(memory.map, by_hand(model, memory, held), rtol=1e-4, atol=1e-4)


def test_what_is_not_freed_is_untouched():
    """In cells bit for bit, and a freed cell is zeros exactly."""
    model = heap()
    memory = model.write(images(8))
    less = memory.free(6)
    changed = (less.map != memory.map).any(0)
    assert changed.any()
    slot = memory.slot_of(6)
    top, left = slot // 4 * 8, slot % 4 * 4
    cell = torch.zeros(16, 16, dtype=torch.bool)
    cell[top : top + 8, left : left + 4] = True
    assert torch.equal(changed, cell) and (less.map[:, cell] == 0).all()
    everything = memory.free(*memory.handles)
    assert torch.equal(everything.map, torch.zeros(2, 16, 16))
    assert everything.handles == [] and len(everything) == 0


def test_a_full_memory_takes_no_more_until_something_is_freed():
    model = heap()
    memory = model.write(images(8))
    with pytest.raises(UserError, match="capacity is 8"):
        model.append(memory, images(1))
    freed = memory.free(5)
    again = model.append(freed, images(1))
    assert again.handles == [0, 1, 2, 3, 4, 6, 7, 8]
    assert again.slot_of(8) == memory.slot_of(5)  # the only free place


@pytest.mark.parametrize("handles", [(8,), (-1,), (2, 8), (3, 3), (1,)])
def test_freeing_what_is_not_held_is_one_line_and_changes_nothing(handles: tuple[int, ...]):
    """Unknown, negative, named twice, or freed before."""
    memory = heap().write(images(4)).free(1)
    map = memory.map.clone()
    with pytest.raises(UserError) as error:
        memory.free(*handles)
    assert "\n" not in str(error.value)
    assert str(handles[-1]) in str(error.value)
    assert torch.equal(memory.map, map) and memory.handles == [0, 2, 3]
    if handles != (3, 3):
        with pytest.raises(UserError, match="not held"):
            memory.slot_of(handles[-1])


def test_freeing_nothing_is_nothing():
    memory = heap().write(images(4))
    assert torch.equal(memory.free().map, memory.map) and memory.free().handles == memory.handles


def test_a_batch_or_a_pooled_memory_has_no_handles_and_says_so():
    batch, pooled = heap().write(torch.stack([images(3), images(3)])), Memory(torch.zeros(2, 8, 8))
    assert batch.capacity == 8
    for use in (lambda m: m.free(0), lambda m: m.handles, len, lambda m: m.slot_of(0)):
        with pytest.raises(UserError, match="batch"):
            use(batch)
        with pytest.raises(UserError, match="as a whole"):
            use(pooled)
    with pytest.raises(UserError, match="as a whole"):
        _ = pooled.capacity


def test_a_memory_that_holds_nothing_is_still_one():
    model = heap()
    assert len(model.empty()) == 0 and model.empty() and model.empty(2)


def test_places_are_the_points_of_handles_in_their_order():
    model = heap()
    memory = model.append(model.write(images(5)).free(2), images(2))
    expected = [as_they_lie(memory)[handle][1] for handle in memory.handles]
    assert memory.places.tolist() == expected
    other = model.write(images(6))
    batch = Memory.stack([memory, other])
    assert torch.equal(batch.places, torch.stack([memory.places, other.places]))
    with pytest.raises(UserError, match="different numbers"):
        _ = Memory.stack([memory, other.free(0)]).places


def test_memories_stack_to_a_batch_and_come_out_again():
    model = heap()
    one, other = model.write(images(3)), model.append(model.write(images(6)).free(2), images(2))
    batch = Memory.stack([one, other])
    assert batch.is_batch and batch.map.shape == (2, 2, 16, 16)
    for index, memory in enumerate((one, other)):
        back = batch[index]
        assert torch.equal(back.map, memory.map) and back.handles == memory.handles
        assert torch.equal(back.require_slots(), memory.require_slots())
        new = model.append(back, images(1)).handles[-1]
        assert new >= memory.issued  # no handle is given out twice
        torch.testing.assert_close(back.free(0).map, memory.free(0).map)


def test_stacked_with_a_pooled_memory_only_maps_remain():
    batch = Memory.stack([heap().write(images(3)), Memory(torch.ones(2, 16, 16))])
    assert batch.owners is None and torch.equal(batch[1].map, torch.ones(2, 16, 16))


def test_the_books_move_with_the_map():
    there = heap().write(images(3)).to("meta")
    assert there.map.device.type == there.require_slots().device.type == "meta"


# Files of a heap


def steps(map: Tensor, dtype: str) -> float:
    """How far rounding may move a number: half a step, or half a unit of the last place."""
    most = map.abs().max().item()
    return {"float32": 0, "bfloat16": most / 2**8, "int8": most / 254, "int4": most / 14}[dtype]


@DTYPES
def test_a_heap_comes_back_from_its_file_handle_for_handle(tmp_path: Path, dtype: str):
    model = heap()
    memory = model.append(model.write(images(5)).free(1), images(1))
    memory.save(tmp_path / "m", dtype=dtype)
    back = Memory.load(tmp_path / "m")
    assert back.handles == memory.handles == [0, 2, 3, 4, 5]
    assert as_they_lie(back) == as_they_lie(memory)
    assert back.issued == memory.issued == 6 and back.map.dtype == torch.float32
    room = steps(memory.map, dtype) * (1 + 1e-4)
    torch.testing.assert_close(back.map, memory.map, rtol=0, atol=room)
    assert torch.equal(back.map, memory.quantise(dtype).map)
    more = model.append(back, images(2))
    assert more.handles == [0, 2, 3, 4, 5, 6, 7]


@DTYPES
def test_a_batch_of_heaps_comes_back_from_its_file(tmp_path: Path, dtype: str):
    """Each episode rounded in steps of its own."""
    model = heap()
    quiet, loud = model.write(images(4)), model.write(images(7))
    memory = Memory.stack([quiet, replace(loud, map=loud.map * 50)])
    memory.save(tmp_path / "m", dtype=dtype)
    back = Memory.load(tmp_path / "m")
    for index, one in enumerate((quiet, loud)):
        room = steps(memory.map[index], dtype) * (1 + 1e-4)
        torch.testing.assert_close(back[index].map, memory.map[index], rtol=0, atol=room)
        assert back[index].handles == one.handles


@DTYPES
def test_a_loaded_cell_can_be_freed(tmp_path: Path, dtype: str):
    memory = heap().write(images(4))
    memory.save(tmp_path / "m", dtype=dtype)
    back = Memory.load(tmp_path / "m")
    torch.testing.assert_close(back.free(2).map, memory.quantise(dtype).free(2).map)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 5, 5)])
@DTYPES
def test_a_pooled_memory_is_saved_in_fewer_bits_too(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
):
    memory = Memory(torch.randn(shape))
    memory.save(tmp_path / "m", dtype=dtype)
    back = Memory.load(tmp_path / "m")
    assert back.owners is None and torch.equal(back.map, memory.quantise(dtype).map)


def test_fewer_bits_are_a_smaller_file(tmp_path: Path):
    memory = Memory(torch.randn(3, 64, 64))
    sizes = []
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        memory.save(tmp_path / dtype, dtype=dtype)
        sizes.append((tmp_path / dtype).stat().st_size)
    numbers = 3 * 64 * 64
    for size, bytes_each in zip(sizes, (4, 2, 1, 0.5), strict=True):
        assert numbers * bytes_each < size < numbers * bytes_each + 1000


def test_a_memory_saved_as_another_type_is_refused_and_leaves_no_file(tmp_path: Path):
    with pytest.raises(UserError, match="int3"):
        Memory(torch.zeros(1, 2, 2)).save(tmp_path / "m", dtype="int3")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8)])
def test_a_file_of_the_older_format_still_loads(tmp_path: Path, shape: tuple[int, ...]):
    """A float32 map and nothing else: no slots, so nothing to free."""
    map = torch.randn(shape)
    save_file({"map": map}, tmp_path / "m", metadata={"format": "kanerva-memory-1"})
    back = Memory.load(tmp_path / "m")
    assert torch.equal(back.map, map) and back.owners is None


def older(memory: Memory, path: Path, shift: float = 0.0, block: int = 8) -> None:
    """A file of version 0.1, which kept each slot's point, and blocks that might overlap."""
    points = memory.grid.centres() + shift
    tensors = {"map": memory.map, "owners": memory.require_slots(), "points": points}
    tensors["blocks"] = torch.zeros(8, 2, block, 4)
    about = {"format": "kanerva-memory-2", "dtype": "float32", "shape": "[2, 16, 16]"}
    write_tensors(path, tensors, about | {"disjoint": "false", "issued": "4"})


def test_a_heap_of_the_older_format_still_loads_where_its_blocks_are_cells(tmp_path: Path):
    memory = heap().write(images(4))
    older(memory, tmp_path / "m")
    back = Memory.load(tmp_path / "m")
    assert back.handles == memory.handles and back.issued == 4
    assert torch.equal(back.free(2).map, memory.free(2).map)
    for wrong in ({"shift": 0.1}, {"block": 4}):
        older(memory, tmp_path / "m", **wrong)
        with pytest.raises(UserError, match="between cells") as error:
            Memory.load(tmp_path / "m")
        assert "\n" not in str(error.value)
    leaking = replace(memory, map=memory.map + 0.5)  # a block that reaches into free cells
    older(leaking, tmp_path / "m")
    with pytest.raises(UserError, match="between cells"):
        Memory.load(tmp_path / "m")
