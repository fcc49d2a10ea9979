"""Norm and activation in one kernel, forward and backward, for channels-last maps on a GPU.

Plain PyTorch reads a map several times for each of them: for its statistics, to normalise, to
activate, and again for every step back. Here one Triton program has one sample: each direction
reads it once and keeps it in registers where it fits, else reads it twice.

Ask `supported` first; elsewhere `GroupNorm`, `SiLU` and `EvoNormS0` compute the same numbers.
"""

# Where triton's names are missing, `supported` says no and nothing reaches them.
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from torch.library import triton_op, wrap_triton  # torch 2.6
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True

Maps = Float[Tensor, "N C H W"]
PerChannel = Float[Tensor, " C"]


def supported(x: Tensor, groups: int) -> bool:
    """Whether the kernels take this map: on a GPU, channels (all, per group) powers of two."""
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


def norm_silu(x: Maps, weight: PerChannel, bias: PerChannel, groups: int, eps: float) -> Maps:
    """silu(group_norm(x)). Statistics in float32, the output in x's dtype and channels-last."""
    _insist()
    flat = x.flatten(2).transpose(1, 2).contiguous()  # (N, P, C), a view where x is channels-last
    y, _, _ = _norm_silu(flat, weight, bias, groups, eps)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


def evonorm(
    x: Maps, v: PerChannel, gamma: PerChannel, beta: PerChannel, groups: int, eps: float
) -> Maps:
    """EvoNorm-S0: x * sigmoid(v x) / group_std(x) * gamma + beta, else as `norm_silu`."""
    _insist()
    flat = x.flatten(2).transpose(1, 2).contiguous()
    y, _, _ = _evonorm(flat, v, gamma, beta, groups, eps)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


@no_type_check  # under torch.compile the shape checks of a test run cannot be traced
def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@no_type_check
def _insist() -> None:
    if not AVAILABLE:
        raise RuntimeError("fused norms need triton and torch>=2.6: ask `supported` first")


# How a sample (P, C) is cut. A program takes whole groups, at least `_SLICE` channels of them. Up
# to 16384 numbers stay in registers; more are read in chunks. Chosen by measurement on an H200.

_SLICE, _PER_WARP = 32, 1024


