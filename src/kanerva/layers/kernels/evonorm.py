"""EvoNorm-S0 in one kernel each way, for channels-last maps on a GPU."""

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

__all__ = ["evonorm", "supported"]


def evonorm(
    x: Maps, v: PerChannel, gamma: PerChannel, beta: PerChannel, groups: int, eps: float
) -> Maps:
    """EvoNorm-S0: x * sigmoid(v x) / group_std(x) * gamma + beta, else as `norm_silu`."""
    require_triton()
    flat = x.flatten(2).transpose(1, 2).contiguous()
    y, _, _ = _evonorm(flat, v, gamma, beta, groups, eps)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


# The operators, on flat maps (N, P, C). Each returns the group statistics (N, G) beside the map, or
# beside its gradient every sample's part of the parameters' gradients: summed by torch, no atomics.


def _evonorm_forward(
    x: Tensor, v: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x)
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    grid, cut = tiling(x, groups)
    wrap_triton(_evonorm_kernel)[grid](x, v, gamma, beta, y, mean, rstd, x.shape[1], eps, **cut)
    return y, mean, rstd


def _evonorm_backward(
    dy: Tensor, x: Tensor, v: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x)
    parts = x.new_empty(x.shape[0], 3, x.shape[2], dtype=torch.float32)
    grid, cut = tiling(x, mean.shape[1])
    wrap_triton(_evonorm_backward_kernel)[grid](
        dy, x, v, gamma, mean, rstd, dx, parts, x.shape[1], **cut
    )
    return dx, parts


def _evonorm_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, v, gamma, _, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, v, gamma, mean, rstd)


def _evonorm_grads(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, parts = _evonorm_back(dy.contiguous(), *ctx.saved_tensors)
    dv, dgamma, dbeta = parts.sum(0).unbind(0)
    return dx, dv, dgamma, dbeta, None, None


# The kernels: `norm_tiles` says what a program has, and what ALL, C, G, ROWS and WHOLE are.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def _evonorm_kernel(
        x_ptr,
        v_ptr,
        gamma_ptr,
        beta_ptr,
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
        v = tl.load(v_ptr + channel).to(tl.float32)[None, :]
        gamma = tl.load(gamma_ptr + channel).to(tl.float32)
        beta = tl.load(beta_ptr + channel).to(tl.float32)[None, :]
        if WHOLE:
            x = load_tile(x_ptr, 0, P, ALL, C, ROWS)
            mean, variance = moments(x, P, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            y = x * tl.sigmoid(v * x) * (rstd * gamma)[None, :] + beta
            store_tile(y_ptr, y, 0, P, ALL, C, ROWS)
        else:
            mean, variance = moments_in_chunks(x_ptr, P, ALL, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            for start in range(0, P, ROWS):
                x = load_tile(x_ptr, start, P, ALL, C, ROWS)
                y = x * tl.sigmoid(v * x) * (rstd * gamma)[None, :] + beta
                store_tile(y_ptr, y, start, P, ALL, C, ROWS)
        keep_per_group(mean_ptr, mean, slot, C, G)
        keep_per_group(rstd_ptr, rstd, slot, C, G)

    @triton.jit
    @no_type_check
    def _evonorm_slope(x, dy, mean, v, scale, pull):
        # scale = gamma / std; pull is what the group's variance sends back, per unit from the mean.
        s = tl.sigmoid(v[None, :] * x)
        slope = s + v[None, :] * x * s * (1.0 - s)
        return dy * scale[None, :] * slope + pull[None, :] * (x - mean[None, :])

    @triton.jit
    @no_type_check
    def _evonorm_backward_kernel(
        dy_ptr,
        x_ptr,
        v_ptr,
        gamma_ptr,
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
        v = tl.load(v_ptr + channel).to(tl.float32)
        gamma = tl.load(gamma_ptr + channel).to(tl.float32)
        mean = recall_per_group(mean_ptr, slot, C, G)
        rstd = recall_per_group(rstd_ptr, slot, C, G)
        scale = rstd * gamma
        # With a = x s: dgamma = rstd sum(dy a), dv = scale sum(dy a x (1 - s)).
        if WHOLE:
            x = load_tile(x_ptr, 0, P, ALL, C, ROWS)
            dy = load_tile(dy_ptr, 0, P, ALL, C, ROWS)
            s = tl.sigmoid(v[None, :] * x)
            dv = tl.sum(dy * x * s * x * (1.0 - s), axis=0) * scale
            dgamma = tl.sum(dy * x * s, axis=0) * rstd
            dbeta = tl.sum(dy, axis=0)
            pull = -rstd * rstd * group_mean(gamma * dgamma, P, C, G)
            store_tile(dx_ptr, _evonorm_slope(x, dy, mean, v, scale, pull), 0, P, ALL, C, ROWS)
        else:
            dvs = tl.zeros((ROWS, C), tl.float32)
            dgammas = tl.zeros((ROWS, C), tl.float32)
            dbetas = tl.zeros((ROWS, C), tl.float32)
            for start in range(0, P, ROWS):
                x = load_tile(x_ptr, start, P, ALL, C, ROWS)
                dy = load_tile(dy_ptr, start, P, ALL, C, ROWS)
                s = tl.sigmoid(v[None, :] * x)
                dvs += dy * x * s * x * (1.0 - s)
                dgammas += dy * x * s
                dbetas += dy
            dv = tl.sum(dvs, axis=0) * scale
            dgamma = tl.sum(dgammas, axis=0) * rstd
            dbeta = tl.sum(dbetas, axis=0)
            pull = -rstd * rstd * group_mean(gamma * dgamma, P, C, G)
            for start in range(0, P, ROWS):
                x = load_tile(x_ptr, start, P, ALL, C, ROWS)
                dy = load_tile(dy_ptr, start, P, ALL, C, ROWS)
                dx = _evonorm_slope(x, dy, mean, v, scale, pull)
                store_tile(dx_ptr, dx, start, P, ALL, C, ROWS)
        parts_ptr += sample * 3 * ALL + channel
        tl.store(parts_ptr, dv)
        tl.store(parts_ptr + ALL, dgamma)
        tl.store(parts_ptr + 2 * ALL, dbeta)

    _evonorm: Any = triton_op("kanerva::evonorm", _evonorm_forward, mutates_args={})
    _evonorm_back: Any = triton_op("kanerva::evonorm_backward", _evonorm_backward, mutates_args={})
    _evonorm.register_autograd(_evonorm_grads, setup_context=_evonorm_keep)
