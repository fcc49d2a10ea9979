"""Cutting blocks and pasting them: grid_sample's numbers and gradients, plain slices, plain loops,
and the paper's example."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kanerva.memory.blocks import paste_blocks, read_blocks, triangle_weights


def by_grid_sample(memory: Tensor, windows: Tensor, block: int) -> Tensor:
    """Eq. 5 as PyTorch's spatial transformer has it, one window at a time."""
    traces = []
    for m, per_episode in zip(memory, windows.flatten(1, 2), strict=True):
        for scale, x, y in per_episode:
            zero = torch.zeros_like(scale)
            theta = torch.stack([scale, zero, x, zero, scale, y]).view(1, 2, 3)
            grid = F.affine_grid(theta, [1, m.shape[0], block, block], align_corners=False)
            traces.append(F.grid_sample(m[None], grid, padding_mode="zeros", align_corners=False))
    return torch.cat(traces).view(*windows.shape[:3], memory.shape[1], block, block)


def window(scale: float, x: float, y: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([scale, x, y], dtype=dtype).view(1, 1, 1, 3)


@pytest.mark.parametrize("block", [1, 4, 7])
@pytest.mark.parametrize("height, width", [(9, 9), (6, 11)])
def test_blocks_and_both_gradients_agree_with_grid_sample(block: int, height: int, width: int):
    memory = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
    windows = (2 * torch.rand(2, 4, 2, 3, dtype=torch.float64) - 1).requires_grad_()
    ours, oracle = read_blocks(memory, windows, block), by_grid_sample(memory, windows, block)
    torch.testing.assert_close(ours, oracle)
    weights = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), [memory, windows]),
        torch.autograd.grad((oracle * weights).sum(), [memory, windows]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("block", [(4, 4), (3, 7), 5])
def test_a_read_without_gradient_is_the_same(block: int | tuple[int, int]):
    """Inside, across the border and mirrored; it looks up neighbours instead of multiplying."""
    memory = torch.randn(2, 3, 20, 24, dtype=torch.float64)
    windows = 1.2 * torch.randn(2, 5, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        found = read_blocks(memory, windows, block)
    torch.testing.assert_close(found, read_blocks(memory, windows, block))
    assert found.abs().max() > 1


def test_a_unit_window_reads_the_whole_memory():
    memory = torch.rand(2, 3, 64, 64)
    whole = torch.tensor([1.0, 0.0, 0.0]).expand(2, 5, 1, 3)
    traces = read_blocks(memory, whole, block=64)
    torch.testing.assert_close(traces, memory[:, None, None].expand_as(traces))


@pytest.mark.parametrize("top, left", [(0, 0), (24, 8), (48, 48), (5, 31)])
def test_an_aligned_window_is_a_slice(top: int, left: int):
    """Scale b/S reads pixel for pixel; x is the column and y the row."""
    memory = torch.rand(1, 3, 64, 64)
    key = window(16 / 64, 2 * (left + 8) / 64 - 1, 2 * (top + 8) / 64 - 1)
    trace = read_blocks(memory, key, block=16)[0, 0, 0]
    expected = memory[0, :, top : top + 16, left : left + 16]
    torch.testing.assert_close(trace, expected, rtol=1e-5, atol=1e-5)


def test_memory_outside_the_block_gets_no_gradient():
    """§3.4. A quarter-size block left of centre covers rows 24-39, columns 8-23."""
    memory = torch.rand(1, 3, 64, 64, requires_grad=True)
    read_blocks(memory, window(0.25, -0.5, 0.0), block=16).sum().backward()
    assert memory.grad is not None
    touched = memory.grad.sum(dim=(0, 1)) > 1e-3
    expected = torch.zeros(64, 64, dtype=torch.bool)
    expected[24:40, 8:24] = True
    assert torch.equal(touched, expected)
    assert (memory.grad[:, :, ~expected].abs() < 1e-5).all()


def test_the_papers_example_reads_its_region():
    """App. A: s = 0.5, x = 0.3, y = 0.5 is the half-size square around (0.3, 0.5).

    On a memory that holds its own coordinates a block must come back as the coordinates it covers.
    """
    centres = (2 * torch.arange(64, dtype=torch.float64) + 1) / 64 - 1
    memory = torch.stack([centres.expand(64, 64), centres[:, None].expand(64, 64)])[None]
    x, y = read_blocks(memory, window(0.5, 0.3, 0.5, torch.float64), block=16)[0, 0, 0]
    within = (2 * torch.arange(16, dtype=torch.float64) + 1) / 16 - 1
    torch.testing.assert_close(x, (0.5 * within + 0.3).expand(16, 16))
    torch.testing.assert_close(y, (0.5 * within + 0.5)[:, None].expand(16, 16))


def test_a_negative_scale_reads_the_block_mirrored():
    memory = torch.rand(1, 2, 20, 20)
    upright, turned = (read_blocks(memory, window(s, 0.2, -0.3), block=6) for s in (0.4, -0.4))
    torch.testing.assert_close(turned, upright.flip(-1, -2))


def test_outside_the_memory_reads_as_zero():
    memory = torch.ones(1, 1, 16, 16)
    trace = read_blocks(memory, window(1.0, 1.0, 0.0), block=16)[0, 0, 0, 0]
    torch.testing.assert_close(trace[:, :8], torch.ones(16, 8))
    torch.testing.assert_close(trace[:, 8:], torch.zeros(16, 8))


def test_a_block_smaller_than_its_window_skips_rows():
    """A plain bilinear read, as in App. A: no average over what lies between the points."""
    memory = torch.rand(1, 1, 12, 12)
    trace = read_blocks(memory, window(1.0, 0.0, 0.0), block=4)[0, 0, 0, 0]  # rows 1, 4, 7, 10
    torch.testing.assert_close(trace, memory[0, 0, 1::3, 1::3], rtol=1e-5, atol=1e-5)


def test_triangle_weights_inside_the_memory_sum_to_one():
    scale, shift = torch.tensor(0.4).view(1, 1, 1), torch.tensor(0.1).view(1, 1, 1)
    weights = triangle_weights(scale, shift, block=5, size=16)[0, 0, 0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    assert ((weights > 0).sum(-1) <= 2).all()  # bilinear: two neighbours at most


def test_each_episode_reads_its_own_memory_and_each_read_its_own_window():
    memory, windows = torch.rand(3, 2, 9, 9), 2 * torch.rand(3, 4, 2, 3) - 1
    traces = read_blocks(memory, windows, block=4)
    for b in range(3):
        for t in range(4):
            for k in range(2):
                alone = read_blocks(memory[b : b + 1], windows[b, t, k].view(1, 1, 1, 3), block=4)
                torch.testing.assert_close(traces[b, t, k], alone[0, 0, 0])


@pytest.mark.parametrize("height, width", [(6, 4), (3, 8)])
def test_a_block_that_is_not_square_is_a_slice_too(height: int, width: int):
    """The scale is the height's share; the width follows, so that pixels stay square."""
    memory, top, left = torch.rand(1, 2, 24, 24), 5, 11
    at = window(height / 24, 2 * (left + width / 2) / 24 - 1, 2 * (top + height / 2) / 24 - 1)
    trace = read_blocks(memory, at, (height, width))[0, 0, 0]
    expected = memory[0, :, top : top + height, left : left + width]
    torch.testing.assert_close(trace, expected, rtol=1e-5, atol=1e-5)


def test_a_side_alone_means_a_square_block():
    memory, windows = torch.rand(2, 3, 9, 9), 2 * torch.rand(2, 4, 2, 3) - 1
    assert torch.equal(read_blocks(memory, windows, 5), read_blocks(memory, windows, (5, 5)))


# Pasting


def some_windows(*lead: int) -> Tensor:
    """Anywhere, from a fifth of the memory to all of it, upright and mirrored; float64."""
    windows = 2 * torch.rand(*lead, 3, dtype=torch.float64) - 1
    sign = 1 - 2 * torch.randint(2, lead)
    windows[..., 0] = sign * (0.2 + 0.8 * torch.rand(lead, dtype=torch.float64))
    return windows


def pasted_by_loops(block: Tensor, at: Tensor, size: tuple[int, int]) -> Tensor:
    """One block, one window: every pixel of the memory looks up its own place in the block."""
    (channels, height, width), (scale, x, y) = block.shape, at.tolist()
    memory = block.new_zeros(channels, *size)
    for i in range(size[0]):
        for j in range(size[1]):
            down = ((2 * i + 1) / size[0] - 1 - y) / scale  # -1 to 1 across the window
            across = ((2 * j + 1) / size[1] - 1 - x) / (scale * width / height)
            row, column = ((down + 1) * height - 1) / 2, ((across + 1) * width - 1) / 2
            for h in range(height):
                for w in range(width):
                    weight = max(0, 1 - abs(row - h)) * max(0, 1 - abs(column - w))
                    memory[:, i, j] += weight * block[:, h, w]
    return memory


@pytest.mark.parametrize("height, width", [(3, 3), (4, 2), (1, 5)])
@pytest.mark.parametrize("size", [(8, 8), (6, 9)])
def test_pasting_is_a_loop_over_the_pixels_of_the_memory(
    height: int, width: int, size: tuple[int, int]
):
    for _ in range(3):
        block, at = torch.randn(2, height, width, dtype=torch.float64), some_windows(1, 1, 1)
        ours = paste_blocks(block[None, None, None], at, size)[0]
        torch.testing.assert_close(ours, pasted_by_loops(block, at[0, 0, 0], size))


@pytest.mark.parametrize("height, width", [(3, 3), (5, 2)])
def test_pasting_and_both_its_gradients_agree_with_the_inverse_of_grid_sample(
    height: int, width: int
):
    """The spatial transformer of the inverse map, one window at a time, then a plain sum."""
    blocks = torch.randn(2, 3, 2, 2, height, width, dtype=torch.float64, requires_grad=True)
    windows = some_windows(2, 3, 2).requires_grad_()
    sums = []
    for per_block, per_window in zip(blocks.flatten(1, 2), windows.flatten(1, 2), strict=True):
        total = torch.zeros(1, 2, 9, 11, dtype=torch.float64)
        for block, (scale, x, y) in zip(per_block, per_window, strict=True):
            zero, wide = torch.zeros_like(scale), scale * width / height
            theta = torch.stack([1 / wide, zero, -x / wide, zero, 1 / scale, -y / scale])
            grid = F.affine_grid(theta.view(1, 2, 3), [1, 2, 9, 11], align_corners=False)
            total = total + F.grid_sample(
                block[None], grid, padding_mode="zeros", align_corners=False
            )
        sums.append(total)
    ours, oracle = paste_blocks(blocks, windows, (9, 11)), torch.cat(sums)
    torch.testing.assert_close(ours, oracle)
    weights = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), [blocks, windows]),
        torch.autograd.grad((oracle * weights).sum(), [blocks, windows]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_pastes_gradients_are_its_finite_differences():
    blocks = torch.randn(1, 2, 2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    windows = some_windows(1, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda b, w: paste_blocks(b, w, (7, 6)), (blocks, windows))


@pytest.mark.parametrize("height, width", [(8, 8), (4, 10)])
@pytest.mark.parametrize("top, left", [(0, 0), (3, 13), (12, 5)])
def test_an_aligned_paste_fills_a_slice_and_nothing_else(
    top: int, left: int, height: int, width: int
):
    block = torch.rand(1, 1, 1, 3, height, width)
    at = window(height / 24, 2 * (left + width / 2) / 24 - 1, 2 * (top + height / 2) / 24 - 1)
    expected = torch.zeros(1, 3, 24, 24)
    expected[0, :, top : top + height, left : left + width] = block
    memory = paste_blocks(block, at, (24, 24))
    torch.testing.assert_close(memory, expected, rtol=1e-5, atol=1e-5)
    back = read_blocks(memory, at, (height, width))
    torch.testing.assert_close(back, block, rtol=1e-5, atol=1e-5)


def test_a_mirrored_window_pastes_what_it_reads_back():
    block, at = torch.rand(1, 1, 1, 2, 6, 6), window(-6 / 20, 0.2, -0.3)  # pixels 9-14 and 4-9
    memory = paste_blocks(block, at, (20, 20))
    expected = block[0, 0, 0].flip(-1, -2)
    torch.testing.assert_close(memory[0, :, 4:10, 9:15], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read_blocks(memory, at, 6), block, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("down, across", [(0.0, 0.5), (0.3, 0.2), (0.5, 0.9)])
def test_a_block_between_pixels_comes_back_slightly_blurred(down: float, across: float):
    """Twice interpolated at a shift of d pixels is a blur [d(1-d), 1 - 2d(1-d), d(1-d)] along each
    axis: exactly that for any block, and within 0.02 of the block where it is smooth."""
    line = torch.sin(torch.pi * torch.arange(1, 15, dtype=torch.float64) / 15)
    smooth = line[:, None] * line  # second differences of at most (pi / 15)^2 = 0.044
    rough = torch.randn(14, 14, dtype=torch.float64)
    block = torch.stack([smooth, rough]).view(1, 1, 1, 2, 14, 14)
    top, left = 8 + down, 5 + across
    at = window(14 / 32, 2 * (left + 7) / 32 - 1, 2 * (top + 7) / 32 - 1, torch.float64)
    back = read_blocks(paste_blocks(block, at, (32, 32)), at, 14)[0, 0, 0]
    blurs = []
    for shift in (down, across):
        side = shift * (1 - shift)
        blurs.append(torch.tensor([side, 1 - 2 * side, side], dtype=torch.float64))
    kernel = (blurs[0][:, None] * blurs[1]).view(1, 1, 3, 3)
    expected = F.conv2d(block[0, 0, 0][:, None], kernel, padding=1)[:, 0]
    torch.testing.assert_close(back, expected)
    torch.testing.assert_close(back[0], smooth, atol=0.02, rtol=0)


@pytest.mark.parametrize("scale", [0.15, 0.4, 0.7, -0.7])
@pytest.mark.parametrize("height, width", [(4, 4), (3, 6)])
def test_a_block_keeps_its_value_however_wide_it_is_pasted(scale: float, height: int, width: int):
    """Gain one: five stays five up to half a block's pixel from the edge, and beyond that fades."""
    block = torch.full((1, 1, 1, 1, height, width), 5.0)
    memory = paste_blocks(block, window(scale, 0.13, -0.21), (40, 40))[0, 0]
    centres = (2 * torch.arange(40) + 1) / 40 - 1
    reach = abs(scale)
    rows, columns = (centres + 0.21).abs() / reach, (centres - 0.13).abs() / reach * height / width
    inside = (rows[:, None] < 1 - 1 / height) & (columns < 1 - 1 / width)
    outside = (rows[:, None] > 1 + 1 / height) | (columns > 1 + 1 / width)
    assert inside.any() and outside.any()
    torch.testing.assert_close(memory[inside], torch.full_like(memory[inside], 5.0))
    assert (memory[outside] == 0).all()
    assert (memory <= 5 + 1e-4).all() and (memory >= 0).all()


def test_a_memory_is_the_sum_of_its_pastes():
    """Each episode of its own blocks, each block at its own window."""
    blocks, windows = torch.randn(3, 4, 2, 2, 3, 5, dtype=torch.float64), some_windows(3, 4, 2)
    whole = paste_blocks(blocks, windows, (9, 8))
    for b in range(3):
        total = torch.zeros(2, 9, 8, dtype=torch.float64)
        for t in range(4):
            for k in range(2):
                alone = paste_blocks(
                    blocks[b, t, k][None, None, None], windows[b, t, k].view(1, 1, 1, 3), (9, 8)
                )
                total += alone[0]
        torch.testing.assert_close(whole[b], total)
