"""The layers of the pixel code after its first, for training: one GPU kernel for each direction.

Plain PyTorch writes and reads a tensor of (images, pixels, width) about twenty times in a training
step, and waits for memory. Here one Triton program takes some pixels through all layers. The
backward kernel does so again, then goes back; only what the weights' gradients need is written.

Activations and weights are integers that bfloat16 represents exactly, and sums are in float32: the
output equals that of the plain layers (`memory/pixel_code.py`). Call `supported` first.
"""

# Without triton its names are undefined, but `supported` then returns False and nothing uses them.
# pyright: reportPossiblyUnboundVariable=false

import os
from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.layers.kernels import AVAILABLE

if AVAILABLE:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from torch.library import triton_op, wrap_triton

_ROWS, _WARPS = 64, 4  # pixels and warps of one program
# What products are computed from. Triton's interpreter, for tests, cannot multiply bfloat16.
_FACTOR = torch.float32 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16

Sums = Float[Tensor, "N n W"]


def supported(sums: Tensor, layers: int) -> bool:
    """Whether the kernels take these sums and this many layers of `width` units: on a GPU, 2."""
    return (
        AVAILABLE
        and sums.is_cuda
        and sums.dtype == torch.float32
        and sums.numel() > 0
        and sums.shape[-1] in (16, 32, 64, 128)
        and layers == 2
    )


def fixed_layers(
    known: Sums,
    looked: Sums,
    place: Float[Tensor, "n W"],
    weights: Float[Tensor, "2 W W"],
    biases: Float[Tensor, "2 W"],
    last: Float[Tensor, " W"],
) -> Float[Tensor, "N n"]:
    """From the sums of a first layer, known + looked + place, through two layers to the weighted
    sum of the last activations. Everything holds integers; everything gets a gradient."""
    if not AVAILABLE:
        raise RuntimeError("fused layers need triton and torch>=2.6: call `supported` first")
    inputs = (known, looked, place, weights, biases, last)
    return _layers(*(each.contiguous() for each in inputs))


# The operators. A row is one pixel of one image; `place` repeats for every image.


