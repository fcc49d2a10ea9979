"""f_ST: cut blocks out of a memory with a spatial transformer (Eq. 5, 8 and 9). Pure functions."""

import torch

from kanerva.shapes import MemoryMap, Traces, Weights, WindowPart, Windows


def triangle_weights(scale: WindowPart, shift: WindowPart, block: int, size: int) -> Weights:
    """Bilinear weights of one axis: row i of a block as a mix of the memory's rows (App. A).

    Window coordinates live on [-1, 1]; pixel centres follow `align_corners=False`.
    """
    centres = (2 * torch.arange(block, device=scale.device, dtype=scale.dtype) + 1) / block - 1
    rows = ((scale[..., None] * centres + shift[..., None] + 1) * size - 1) / 2
    columns = torch.arange(size, device=scale.device, dtype=scale.dtype)
    return (1 - (rows[..., None] - columns).abs()).clamp(min=0)


def read_blocks(memory: MemoryMap, windows: Windows, block: int) -> Traces:
    """Cut one block of memory for each window (scale, x, y): where to look, and how wide.

    Scale and shift only, so the spatial transformer splits into two small products: the same
    numbers as `affine_grid` and `grid_sample`, with a deterministic gradient that reaches only
    what a block covers (§3.4). What lies outside the memory reads as zero.
    """
    scale, x, y = windows.unbind(-1)
    down = triangle_weights(scale, y, block, memory.shape[-2])  # (B, T, K, h, Hm)
    across = triangle_weights(scale, x, block, memory.shape[-1])  # (B, T, K, w, Wm)
    rows = torch.einsum("btkhm,bcmn->btkchn", down, memory)
    return torch.einsum("btkchn,btkwn->btkchw", rows, across)
