"""silu(group_norm(x)) and EvoNorm-S0 on channels-last GPU maps: one kernel for each direction."""

# Without triton its names are undefined, but `supported` then returns False and nothing uses them.
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, no_type_check

from torch import Tensor

from kanerva.layers.kernels import AVAILABLE
from kanerva.layers.kernels.norm_tiles import (
    Maps,
    PerChannel,
    differentiate,
    launch_backward,
    launch_forward,
    require_triton,
    supported,
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

__all__ = ["evonorm", "norm_silu", "supported"]


def norm_silu(x: Maps, weight: PerChannel, bias: PerChannel, groups: int, eps: float) -> Maps:
    """silu(group_norm(x)). Statistics in float32, the output in x's dtype and channels-last."""
    require_triton()
    flat = x.flatten(2).transpose(1, 2).contiguous()  # (N, P, C), a view where x is channels-last
    y, _, _ = _norm_silu(flat, weight, bias, groups, eps)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


def _norm_silu_forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = wrap_triton(_norm_silu_kernel)
    return launch_forward(kernel, x, (weight, bias), groups, eps)


def _norm_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    kernel = wrap_triton(_norm_silu_backward_kernel)
    return launch_backward(kernel, dy, x, (weight, bias), mean, rstd, 2)


def evonorm(
    x: Maps, v: PerChannel, gamma: PerChannel, beta: PerChannel, groups: int, eps: float
) -> Maps:
    """EvoNorm-S0: x * sigmoid(v x) / group_std(x) * gamma + beta. Precision as in `norm_silu`."""
    require_triton()
    flat = x.flatten(2).transpose(1, 2).contiguous()
    y, _, _ = _evonorm(flat, v, gamma, beta, groups, eps)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


def _evonorm_forward(
    x: Tensor, v: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = wrap_triton(_evonorm_kernel)
    return launch_forward(kernel, x, (v, gamma, beta), groups, eps)


def _evonorm_backward(
    dy: Tensor, x: Tensor, v: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    kernel = wrap_triton(_evonorm_backward_kernel)
    return launch_backward(kernel, dy, x, (v, gamma), mean, rstd, 3)


# The kernels. `norm_tiles` explains what one program computes, and ALL, C, G, ROWS and WHOLE.

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
        # Return the normalised x, and the gradient of u = weight * normalised + bias.
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
    differentiate(_norm_silu, _norm_silu_back)

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
        # scale = gamma / std; pull is the gradient through the group's variance, per unit of
        # distance from the mean.
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
    differentiate(_evonorm, _evonorm_back)