def _forward(
    known: Tensor, looked: Tensor, place: Tensor, weights: Tensor, biases: Tensor, last: Tensor
) -> Tensor:
    images, pixels, width = known.shape
    rows = images * pixels
    y = known.new_empty(images, pixels)
    grid = ((rows + _ROWS - 1) // _ROWS,)
    wrap_triton(_forward_kernel)[grid](
        known, looked, place, weights.to(_FACTOR), biases, last, y, rows, pixels,
        W=int(width), ROWS=_ROWS, num_warps=_WARPS,
    )  # fmt: skip
    return y


def _backward(
    dy: Tensor,
    known: Tensor,
    looked: Tensor,
    place: Tensor,
    weights: Tensor,
    biases: Tensor,
    last: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the first sums, of the weights, and of the two biases and the last layer."""
    images, pixels, width = known.shape
    rows = images * pixels
    programs = (rows + _ROWS - 1) // _ROWS
    first = torch.empty_like(known)
    # For the gradients of the weights: activations before both layers, gradients after them.
    half = known.new_empty(4, images, pixels, width, dtype=_FACTOR)
    parts = known.new_empty(programs, 3, width)
    wrap_triton(_backward_kernel)[(programs,)](
        dy, known, looked, place, weights.to(_FACTOR), biases, last, first, half, parts,
        rows, pixels, W=int(width), ROWS=_ROWS, num_warps=_WARPS,
    )  # fmt: skip
    # One product for each image: a single long sum for each weight would keep few processors busy.
    products = [torch.bmm(half[2 + i].mT, half[i]).float().sum(dim=0) for i in range(2)]
    return first, torch.stack(products), parts.sum(dim=0)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grads(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    first, weights, vectors = _layers_back(dy.contiguous(), *ctx.saved_tensors)
    return first, first, first.sum(dim=0), weights, vectors[:2], vectors[2]


# The kernels. Activations are clamp(round(sums / 64), 0, 255), with a slope of 0.01 outside and
# 1.01 inside (`memory/fixed_point.py`). Comparisons, unlike minima and maxima, keep a NaN.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def _activate(sums):
        rounded = tl.floor(sums * (1.0 / 64.0) + 0.5)
        rounded = tl.where(rounded < 0.0, 0.0, rounded)
        return tl.where(rounded > 255.0, 255.0, rounded)

    @triton.jit
    @no_type_check
    def _slope(sums):
        inside = (sums >= 0.0) & (sums <= 64.0 * 255.0)
        return tl.where(inside, 1.01 / 64.0, 0.01 / 64.0)

    @triton.jit
    @no_type_check
    def _tile(row, unit, rows, W: tl.constexpr, ROWS: tl.constexpr):
        # Where the program's tile of (rows, W) starts, the offsets within it, and a mask. One start
        # and small offsets: addresses of 64 bits, one for each number, would fill the registers.
        start = tl.program_id(0).to(tl.int64) * (ROWS * W)
        at = tl.arange(0, ROWS)[:, None] * W + unit[None, :]
        return start, at, (row < rows)[:, None]

    @triton.jit
    @no_type_check
    def _load_sums(known_ptr, looked_ptr, place_ptr, at, pixel, unit, mask, W: tl.constexpr):
        # The sums of the first layer. `at`: where the program's tile lies in a tensor of rows.
        known = tl.load(known_ptr + at, mask=mask, other=0.0)
        looked = tl.load(looked_ptr + at, mask=mask, other=0.0)
        return known + looked + tl.load(place_ptr + pixel[:, None] * W + unit[None, :])

    @triton.jit
    @no_type_check
    def _multiply(x, weight_ptr, bias_ptr, unit, W: tl.constexpr):
        # Activations by a weight matrix (outputs, inputs).
        weight = tl.load(weight_ptr + unit[:, None] * W + unit[None, :])
        return tl.dot(x.to(weight.dtype), tl.trans(weight)) + tl.load(bias_ptr + unit)[None, :]

    @triton.jit
    @no_type_check
    def _forward_kernel(
        known_ptr,
        looked_ptr,
        place_ptr,
        weight_ptr,
        bias_ptr,
        last_ptr,
        y_ptr,
        rows,
        pixels,
        W: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        row, unit = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, W)
        start, at, mask = _tile(row, unit, rows, W, ROWS)
        sums = _load_sums(
            known_ptr + start, looked_ptr + start, place_ptr, at, row % pixels, unit, mask, W
        )
        sums = _multiply(_activate(sums), weight_ptr, bias_ptr, unit, W)
        sums = _multiply(_activate(sums), weight_ptr + W * W, bias_ptr + W, unit, W)
        y = tl.sum(_activate(sums) * tl.load(last_ptr + unit)[None, :], axis=1)
        tl.store(y_ptr + row, y, mask=row < rows)

    @triton.jit
    @no_type_check
    def _backward_kernel(
        dy_ptr,
        known_ptr,
        looked_ptr,
        place_ptr,
        weight_ptr,
        bias_ptr,
        last_ptr,
        first_ptr,
        half_ptr,
        parts_ptr,
        rows,
        pixels,
        W: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        row, unit = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, W)
        start, at, mask = _tile(row, unit, rows, W, ROWS)
        sums = _load_sums(
            known_ptr + start, looked_ptr + start, place_ptr, at, row % pixels, unit, mask, W
        )
        size = tl.cast(rows, tl.int64) * W  # of one of the four tensors in `half`
        half_ptr += start
        x = _activate(sums)
        tl.store(half_ptr + at, x, mask=mask)
        sums = _multiply(x, weight_ptr, bias_ptr, unit, W)
        slope1, x = _slope(sums), _activate(sums)
        tl.store(half_ptr + size + at, x, mask=mask)
        sums = _multiply(x, weight_ptr + W * W, bias_ptr + W, unit, W)
        dy = tl.load(dy_ptr + row, mask=row < rows, other=0.0)[:, None]
        parts_ptr += tl.program_id(0) * 3 * W + unit
        tl.store(parts_ptr + 2 * W, tl.sum(dy * _activate(sums), axis=0))
        d = dy * tl.load(last_ptr + unit)[None, :] * _slope(sums)
        tl.store(parts_ptr + W, tl.sum(d, axis=0))
        tl.store(half_ptr + 3 * size + at, d, mask=mask)
        matrix = unit[:, None] * W + unit[None, :]
        weight = tl.load(weight_ptr + W * W + matrix)
        d = tl.dot(d.to(weight.dtype), weight) * slope1
        tl.store(parts_ptr, tl.sum(d, axis=0))
        tl.store(half_ptr + 2 * size + at, d, mask=mask)
        weight = tl.load(weight_ptr + matrix)
        d = tl.dot(d.to(weight.dtype), weight)
        # loaded again: to keep their slope until here would take too many registers
        sums = _load_sums(
            known_ptr + start, looked_ptr + start, place_ptr, at, row % pixels, unit, mask, W
        )
        tl.store(first_ptr + start + at, d * _slope(sums), mask=mask)

    _layers: Any = triton_op("kanerva::fixed_layers", _forward, mutates_args={})
    _layers_back: Any = triton_op("kanerva::fixed_layers_backward", _backward, mutates_args={})
    _layers.register_autograd(_grads, setup_context=_keep)
