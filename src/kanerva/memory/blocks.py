"""f_ST: cut blocks out of a memory with a spatial transformer (Eq. 5, 8 and 9), and paste them in.

Pure functions. A window is (scale, x, y) on [-1, 1]: `scale` is its height as a share of the
memory's side, (x, y) its centre. Its width follows from the shape of the block: pixels are square.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kanerva.shapes import MemoryMap, Traces, Weights, WindowPart, Windows


def triangle_weights(scale: WindowPart, shift: WindowPart, block: int, size: int) -> Weights:
    """Bilinear weights of one axis: row i of a block as a mix of the memory's rows (App. A).

    Window coordinates live on [-1, 1]; pixel centres follow `align_corners=False`.
    """
    rows = ((_positions(scale, shift, block) + 1) * size - 1) / 2
    columns = torch.arange(size, device=scale.device, dtype=scale.dtype)
    return (1 - (rows[..., None] - columns).abs()).clamp(min=0)


def _positions(scale: WindowPart, shift: WindowPart, block: int) -> Float[Tensor, "B T K h"]:
    """The positions of a block's pixels along one axis of the memory, on [-1, 1]."""
    centres = (2 * torch.arange(block, device=scale.device, dtype=scale.dtype) + 1) / block - 1
    return scale[..., None] * centres + shift[..., None]


def read_blocks(memory: MemoryMap, windows: Windows, block: int | tuple[int, int]) -> Traces:
    """Cut one block of memory for each window (scale, x, y), which says where and how wide.

    A window only scales and shifts, so the spatial transformer splits into two small matrix
    products. They give the same numbers as `affine_grid` and `grid_sample`, and a deterministic
    gradient, which is zero outside the window (§3.4). Pixels outside the memory read as zero.
    Without gradients, four neighbours per pixel are looked up instead: the cost of a read then does
    not depend on the size of the memory.
    """
    height, width = (block, block) if isinstance(block, int) else block
    scale, x, y = windows.unbind(-1)
    if not torch.is_grad_enabled():
        return _read_by_lookup(memory, scale, x, y, height, width)
    down = triangle_weights(scale, y, height, memory.shape[-2])  # (B, T, K, h, Hm)
    across = triangle_weights(scale * (width / height), x, width, memory.shape[-1])
    rows = torch.einsum("btkhm,bcmn->btkchn", down, memory)
    return torch.einsum("btkchn,btkwn->btkchw", rows, across)


def _read_by_lookup(
    memory: MemoryMap, scale: WindowPart, x: WindowPart, y: WindowPart, height: int, width: int
) -> Traces:
    """The same as `read_blocks`, by `grid_sample`."""
    down, across = _positions(scale, y, height), _positions(scale * (width / height), x, width)
    shape = (*scale.shape, height, width)
    grid = torch.stack([across[..., None, :].expand(shape), down[..., None].expand(shape)], dim=-1)
    flat = grid.flatten(1, 3).to(memory.dtype)  # (B, T K h, w, 2)
    found = F.grid_sample(memory, flat, align_corners=False)
    return found.unflatten(2, shape[1:-1]).permute(0, 2, 3, 1, 4, 5)


def paste_blocks(
    blocks: Float[Tensor, "B T K Cm h w"], windows: Windows, size: tuple[int, int]
) -> MemoryMap:
    """Paste each block at its window and sum the results: the inverse map of `read_blocks`.

    Each pixel of the memory looks up its place in the block, so a block keeps its values however
    wide its window is; the transpose of the read would multiply them by the window's area.
    Gradients flow to blocks and windows. A scale of zero has no inverse.
    """
    height, width = blocks.shape[-2:]
    scale, x, y = windows.unbind(-1)
    wide = scale * (width / height)
    down = triangle_weights(1 / scale, -y / scale, size[0], height)  # (B, T, K, Hm, h)
    across = triangle_weights(1 / wide, -x / wide, size[1], width)  # (B, T, K, Wm, w)
    rows = torch.einsum("btkchw,btknw->btkchn", blocks, across)
    return torch.einsum("btkmh,btkchn->bcmn", down, rows)
