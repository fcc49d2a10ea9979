"""Caps on the bits of blocks: what a block holds follows from its cap and from the costs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kanerva import Memory
from kanerva.errors import UserError
from kanerva.memory import container
from kanerva.memory.container import SIZE
from kanerva.memory.detail import ALL, Detail
from kanerva.memory.fixed_point import BIT
from kanerva.models.kpp_bits import KppBits
from test_bits import CONFIG, shaken

PARTS = ("pixels", "pixel_costs", "gist_costs", "kept", "stored", "caps")


@pytest.fixture
def model() -> KppBits:
    return shaken(pixel_code=0.2, prior=0.05)


def some(count: int) -> Tensor:
    return (torch.rand(count, *CONFIG.image) < 0.3).float()


def cut_by_hand(costs: list[int], cap: int) -> int:
    """How many parts fit, one after another."""
    spent, held = 0, 0
    for cost in costs:
        if spent >= BIT * cap:
            break
        spent, held = spent + cost, held + 1
    return held


def costs_with(count: int, groups: int = 4, n: int = 9) -> Detail:
    """Details with random costs; some cost nothing, some end exactly at a whole bit."""
    costs = torch.randint(0, 5 * BIT, (count, groups + n))
    costs[torch.rand(costs.shape) < 0.2] = 0
    whole = torch.rand(costs.shape) < 0.3
    costs[whole] = BIT * (costs[whole] // BIT)
    pixels = torch.randint(0, 2, (count, n)).to(torch.uint8)
    caps = torch.full((count,), ALL)
    return Detail(pixels, costs[:, groups:], costs[:, :groups], caps)


def same(one: Detail, other: Detail) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in PARTS)


def test_a_block_holds_parts_until_their_cost_reaches_its_cap():
    whole = costs_with(300)
    assert bool((whole.kept == 4).all()) and bool((whole.stored == 9).all())
    caps = torch.randint(0, 40, (300,))
    caps[:4] = torch.tensor([0, 1, ALL - 1, ALL])
    less = whole.within(caps)
    for row, cap in enumerate(caps.tolist()):
        costs = [*whole.gist_costs[row].tolist(), *whole.pixel_costs[row].tolist()]
        held = cut_by_hand(costs, cap)
        assert int(less.kept[row]) == min(held, 4) and int(less.stored[row]) == max(held - 4, 0)
        assert float(less.bits[row]) == sum(costs[:held]) / BIT
        if held:  # without its last part, it is below the cap
            assert sum(costs[: held - 1]) < BIT * cap
    assert bool((less.pixels[~less.is_stored] == 0).all())


def test_a_cap_that_the_cost_meets_exactly_ends_a_block():
    costs = torch.tensor([[BIT, 0, 2 * BIT, BIT]])
    for cap, kept in ((0, 0), (1, 1), (2, 3), (3, 3), (4, 4), (5, 4)):
        detail = Detail(
            torch.ones(1, 2, dtype=torch.uint8), torch.zeros(1, 2).long(), costs,
            torch.tensor([ALL]),
        ).within(torch.tensor([cap]))  # fmt: skip
        assert int(detail.kept) == kept
        assert int(detail.stored) == (2 if cap > 4 else 0)


def test_shrinking_twice_is_shrinking_to_the_smaller_cap():
    whole, caps = costs_with(200), torch.randint(0, 40, (2, 200))
    expected = whole.within(caps.amin(dim=0))
    assert same(whole.within(caps[0]).within(caps[1]), expected)
    assert same(expected.within(caps.amax(dim=0)), expected)


def test_a_free_cell_holds_nothing(model: KppBits):
    memory = model.write(some(3)).free(1)
    assert memory.detail is not None
    free = memory.require_slots() < 0
    assert not bool(memory.detail.is_kept[free].any() | memory.detail.is_stored[free].any())
    again = memory.shrink(30)
    assert again.detail is not None and not bool(again.detail.is_kept[free].any())


@torch.no_grad()
def test_every_cap_comes_back_from_a_stream(model: KppBits):
    """One stream for all, or one for each; caps at the very cost of a part, and beside it."""
    images = some(60)[None]
    blocks = model.quick_blocks(model.encoder(images))
    whole, counts = model.code_and_counts(images, blocks)
    upto = torch.cat([whole.gist_costs, whole.pixel_costs], dim=-1).cumsum(dim=-1)[0]
    for trial in range(4):
        part = torch.randint(0, upto.shape[1], (60, 1))
        caps = (upto.gather(1, part)[:, 0] + BIT - 1) // BIT + torch.randint(-1, 2, (60,))
        caps = caps.clamp(min=0)
        caps[: 4 + trial] = torch.tensor([0, 1, 2, ALL, ALL - 1, 300, 65][: 4 + trial])
        detail = whole.within(caps[None])
        gists = detail.cut(blocks)[0].flatten(1)[:, : model.prior.numbers]
        detail = detail.apply(lambda part: part[0])
        stream = model.codec.encode(gists, detail)
        streams = model.codec.encode_each(gists, detail, counts[0])
        for found, again in (model.codec.decode(stream, 60), model.codec.decode_each(streams)):
            assert torch.equal(found, gists) and same(again, detail)


@torch.no_grad()
def test_more_caps_than_a_byte_can_count(model: KppBits):
    images = some(300)[None]
    blocks = model.quick_blocks(model.encoder(images))
    whole = model.code(images, blocks)
    detail = whole.within(torch.arange(300)[None] + 1)
    gists = detail.cut(blocks)[0].flatten(1)[:, : model.prior.numbers]
    detail = detail.apply(lambda part: part[0])
    found, again = model.codec.decode(model.codec.encode(gists, detail), 300)
    assert torch.equal(found, gists) and same(again, detail)


@pytest.mark.parametrize("count", [1, 32, 256])
@torch.no_grad()
def test_a_file_takes_what_its_memory_claims(model: KppBits, count: int, tmp_path: Path):
    large, images = model.with_capacity(count), some(count)[None]
    assert isinstance(large, KppBits)
    blocks = large.quick_blocks(large.encoder(images))
    cells = torch.arange(count)[None]
    written = large.empty(1).malloc(blocks, cells, large.code(images, blocks))[0]
    for cap in (None, 56, 24, 0):
        memory = written if cap is None else written.shrink(cap)
        claim = float(memory.bits.sum()) / 8
        memory.save(tmp_path / "memory")
        handles = 1 * count  # bytes
        over = (tmp_path / "memory").stat().st_size - SIZE - handles - claim
        # costs are rounded; a cap takes up to two bytes; the stream ends at a whole byte
        assert -0.002 * claim - 0.1 <= over <= 0.002 * claim + (1.1 if cap is None else 2.6)
        again = Memory.load(tmp_path / "memory", large)
        assert torch.equal(again.bits, memory.bits) and torch.equal(again.map, memory.map)


def test_files_of_other_versions_are_refused_in_a_line(
    model: KppBits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "memory"
    monkeypatch.setattr(container, "VERSION", 4)
    model.write(some(3)).save(path)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"version 4.* reads version 5.* write its images again$"):
        Memory.load(path, model)


def test_streams_that_say_anything_of_caps_are_refused(model: KppBits, tmp_path: Path):
    """Whatever a sealed stream says, also that caps never end, it is read and compared."""
    path, sound = tmp_path / "memory", model.write(some(3)).shrink(30).as_container()
    for stream in (b"", b"\0" * 40, b"\xff" * 200_000, sound.stream[:-1], sound.stream + b"\1"):
        path.write_bytes(replace(sound, stream=stream).pack())
        if stream[:-1] == sound.stream:  # nothing reads past the last symbol
            assert len(Memory.load(path, model)) == 3
            continue
        with pytest.raises(UserError, match="damaged|other blocks"):
            Memory.load(path, model)