def _tiling(flat: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of programs and what each is told."""
    samples, positions, channels = (int(n) for n in flat.shape)  # not symbolic when compiled
    own = max(channels // groups, min(channels, _SLICE))  # channels of one program
    rows = 1 << (positions - 1).bit_length()
    whole = rows * own <= 16384
    if not whole:
        rows = max(8192 // own, 1)
    return (samples, channels // own), {
        "C": channels,
        "G": own * groups // channels,
        "W": channels // groups,
        "ROWS": rows,
        "WHOLE": whole,
        "num_warps": min(max(rows * own // _PER_WARP, 4), 16),
    }


# The operators, on flat maps (N, P, C). Each returns the group statistics (N, G) beside the map, or
# beside its gradient every sample's part of the parameters' gradients: summed by torch, no atomics.


def _norm_silu_forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x)
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    grid, cut = _tiling(x, groups)
    wrap_triton(_norm_silu_kernel)[grid](x, weight, bias, y, mean, rstd, x.shape[1], eps, **cut)
    return y, mean, rstd


def _norm_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x)
    parts = x.new_empty(x.shape[0], 2, x.shape[2], dtype=torch.float32)
    grid, cut = _tiling(x, mean.shape[1])
    wrap_triton(_norm_silu_backward_kernel)[grid](
        dy, x, weight, bias, mean, rstd, dx, parts, x.shape[1], **cut
    )
    return dx, parts


def _evonorm_forward(
    x: Tensor, v: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x)
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    grid, cut = _tiling(x, groups)
    wrap_triton(_evonorm_kernel)[grid](x, v, gamma, beta, y, mean, rstd, x.shape[1], eps, **cut)
    return y, mean, rstd


def _evonorm_backward(
    dy: Tensor, x: Tensor, v: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x)
    parts = x.new_empty(x.shape[0], 3, x.shape[2], dtype=torch.float32)
    grid, cut = _tiling(x, mean.shape[1])
    wrap_triton(_evonorm_backward_kernel)[grid](
        dy, x, v, gamma, mean, rstd, dx, parts, x.shape[1], **cut
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


# The kernels. Program (n, k) has sample n and its k-th G groups of W channels each; a tile is
# (ROWS, G, W), so that what is summed over rows and a group's channels is at its place for nothing.
# `no_type_check` keeps the shape checks of a test run off them: Triton compiles these functions
# from their source. `eps` is a constant because compiled graphs pass floats as float64.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def _channels(G: tl.constexpr, W: tl.constexpr):
        return tl.arange(0, G)[:, None] * W + tl.arange(0, W)[None, :]

    @triton.jit
    @no_type_check
    def _load(ptr, start, P, C: tl.constexpr, G: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
        # A tile from row `start` on, in float32, zero past the last row.
        row = start + tl.arange(0, ROWS)[:, None, None]
        tile = tl.load(ptr + row * C + _channels(G, W)[None, :, :], mask=row < P, other=0.0)
        return tile.to(tl.float32)

    @triton.jit
    @no_type_check
    def _store(
        ptr, tile, start, P, C: tl.constexpr, G: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr
    ):
        row = start + tl.arange(0, ROWS)[:, None, None]
        tl.store(ptr + row * C + _channels(G, W)[None, :, :], tile, mask=row < P)

    @triton.jit
    @no_type_check
    def _group_mean(sums, P, W: tl.constexpr):
        # (G,) from sums over a channel's positions, (G, W).
        return tl.sum(sums, axis=1) / (P * W)

    @triton.jit
    @no_type_check
    def _moments(x, P, W: tl.constexpr, ROWS: tl.constexpr):
        # Mean and variance of a sample held whole: first the mean, then squares about it.
        mean = tl.sum(tl.sum(x, axis=2), axis=0) / (P * W)
        inside = tl.arange(0, ROWS)[:, None, None] < P
        centred = tl.where(inside, x - mean[None, :, None], 0.0)
        return mean, tl.sum(tl.sum(centred * centred, axis=2), axis=0) / (P * W)

    @triton.jit
    @no_type_check
    def _moments_in_chunks(
        x_ptr, P, C: tl.constexpr, G: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr
    ):
        # The same in one pass: every place of the tile follows Welford's recurrence over its own
        # rows, then Chan's formula joins the places. No large squares are subtracted.
        row = tl.arange(0, ROWS)[:, None, None]
        means = tl.zeros((ROWS, G, W), tl.float32)
        squares = tl.zeros((ROWS, G, W), tl.float32)
        for start in range(0, P, ROWS):
            x = _load(x_ptr, start, P, C, G, W, ROWS)
            step = tl.where(start + row < P, x - means, 0.0)
            means += step / (start // ROWS + 1)
            squares += step * (x - means)
        seen = ((P - 1 - row) // ROWS + 1).to(tl.float32)  # rows of each place
        mean = tl.sum(tl.sum(means * seen, axis=2), axis=0) / (P * W)
        off = means - mean[None, :, None]
        return mean, tl.sum(tl.sum(squares + seen * off * off, axis=2), axis=0) / (P * W)

    @triton.jit
    @no_type_check
    def _silu_of_norm(x, mean, rstd, weight, bias):
        u = (x - mean[None, :, None]) * (rstd[:, None] * weight)[None, :, :] + bias[None, :, :]
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
        C: tl.constexpr,
        G: tl.constexpr,
        W: tl.constexpr,
        ROWS: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        sample = tl.program_id(0).to(tl.int64)
        first = tl.program_id(1) * G  # of this program's groups
        x_ptr += sample * P * C + first * W
        y_ptr += sample * P * C + first * W
        weight = tl.load(weight_ptr + first * W + _channels(G, W)).to(tl.float32)
        bias = tl.load(bias_ptr + first * W + _channels(G, W)).to(tl.float32)
        if WHOLE:
            x = _load(x_ptr, 0, P, C, G, W, ROWS)
            mean, variance = _moments(x, P, W, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            _store(y_ptr, _silu_of_norm(x, mean, rstd, weight, bias), 0, P, C, G, W, ROWS)
        else:
            mean, variance = _moments_in_chunks(x_ptr, P, C, G, W, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, C, G, W, ROWS)
                y = _silu_of_norm(x, mean, rstd, weight, bias)
                _store(y_ptr, y, start, P, C, G, W, ROWS)
        slot = sample * (C // W) + first + tl.arange(0, G)
        tl.store(mean_ptr + slot, mean)
        tl.store(rstd_ptr + slot, rstd)

    @triton.jit
    @no_type_check
    def _silu_of_norm_slope(x, dy, mean, rstd, weight, bias):
        # The normalised x, and the gradient of u = weight * normalised + bias.
        normal = (x - mean[None, :, None]) * rstd[None, :, None]
        u = normal * weight[None, :, :] + bias[None, :, :]
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
        C: tl.constexpr,
        G: tl.constexpr,
        W: tl.constexpr,
        ROWS: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        sample = tl.program_id(0).to(tl.int64)
        first = tl.program_id(1) * G
        dy_ptr += sample * P * C + first * W
        x_ptr += sample * P * C + first * W
        dx_ptr += sample * P * C + first * W
        weight = tl.load(weight_ptr + first * W + _channels(G, W)).to(tl.float32)
        bias = tl.load(bias_ptr + first * W + _channels(G, W)).to(tl.float32)
        slot = sample * (C // W) + first + tl.arange(0, G)
        mean = tl.load(mean_ptr + slot)
        rstd = tl.load(rstd_ptr + slot)
        if WHOLE:
            x = _load(x_ptr, 0, P, C, G, W, ROWS)
            dy = _load(dy_ptr, 0, P, C, G, W, ROWS)
            normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
            dweight = tl.sum(du * normal, axis=0)
            dbias = tl.sum(du, axis=0)
            along = _group_mean(weight * dweight, P, W)
            common = _group_mean(weight * dbias, P, W)
            dx = du * weight[None, :, :] - common[None, :, None] - normal * along[None, :, None]
            _store(dx_ptr, dx * rstd[None, :, None], 0, P, C, G, W, ROWS)
        else:
            dweights = tl.zeros((ROWS, G, W), tl.float32)
            dbiases = tl.zeros((ROWS, G, W), tl.float32)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, C, G, W, ROWS)
                dy = _load(dy_ptr, start, P, C, G, W, ROWS)
                normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
                dweights += du * normal
                dbiases += du
            dweight = tl.sum(dweights, axis=0)
            dbias = tl.sum(dbiases, axis=0)
            along = _group_mean(weight * dweight, P, W)
            common = _group_mean(weight * dbias, P, W)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, C, G, W, ROWS)
                dy = _load(dy_ptr, start, P, C, G, W, ROWS)
                normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
                dx = du * weight[None, :, :] - common[None, :, None] - normal * along[None, :, None]
                _store(dx_ptr, dx * rstd[None, :, None], start, P, C, G, W, ROWS)
        parts_ptr += sample * 2 * C + first * W + _channels(G, W)
        tl.store(parts_ptr, dweight)
        tl.store(parts_ptr + C, dbias)

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
        C: tl.constexpr,
        G: tl.constexpr,
        W: tl.constexpr,
        ROWS: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        sample = tl.program_id(0).to(tl.int64)
        first = tl.program_id(1) * G
        x_ptr += sample * P * C + first * W
        y_ptr += sample * P * C + first * W
        v = tl.load(v_ptr + first * W + _channels(G, W)).to(tl.float32)[None, :, :]
        gamma = tl.load(gamma_ptr + first * W + _channels(G, W)).to(tl.float32)
        beta = tl.load(beta_ptr + first * W + _channels(G, W)).to(tl.float32)[None, :, :]
        if WHOLE:
            x = _load(x_ptr, 0, P, C, G, W, ROWS)
            mean, variance = _moments(x, P, W, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            y = x * tl.sigmoid(v * x) * (rstd[:, None] * gamma)[None, :, :] + beta
            _store(y_ptr, y, 0, P, C, G, W, ROWS)
        else:
            mean, variance = _moments_in_chunks(x_ptr, P, C, G, W, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, C, G, W, ROWS)
                y = x * tl.sigmoid(v * x) * (rstd[:, None] * gamma)[None, :, :] + beta
                _store(y_ptr, y, start, P, C, G, W, ROWS)
        slot = sample * (C // W) + first + tl.arange(0, G)
        tl.store(mean_ptr + slot, mean)
        tl.store(rstd_ptr + slot, rstd)

    @triton.jit
    @no_type_check
    def _evonorm_slope(x, dy, mean, v, scale, pull):
        # scale = gamma / std; pull is what the group's variance sends back, per unit from the mean.
        s = tl.sigmoid(v[None, :, :] * x)
        slope = s + v[None, :, :] * x * s * (1.0 - s)
        return dy * scale[None, :, :] * slope + pull[None, :, None] * (x - mean[None, :, None])

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
        C: tl.constexpr,
        G: tl.constexpr,
        W: tl.constexpr,
        ROWS: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        sample = tl.program_id(0).to(tl.int64)
        first = tl.program_id(1) * G
        dy_ptr += sample * P * C + first * W
        x_ptr += sample * P * C + first * W
        dx_ptr += sample * P * C + first * W
        v = tl.load(v_ptr + first * W + _channels(G, W)).to(tl.float32)
        gamma = tl.load(gamma_ptr + first * W + _channels(G, W)).to(tl.float32)
        slot = sample * (C // W) + first + tl.arange(0, G)
        mean = tl.load(mean_ptr + slot)
        rstd = tl.load(rstd_ptr + slot)
        scale = rstd[:, None] * gamma
        # With a = x s: dgamma = rstd sum(dy a), dv = scale sum(dy a x (1 - s)).
        if WHOLE:
            x = _load(x_ptr, 0, P, C, G, W, ROWS)
            dy = _load(dy_ptr, 0, P, C, G, W, ROWS)
            s = tl.sigmoid(v[None, :, :] * x)
            dv = tl.sum(dy * x * s * x * (1.0 - s), axis=0) * scale
            dgamma = tl.sum(dy * x * s, axis=0) * rstd[:, None]
            dbeta = tl.sum(dy, axis=0)
            pull = -rstd * rstd * _group_mean(gamma * dgamma, P, W)
            _store(dx_ptr, _evonorm_slope(x, dy, mean, v, scale, pull), 0, P, C, G, W, ROWS)
        else:
            dvs = tl.zeros((ROWS, G, W), tl.float32)
            dgammas = tl.zeros((ROWS, G, W), tl.float32)
            dbetas = tl.zeros((ROWS, G, W), tl.float32)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, C, G, W, ROWS)
                dy = _load(dy_ptr, start, P, C, G, W, ROWS)
                s = tl.sigmoid(v[None, :, :] * x)
                dvs += dy * x * s * x * (1.0 - s)
                dgammas += dy * x * s
                dbetas += dy
            dv = tl.sum(dvs, axis=0) * scale
            dgamma = tl.sum(dgammas, axis=0) * rstd[:, None]
            dbeta = tl.sum(dbetas, axis=0)
            pull = -rstd * rstd * _group_mean(gamma * dgamma, P, W)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, C, G, W, ROWS)
                dy = _load(dy_ptr, start, P, C, G, W, ROWS)
                dx = _evonorm_slope(x, dy, mean, v, scale, pull)
                _store(dx_ptr, dx, start, P, C, G, W, ROWS)
        parts_ptr += sample * 3 * C + first * W + _channels(G, W)
        tl.store(parts_ptr, dv)
        tl.store(parts_ptr + C, dgamma)
        tl.store(parts_ptr + 2 * C, dbeta)

    _norm_silu: Any = triton_op("kanerva::norm_silu", _norm_silu_forward, mutates_args={})
    _norm_silu_back: Any = triton_op(
        "kanerva::norm_silu_backward", _norm_silu_backward, mutates_args={}
    )
    _norm_silu.register_autograd(_norm_silu_grads, setup_context=_norm_silu_keep)
    _evonorm: Any = triton_op("kanerva::evonorm", _evonorm_forward, mutates_args={})
    _evonorm_back: Any = triton_op("kanerva::evonorm_backward", _evonorm_backward, mutates_args={})
    _evonorm.register_autograd(_evonorm_grads, setup_context=_evonorm_keep)
