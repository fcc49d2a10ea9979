"""Cutting blocks: grid_sample's numbers and gradients, plain slices, and the paper's example."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kanerva.memory.blocks import read_blocks, triangle_weights


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
