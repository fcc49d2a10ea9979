"""Cells: no pixel in two of them, equally likely a priori, and one for each sample."""

import math
import re

import pytest
import torch

from kanerva.config import rows_and_columns
from kanerva.distributions import as_uniform
from kanerva.errors import UserError
from kanerva.memory.blocks import read_blocks
from kanerva.memory.grid import Grid, deal

CAPACITIES = [1, 2, 4, 6, 8, 9, 12, 15, 16, 20, 25, 36, 40, 49, 64]
SIZES = [8, 12, 13, 24, 31, 40]
WHOLE = [(1, 8), (2, 8), (6, 12), (8, 16), (12, 12), (15, 30), (36, 24), (64, 32)]  # pixels


def grids(size: int) -> list[Grid]:
    return [Grid(c, size) for c in CAPACITIES if rows_and_columns(c)[1] <= size]


def chi_square(counts: torch.Tensor) -> float:
    """Against equal counts, in standard deviations above its mean (degrees of freedom)."""
    expected, freedom = counts.double().mean(), len(counts) - 1
    total = ((counts.double() - expected).square() / expected).sum().item()
    return (total - freedom) / (2 * freedom) ** 0.5


# The shape of a grid


def test_the_grid_is_the_squarest_or_refused_in_one_line():
    """Every pair of factors tried; a grid more than twice as wide as high is no grid."""

    def squarest(count: int) -> tuple[int, int]:
        pairs = [(r, count // r) for r in range(1, count + 1) if count % r == 0]
        return min((p for p in pairs if p[0] <= p[1]), key=lambda p: p[1] - p[0])

    def fits(count: int) -> bool:
        rows, columns = squarest(count)
        return columns <= 2 * rows

    for capacity in range(1, 80):
        if fits(capacity):
            assert rows_and_columns(capacity) == squarest(capacity)
            continue
        with pytest.raises(UserError) as error:
            rows_and_columns(capacity)
        assert "\n" not in str(error.value) and f"memory.capacity={capacity}" in str(error.value)
        advice = int(re.findall(r"use (\d+)", str(error.value))[0])
        nearer = [n for n in range(1, 100) if abs(n - capacity) < abs(advice - capacity)]
        assert fits(advice) and not any(map(fits, nearer))


def test_a_grid_finer_than_its_memory_is_refused_in_one_line():
    assert Grid(64, 8).block == (1, 1)
    with pytest.raises(UserError, match=r"memory.capacity=64.*side 7") as error:
        Grid(64, 7)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", SIZES)
def test_cells_share_no_pixel_and_each_begins_inside_its_own(size: int):
    """A block is a solid rectangle of as many whole pixels as a cell has room for. Each of them
    begins inside its cell; where cells are no whole number of pixels, the last may reach out."""
    for grid in grids(size):
        height, width = grid.block
        assert (height, width) == (math.floor(size / grid.rows), math.floor(size / grid.columns))
        pixels = grid.pixels()
        assert pixels.shape == (grid.capacity, height * width)
        assert len(pixels.unique()) == pixels.numel()
        assert pixels.min() >= 0 and pixels.max() < size**2
        for cell, mine in enumerate(pixels.tolist()):
            row, column = divmod(cell, grid.columns)
            top, left = divmod(mine[0], size)
            assert mine == [
                (top + i) * size + left + j for i in range(height) for j in range(width)
            ]
            # In whole numbers: pixel p begins at p / size, cell c spans c / n to (c + 1) / n.
            assert row * size <= top * grid.rows
            assert (top + height - 1) * grid.rows < (row + 1) * size
            assert column * size <= left * grid.columns
            assert (left + width - 1) * grid.columns < (column + 1) * size


@pytest.mark.parametrize("capacity, size", WHOLE)
def test_where_cells_are_whole_pixels_every_pixel_belongs_to_the_cell_it_lies_in(
    capacity: int, size: int
):
    grid = Grid(capacity, size)
    centres = (2 * torch.arange(size) + 1) / size - 1
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    by_place = grid.cell_of(torch.stack([x, y], dim=-1)).flatten()
    for cell in range(capacity):
        assert grid.pixels()[cell].tolist() == (by_place == cell).nonzero()[:, 0].tolist()


# Places


def test_a_cells_middle_lies_in_it():
    for grid in grids(40):
        assert grid.cell_of(grid.centres()).tolist() == list(range(grid.capacity))


def test_cells_are_numbered_row_by_row_and_points_are_x_before_y():
    """Two rows of four: x tells columns apart, y rows."""
    grid = Grid(8, 16)
    assert (grid.rows, grid.columns, grid.block) == (2, 4, (8, 4))
    torch.testing.assert_close(grid.centres()[1], torch.tensor([-0.25, -0.5]))
    torch.testing.assert_close(grid.centres()[4], torch.tensor([-0.75, 0.5]))
    assert grid.cell_of(torch.tensor([[0.9, -0.9], [-0.9, 0.9]])).tolist() == [3, 4]


@pytest.mark.parametrize("capacity", [8, 9, 36])
def test_the_ends_of_the_range_belong_to_the_outermost_cells(capacity: int):
    grid = Grid(capacity, 24)
    ends = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    last = capacity - 1
    assert grid.cell_of(ends).tolist() == [0, grid.columns - 1, last - grid.columns + 1, last]


@pytest.mark.parametrize("capacity", [8, 12, 25])
def test_keys_from_their_prior_fall_into_every_cell_equally_often(capacity: int):
    keys = torch.randn(200_000, 2)
    counts = torch.bincount(Grid(capacity, 40).cell_of(as_uniform(keys)), minlength=capacity)
    assert chi_square(counts) < 5


# Reading and pasting


@pytest.mark.parametrize("capacity, size", WHOLE)
def test_reading_a_cell_is_a_slice_and_what_a_window_around_it_reads(capacity: int, size: int):
    grid, memory = Grid(capacity, size), torch.randn(2, 3, size, size)
    cells = torch.stack([torch.randperm(capacity) for _ in range(2)])
    blocks = grid.read(memory, cells)
    height, width = grid.block
    for b in range(2):
        for t, cell in enumerate(cells[b].tolist()):
            top, left = cell // grid.columns * height, cell % grid.columns * width
            expected = memory[b, :, top : top + height, left : left + width]
            assert torch.equal(blocks[b, t], expected)
    scale = torch.full((2, capacity, 1), height / size)
    windows = torch.cat([scale, grid.centres()[cells]], dim=-1)[:, :, None]
    window = read_blocks(memory, windows, grid.block)[:, :, 0]
    torch.testing.assert_close(window, blocks, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_reading_and_pasting_undo_each_other_bit_for_bit(size: int):
    """Half the cells, in any order: blocks come back, and nothing lies outside them."""
    for grid in grids(size):
        some = (grid.capacity + 1) // 2
        cells = torch.stack([torch.randperm(grid.capacity)[:some] for _ in range(2)])
        blocks = 1 + torch.rand(2, some, 3, *grid.block)
        memory = grid.paste(blocks, cells)
        assert memory.shape == (2, 3, size, size)
        assert torch.equal(grid.read(memory, cells), blocks)
        assert (memory != 0).sum() == blocks.numel()
        assert torch.equal(grid.paste(grid.read(memory, cells), cells), memory)


def test_a_full_grid_of_whole_pixels_holds_the_whole_memory():
    grid, memory = Grid(12, 24), torch.randn(3, 2, 24, 24)
    everywhere = torch.arange(12).expand(3, -1)
    assert torch.equal(grid.paste(grid.read(memory, everywhere), everywhere), memory)


def test_gradients_pass_through_pixel_for_pixel():
    """A paste's gradient is a read of the gradient, and the other way round."""
    grid, cells = Grid(6, 13), torch.tensor([[4, 0, 5], [1, 2, 3]])
    blocks = torch.randn(2, 3, 2, *grid.block, requires_grad=True)
    weights = torch.randn(2, 2, 13, 13)
    (grid.paste(blocks, cells) * weights).sum().backward()
    assert blocks.grad is not None and torch.equal(blocks.grad, grid.read(weights, cells))
    memory = torch.randn(2, 2, 13, 13, requires_grad=True)
    (grid.read(memory, cells) * blocks.detach()).sum().backward()
    assert memory.grad is not None
    assert torch.equal(memory.grad, grid.paste(blocks.detach(), cells))


# Who gets which cell


def test_dealing_is_a_uniform_choice_among_all_injections():
    """Two samples on a grid of four: twelve ordered pairs, each as likely."""
    cells = deal(24_000, 2, Grid(4, 8))
    assert (cells[:, 0] != cells[:, 1]).all()
    pairs = torch.bincount(cells[:, 0] * 4 + cells[:, 1], minlength=16)
    possible = ~torch.eye(4, dtype=torch.bool).flatten()
    assert chi_square(pairs[possible]) < 5


def test_a_full_deal_uses_every_cell_once():
    cells = deal(7, 12, Grid(12, 12))
    assert torch.equal(cells.sort(dim=1).values, torch.arange(12).expand(7, -1))


def test_the_same_generator_deals_the_same_cells():
    def dealt(seed: int) -> torch.Tensor:
        return deal(5, 4, Grid(12, 12), torch.Generator().manual_seed(seed))

    assert torch.equal(dealt(3), dealt(3)) and not torch.equal(dealt(3), dealt(4))
