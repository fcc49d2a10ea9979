"""silu(group_norm(x)) in one kernel each way, for channels-last maps on a GPU."""

# Where triton's names are missing, `supported` says no and nothing reaches them.
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, no_type_check

import torch
from torch import Tensor

from kanerva.layers.kernels import AVAILABLE
from kanerva.layers.kernels.norm_tiles import (
    Maps,
    PerChannel,
    require_triton,
    supported,
    tiling,
)

if AVAILABLE:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from torch.library import triton_op, wrap_triton

    from kanerva.layers.kernels.norm_tiles import (
        group_mean,
        keep_per_group,
        load_tile,
        moments,
        moments_in_chunks,
        recall_per_group,
        store_tile,
    )

__all__ = ["norm_silu", "supported"]


def norm_silu(x: Maps, weight: PerChannel, bias: PerChannel, groups: int, eps: float) -> Maps:
    """silu(group_norm(x)). Statistics in float32, the output in x's dtype and channels-last."""
    require_triton()
    flat = x.flatten(2).transpose(1, 2).contiguous()  # (N, P, C), a view where x is channels-last
    y, _, _ = _norm_silu(flat, weight, bias, groups, eps)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


# The operators, on flat maps (N, P, C). Each returns the group statistics (N, G) beside the map, or
# beside its gradient every sample's part of the parameters' gradients: summed by torch, no atomics.


def _norm_silu_forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x)
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    grid, cut = tiling(x, groups)
    wrap_triton(_norm_silu_kernel)[grid](x, weight, bias, y, mean, rstd, x.shape[1], eps, **cut)
    return y, mean, rstd


def _norm_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x)
    parts = x.new_empty(x.shape[0], 2, x.shape[2], dtype=torch.float32)
    grid, cut = tiling(x, mean.shape[1])
    wrap_triton(_norm_silu_backward_kernel)[grid](
        dy, x, weight, bias, mean, rstd, dx, parts, x.shape[1], **cut
    )
    return dx, parts


def _norm_silu_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _norm_silu_grads(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, parts = _norm_silu_back(dy.contiguous(), *ctx.saved_tensors)
    dweight, dbias = parts.sum(0).unbind(0)
    return dx, dweight, dbias, None, None


# The kernels: `norm_tiles` says what a program has, and what ALL, C, G, ROWS and WHOLE are.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def _silu_of_norm(x, mean, rstd, weight, bias):
        u = (x - mean[None, :]) * (rstd * weight)[None, :] + bias[None, :]
        return u * tl.sigmoid(u)

    @triton.jit
    @no_type_check
    def _norm_silu_kernel(
        x_ptr,
        weight_ptr,
        bias_ptr,
        y_ptr,
        mean_ptr,
        rstd_ptr,
        P,
        eps: tl.constexpr,
        ALL: tl.constexpr,
        C: tl.constexpr,
        G: tl.constexpr,
        ROWS: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        sample = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * C + tl.arange(0, C)
        here = sample * P * ALL + tl.program_id(1) * C
        slot = sample * (ALL // C) + tl.program_id(1)
        x_ptr += here
        y_ptr += here
        weight = tl.load(weight_ptr + channel).to(tl.float32)
        bias = tl.load(bias_ptr + channel).to(tl.float32)
        if WHOLE:
            x = load_tile(x_ptr, 0, P, ALL, C, ROWS)
            mean, variance = moments(x, P, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            store_tile(y_ptr, _silu_of_norm(x, mean, rstd, weight, bias), 0, P, ALL, C, ROWS)
        else:
            mean, variance = moments_in_chunks(x_ptr, P, ALL, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            for start in range(0, P, ROWS):
                x = load_tile(x_ptr, start, P, ALL, C, ROWS)
                store_tile(
                    y_ptr, _silu_of_norm(x, mean, rstd, weight, bias), start, P, ALL, C, ROWS
                )
        keep_per_group(mean_ptr, mean, slot, C, G)
        keep_per_group(rstd_ptr, rstd, slot, C, G)

    @triton.jit
    @no_type_check
    def _silu_of_norm_slope(x, dy, mean, rstd, weight, bias):
        # The normalised x, and the gradient of u = weight * normalised + bias.
        normal = (x - mean[None, :]) * rstd[None, :]
        u = normal * weight[None, :] + bias[None, :]
        s = tl.sigmoid(u)
        return normal, dy * s * (1.0 + u * (1.0 - s))

    @triton.jit
    @no_type_check
    def _norm_silu_backward_kernel(
        dy_ptr,
        x_ptr,
        weight_ptr,
        bias_ptr,
        mean_ptr,
        rstd_ptr,
        dx_ptr,
        parts_ptr,
        P,
        ALL: tl.constexpr,
        C: tl.constexpr,
        G: tl.constexpr,
        ROWS: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        sample = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * C + tl.arange(0, C)
        here = sample * P * ALL + tl.program_id(1) * C
        slot = sample * (ALL // C) + tl.program_id(1)
        dy_ptr += here
        x_ptr += here
        dx_ptr += here
        weight = tl.load(weight_ptr + channel).to(tl.float32)
        bias = tl.load(bias_ptr + channel).to(tl.float32)
        mean = recall_per_group(mean_ptr, slot, C, G)
        rstd = recall_per_group(rstd_ptr, slot, C, G)
        if WHOLE:
            x = load_tile(x_ptr, 0, P, ALL, C, ROWS)
            dy = load_tile(dy_ptr, 0, P, ALL, C, ROWS)
            normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
            dweight = tl.sum(du * normal, axis=0)
            dbias = tl.sum(du, axis=0)
            along = group_mean(weight * dweight, P, C, G)
            common = group_mean(weight * dbias, P, C, G)
            dx = du * weight[None, :] - common[None, :] - normal * along[None, :]
            store_tile(dx_ptr, dx * rstd[None, :], 0, P, ALL, C, ROWS)
        else:
            dweights = tl.zeros((ROWS, C), tl.float32)
            dbiases = tl.zeros((ROWS, C), tl.float32)
            for start in range(0, P, ROWS):
                x = load_tile(x_ptr, start, P, ALL, C, ROWS)
                dy = load_tile(dy_ptr, start, P, ALL, C, ROWS)
                normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
                dweights += du * normal
                dbiases += du
            dweight = tl.sum(dweights, axis=0)
            dbias = tl.sum(dbiases, axis=0)
            along = group_mean(weight * dweight, P, C, G)
            common = group_mean(weight * dbias, P, C, G)
            for start in range(0, P, ROWS):
                x = load_tile(x_ptr, start, P, ALL, C, ROWS)
                dy = load_tile(dy_ptr, start, P, ALL, C, ROWS)
                normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
                dx = du * weight[None, :] - common[None, :] - normal * along[None, :]
                store_tile(dx_ptr, dx * rstd[None, :], start, P, ALL, C, ROWS)
        parts_ptr += sample * 2 * ALL + channel
        tl.store(parts_ptr, dweight)
        tl.store(parts_ptr + ALL, dbias)

    _norm_silu: Any = triton_op("kanerva::norm_silu", _norm_silu_forward, mutates_args={})
    _norm_silu_back: Any = triton_op(
        "kanerva::norm_silu_backward", _norm_silu_backward, mutates_args={}
    )
    _norm_silu.register_autograd(_norm_silu_grads, setup_context=_norm_silu_keep)
