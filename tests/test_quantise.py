"""Memories in fewer bits: half a step of error at most, and as many bits as they say."""

import pytest
import torch
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.quantise import BITS, bits, pack, quantise, unpack

SHAPES = [(3, 8, 8), (3, 3, 5), (1, 1, 1), (4, 2, 6, 6), (3, 1, 5, 7)]  # odd counts, and batches


def steps(maps: Tensor, dtype: str) -> Tensor:
    """The distance of two levels, for each episode: its largest number is the last level."""
    episodes = maps.reshape(-1, *maps.shape[-3:])
    most = torch.stack([episode.abs().max() for episode in episodes])
    return (most / {"int8": 127, "int4": 7}[dtype]).view(*maps.shape[:-3], 1, 1, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounding_moves_a_number_by_half_a_step_at_most(shape: tuple[int, ...], dtype: str):
    maps = torch.randn(shape)
    error = (quantise(maps, dtype) - maps).abs()
    assert (error <= 0.5 * steps(maps, dtype) * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype, levels", [("int8", 255), ("int4", 15)])
def test_integers_use_all_their_levels_evenly(dtype: str, levels: int):
    """From -1 to 1, as many below zero as above; a step between any two."""
    ramp = torch.linspace(-1, 1, 8001)[:8000].view(1, 80, 100)  # ends a hair below 1
    ramp = torch.cat([ramp, torch.ones(1, 80, 100)])
    found = quantise(ramp, dtype).unique()
    expected = torch.arange(-(levels // 2), levels // 2 + 1) / (levels // 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_levels_come_back_from_their_packing_as_they_were(shape: tuple[int, ...], dtype: str):
    """Numbers that are levels already lose nothing: any, in any place, odd counts included."""
    most = {"int8": 127, "int4": 7}[dtype]
    levels = torch.randint(-most, most + 1, shape)
    levels.view(-1, *shape[-3:])[:, 0, 0, 0] = most
    back = unpack(pack(levels / 16, dtype), dtype, shape)
    assert back.shape == shape
    torch.testing.assert_close(back * 16, levels.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(BITS))
def test_rounding_twice_is_rounding_once(dtype: str):
    once = quantise(torch.randn(2, 3, 5, 5), dtype)
    torch.testing.assert_close(quantise(once, dtype), once, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_each_episode_has_a_scale_of_its_own(dtype: str):
    maps = torch.randn(3, 2, 5, 5) * torch.tensor([1.0, 1000.0, 1e-3]).view(3, 1, 1, 1)
    together = quantise(maps, dtype)
    for episode, map in zip(together, maps, strict=True):
        assert torch.equal(episode, quantise(map, dtype))


def test_floats_are_kept_or_cut_to_bfloat16():
    maps = torch.randn(2, 3, 5, 5)
    assert torch.equal(quantise(maps, "float32"), maps)
    assert torch.equal(quantise(maps, "bfloat16"), maps.bfloat16().float())
    assert pack(maps, "bfloat16")["map"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", list(BITS))
def test_an_empty_memory_stays_empty(dtype: str):
    assert torch.equal(quantise(torch.zeros(2, 3, 4, 4), dtype), torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("dtype", list(BITS))
def test_bits_are_what_the_tensors_take(dtype: str):
    """Numbers and the scale, counted byte by byte; the last half byte of an odd int4 is filled."""
    for count in (6 * 6, 3 * 5 * 5):
        tensors = pack(torch.randn(count, 1, 1), dtype)
        stored = 8 * sum(t.numel() * t.element_size() for t in tensors.values())
        filled = 4 if dtype == "int4" and count % 2 else 0
        assert bits(count, dtype) == stored - filled


def test_bits_by_hand():
    """3 x 32 x 32 numbers; a scale is 32 bits."""
    assert [bits(3072, d) for d in BITS] == [98_304, 49_152, 24_608, 12_320]


def test_another_type_is_refused_in_one_line_that_names_those_there_are():
    with pytest.raises(UserError, match="float32, bfloat16, int8, int4, got 'int3'") as error:
        pack(torch.zeros(1, 2, 2), "int3")
    assert "\n" not in str(error.value)
