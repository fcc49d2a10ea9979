"""Shared by the fused norms: which maps they support, how a sample is tiled, common kernel parts.

Plain PyTorch reads a map several times for a norm and its activation: for the statistics, to
normalise, to activate, and once more for each step of the backward pass. In `norms.py` one Triton
program takes one sample. Each pass reads it once and keeps it in registers if it fits, and reads
it twice otherwise.

Call `supported` first. Where it returns False, `GroupNorm`, `SiLU` and `EvoNormS0` compute the same
numbers.
"""

# Without triton its names are undefined, but `supported` then returns False and nothing uses them.
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.layers.kernels import AVAILABLE

if AVAILABLE:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

Maps = Float[Tensor, "N C H W"]
PerChannel = Float[Tensor, " C"]


def supported(x: Tensor, groups: int) -> bool:
    """Whether the kernels can run on this map: it is on a GPU, and its channels and its channels
    per group are powers of two."""
    if not (AVAILABLE and x.is_cuda and x.ndim == 4 and x.numel() > 0):
        return False
    channels = x.shape[1]
    return (
        x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and channels <= 1024
        and channels % groups == 0
        and _power_of_two(channels)
        and _power_of_two(channels // groups)
    )


@no_type_check  # under torch.compile the shape checks of a test run cannot be traced
def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@no_type_check
def require_triton() -> None:
    if not AVAILABLE:
        raise RuntimeError("fused norms need triton and torch>=2.6: call `supported` first")


# How a sample (P, C) is tiled. A program takes whole groups, at least `_SLICE` channels of them. Up
# to 16384 numbers stay in registers; larger samples are read in chunks. Chosen by measurement on an
# H200: a tile of (ROWS, G, C / G) needs fewer exchanges between threads but was slower on large
# maps.

_SLICE, _PER_WARP = 32, 1024


def tiling(flat: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of programs, and their compile-time constants."""
    samples, positions, channels = (int(n) for n in flat.shape)  # not symbolic when compiled
    own = max(channels // groups, min(channels, _SLICE))  # channels of one program
    rows = 1 << (positions - 1).bit_length()
    whole = rows * own <= 16384
    if not whole:
        rows = max(8192 // own, 1)
    warps = rows * own // (_PER_WARP if groups > 1 else 2 * _PER_WARP)
    return (samples, channels // own), {
        "ALL": channels,
        "C": own,
        "G": own * groups // channels,
        "ROWS": rows,
        "WHOLE": whole,
        "num_warps": min(max(warps, 4), 16),
    }


# The operators, on flat maps (N, P, C). A forward returns the map and the group statistics (N, G).
# A backward returns the map's gradient and each sample's part of the parameters' gradients, which
# torch sums: no atomics. Each operator wraps its own kernel: `triton_op` looks for it there.


@no_type_check
def launch_forward(kernel, x, parameters, groups, eps):
    y = torch.empty_like(x)
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    grid, cut = tiling(x, groups)
    kernel[grid](x, *parameters, y, mean, rstd, x.shape[1], eps, **cut)
    return y, mean, rstd


@no_type_check
def launch_backward(kernel, dy, x, parameters, mean, rstd, parts):
    dx = torch.empty_like(x)
    sums = x.new_empty(x.shape[0], parts, x.shape[2], dtype=torch.float32)
    grid, cut = tiling(x, mean.shape[1])
    kernel[grid](dy, x, *parameters, mean, rstd, dx, sums, x.shape[1], **cut)
    return dx, sums


@no_type_check
def differentiate(forward, backward):
    """Register the gradient of an operator whose backward needs the map and two parameters."""

    def keep(ctx, inputs, output):
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], mean, rstd)

    def grads(ctx, dy, *_):
        dx, parts = backward(dy.contiguous(), *ctx.saved_tensors)
        return dx, *parts.sum(0).unbind(0), None, None  # groups and eps have none

    forward.register_autograd(grads, setup_context=keep)


# The kernels. Program (n, k) takes sample n and the k-th slice of C of its ALL channels, which is G
# whole groups. Tiles are (ROWS, C); a group's statistic is repeated for each of its channels.
# `no_type_check` exempts them from the shape checks of a test run, because Triton compiles these
# functions from their source. `eps` is a constant because compiled graphs pass floats as float64.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def load_tile(ptr, start, P, ALL: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
        # Load the tile that starts at row `start`, in float32, with zeros past the last row.
        row = start + tl.arange(0, ROWS)[:, None]
        tile = tl.load(ptr + row * ALL + tl.arange(0, C)[None, :], mask=row < P, other=0.0)
        return tile.to(tl.float32)

    @triton.jit
    @no_type_check
    def store_tile(ptr, tile, start, P, ALL: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
        row = start + tl.arange(0, ROWS)[:, None]
        tl.store(ptr + row * ALL + tl.arange(0, C)[None, :], tile, mask=row < P)

    @triton.jit
    @no_type_check
    def group_mean(sums, P, C: tl.constexpr, G: tl.constexpr):
        # Turn sums over each channel's positions into the mean of its group, one per channel.
        total = tl.sum(tl.reshape(sums, (G, C // G)), axis=1)
        spread = tl.broadcast_to(total[:, None], (G, C // G))
        return tl.reshape(spread, (C,)) / (P * (C // G))

    @triton.jit
    @no_type_check
    def moments(x, P, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
        # Mean and variance of a sample that is all in registers: the mean, then squares about it.
        mean = group_mean(tl.sum(x, axis=0), P, C, G)
        centred = tl.where(tl.arange(0, ROWS)[:, None] < P, x - mean[None, :], 0.0)
        return mean, group_mean(tl.sum(centred * centred, axis=0), P, C, G)

    @triton.jit
    @no_type_check
    def moments_in_chunks(
        x_ptr, P, ALL: tl.constexpr, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr
    ):
        # The same in one pass over chunks. Each position of the tile follows Welford's recurrence
        # over its own rows, then Chan's formula combines them. No large squares are subtracted.
        row = tl.arange(0, ROWS)[:, None]
        means = tl.zeros((ROWS, C), tl.float32)
        squares = tl.zeros((ROWS, C), tl.float32)
        for start in range(0, P, ROWS):
            x = load_tile(x_ptr, start, P, ALL, C, ROWS)
            step = tl.where(start + row < P, x - means, 0.0)
            means += step / (start // ROWS + 1)
            squares += step * (x - means)
        seen = ((P - 1 - row) // ROWS + 1).to(tl.float32)  # rows seen at each position
        mean = group_mean(tl.sum(means * seen, axis=0), P, C, G)
        off = means - mean[None, :]
        return mean, group_mean(tl.sum(squares + seen * off * off, axis=0), P, C, G)

    @triton.jit
    @no_type_check
    def keep_per_group(ptr, values, slot, C: tl.constexpr, G: tl.constexpr):
        # Store one number per group, taken from the group's first channel.
        channel = tl.arange(0, C)
        first = channel % (C // G) == 0
        tl.store(ptr + slot * G + channel // (C // G), values, mask=first)

    @triton.jit
    @no_type_check
    def recall_per_group(ptr, slot, C: tl.constexpr, G: tl.constexpr):
        return tl.load(ptr + slot * G + tl.arange(0, C) // (C // G))
