"""Where blocks lie, what naming a place costs, and reading it back."""

import math

import pytest
import torch
from torch import Tensor

from kanerva.distributions import as_uniform
from kanerva.errors import UserError
from kanerva.memory.placement import Placement

CPU = torch.device("cpu")


def make() -> Placement:
    """Two rows of four cells, 8 x 4 pixels each."""
    return Placement(capacity=8, size=16)


def placed(made: Placement, batch: int, length: int) -> Tensor:
    return made.place(batch, length, None, CPU)


def middles(cells: Tensor) -> Tensor:
    """By hand: the middle (x, y) of each of 2 x 4 cells."""
    return torch.stack([(2 * (cells % 4) + 1) / 4 - 1, (2 * (cells // 4) + 1) / 2 - 1], dim=-1)


def all_written(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool)


# Where samples go


def test_every_sample_has_a_cell_of_its_own():
    made = make()
    cells = placed(made, 20, 6)
    assert cells.shape == (20, 6) and cells.min() >= 0 and cells.max() < 8
    assert all(len(episode.unique()) == 6 for episode in cells)
    torch.testing.assert_close(made.grid.centres()[cells], middles(cells))
    assert not torch.equal(placed(made, 20, 6), cells)


def test_more_samples_than_there_is_room_for_is_an_error_that_names_the_capacity():
    made = make()
    placed(made, 1, 8)
    with pytest.raises(UserError, match="capacity is 8 .* hold 9") as error:
        placed(made, 1, 9)
    assert "\n" not in str(error.value)


# Free cells


@pytest.mark.parametrize("taken", [0, 5, 7])
def test_a_free_cell_is_never_one_that_is_held(taken: int):
    made = make()
    held = torch.zeros(40, 8, dtype=torch.bool)
    for episode in held:
        episode[torch.randperm(8)[:taken]] = True
    cells = made.find_free(held, 3, None)
    assert cells.shape == (40, 3)
    assert not held.gather(1, cells).any()


def test_any_free_cell_may_be_found():
    held = torch.tensor([True, False, True, True, False, True, False, True]).expand(9000, -1)
    cells = make().find_free(held, 1, None)
    counts = torch.bincount(cells.flatten(), minlength=8)[[1, 4, 6]]
    assert counts.sum() == 9000 and (counts - 3000).abs().max() < 5 * (9000 * 2 / 9) ** 0.5


# What naming a place costs


def test_a_key_posterior_lies_around_its_block():
    made = make()
    cells = placed(made, 3, 5)
    q = made.posterior(cells, all_written(3, 5), torch.full((3,), 3.0))
    torch.testing.assert_close(as_uniform(q.mean), middles(cells), rtol=0, atol=1e-5)


def test_a_key_costs_the_choice_of_its_cell_and_no_more():
    """Written: ln(cells), exactly. Not written: ln(cells / empty), for any empty cell does."""
    made = make()
    cells = placed(made, 2, 4)
    written = torch.tensor([[True, True, True, False], [True, False, False, False]])
    empty = torch.tensor([5.0, 7.0])
    q = made.posterior(cells, written, empty)
    named, lost = math.log(8), [math.log(8 / 5), math.log(8 / 7)]
    rows = [[named, named, named, lost[0]], [named, lost[1], lost[1], lost[1]]]
    torch.testing.assert_close(q.kl_to_prior(), torch.tensor(rows), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.log_ratio(q.sample()), q.kl_to_prior())


def test_where_no_cell_is_free_an_unwritten_sample_has_no_mass():
    made = make()
    cells = placed(made, 1, 2)
    q = made.posterior(cells, torch.tensor([[True, False]]), torch.zeros(1))
    assert q.kl_to_prior().isinf().tolist() == [[False, True]]


def test_a_divergence_is_the_prior_mass_of_all_that_reads_the_same():
    """Counted: how often a key from N(0, 1) reads exactly what the sample reads."""
    made, draws = make(), 100_000
    cells = placed(made, 1, 5)
    written = torch.tensor([[True, True, True, True, False]])
    blocks = torch.randn(1, 5, 2, 8, 4) * written[..., None, None, None]
    memory = made.grid.paste(blocks, cells)
    q = made.posterior(cells, written, torch.tensor([4.0]))
    anywhere = made.read(memory, torch.randn(1, draws, 2))[0]
    for t, mine in enumerate(made.read(memory, q.sample())[0]):
        same = (anywhere == mine).flatten(1).all(1).double().mean()
        mass = q.kl_to_prior()[0, t].neg().exp().item()
        assert abs(same - mass) < 5 * (mass * (1 - mass) / draws) ** 0.5


# Blocks in and out


@pytest.mark.parametrize("length", [1, 6, 8])
def test_a_block_in_a_cell_is_read_back_at_its_own_key_mean(length: int):
    """Bit for bit, whatever lies in the other cells."""
    made = make()
    cells = placed(made, 3, length)
    blocks = torch.randn(3, length, 2, 8, 4)
    q = made.posterior(cells, all_written(3, length), torch.full((3,), 2.0))
    assert torch.equal(made.read(made.grid.paste(blocks, cells), q.mean), blocks)


def test_every_key_in_a_cell_reads_the_same_trace():
    made = make()
    cells = placed(made, 4, 8)
    blocks = torch.randn(4, 8, 2, 8, 4)
    memory = made.grid.paste(blocks, cells)
    q = made.posterior(cells, all_written(4, 8), torch.zeros(4))
    for _ in range(50):
        assert torch.equal(made.read(memory, q.sample()), blocks)


def test_a_memory_is_the_sum_of_single_writes():
    """Malloc adds one term: each sample's block, pasted alone, adds up to the whole."""
    made = make()
    cells = placed(made, 2, 5)
    blocks = torch.randn(2, 5, 2, 8, 4)
    total = torch.zeros(2, 2, 16, 16)
    for t in range(5):
        total += made.grid.paste(blocks[:, t : t + 1], cells[:, t : t + 1])
    torch.testing.assert_close(made.grid.paste(blocks, cells), total)


def test_reads_are_in_float32_whatever_the_precision():
    made = make()
    cells = placed(made, 1, 2)
    blocks = torch.randn(1, 2, 2, 8, 4)
    q = made.posterior(cells, all_written(1, 2), torch.ones(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memory = made.grid.paste(blocks, cells)
        assert memory.dtype == made.read(memory, q.mean).dtype == torch.float32
    assert torch.equal(memory, made.grid.paste(blocks, cells))
