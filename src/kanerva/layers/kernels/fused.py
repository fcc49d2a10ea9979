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
# to 16384 numbers stay in registers; more are read in chunks. Chosen by measurement on an H200: a
# tile of (ROWS, G, C / G), which needs fewer exchanges between threads, was slower on large maps.

_SLICE, _PER_WARP = 32, 1024


def _tiling(flat: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of programs and what each is told."""
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


# The kernels. Program (n, k) has sample n and the k-th C of its ALL channels, G whole groups; tiles
# are (ROWS, C), and what belongs to a group is kept as one number per channel. `no_type_check`
# keeps the shape checks of a test run off them: Triton compiles these functions from their source.
# `eps` is a constant because compiled graphs pass floats as float64.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def _load(ptr, start, P, ALL: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
        # A tile from row `start` on, in float32, zero past the last row.
        row = start + tl.arange(0, ROWS)[:, None]
        tile = tl.load(ptr + row * ALL + tl.arange(0, C)[None, :], mask=row < P, other=0.0)
        return tile.to(tl.float32)

    @triton.jit
    @no_type_check
    def _store(ptr, tile, start, P, ALL: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
        row = start + tl.arange(0, ROWS)[:, None]
        tl.store(ptr + row * ALL + tl.arange(0, C)[None, :], tile, mask=row < P)

    @triton.jit
    @no_type_check
    def _group_mean(sums, P, C: tl.constexpr, G: tl.constexpr):
        # From sums over a channel's positions: their group's mean, for every channel.
        total = tl.sum(tl.reshape(sums, (G, C // G)), axis=1)
        spread = tl.broadcast_to(total[:, None], (G, C // G))
        return tl.reshape(spread, (C,)) / (P * (C // G))

    @triton.jit
    @no_type_check
    def _moments(x, P, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
        # Mean and variance of a sample held whole: first the mean, then squares about it.
        mean = _group_mean(tl.sum(x, axis=0), P, C, G)
        centred = tl.where(tl.arange(0, ROWS)[:, None] < P, x - mean[None, :], 0.0)
        return mean, _group_mean(tl.sum(centred * centred, axis=0), P, C, G)

    @triton.jit
    @no_type_check
    def _moments_in_chunks(
        x_ptr, P, ALL: tl.constexpr, C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr
    ):
        # The same in one pass: every place of the tile follows Welford's recurrence over its own
        # rows, then Chan's formula joins the places. No large squares are subtracted.
        row = tl.arange(0, ROWS)[:, None]
        means = tl.zeros((ROWS, C), tl.float32)
        squares = tl.zeros((ROWS, C), tl.float32)
        for start in range(0, P, ROWS):
            x = _load(x_ptr, start, P, ALL, C, ROWS)
            step = tl.where(start + row < P, x - means, 0.0)
            means += step / (start // ROWS + 1)
            squares += step * (x - means)
        seen = ((P - 1 - row) // ROWS + 1).to(tl.float32)  # rows of each place
        mean = _group_mean(tl.sum(means * seen, axis=0), P, C, G)
        off = means - mean[None, :]
        return mean, _group_mean(tl.sum(squares + seen * off * off, axis=0), P, C, G)

    @triton.jit
    @no_type_check
    def _keep(ptr, values, slot, C: tl.constexpr, G: tl.constexpr):
        # One number per group, from the group's first channel.
        channel = tl.arange(0, C)
        first = channel % (C // G) == 0
        tl.store(ptr + slot * G + channel // (C // G), values, mask=first)

    @triton.jit
    @no_type_check
    def _recall(ptr, slot, C: tl.constexpr, G: tl.constexpr):
        return tl.load(ptr + slot * G + tl.arange(0, C) // (C // G))

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
            x = _load(x_ptr, 0, P, ALL, C, ROWS)
            mean, variance = _moments(x, P, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            _store(y_ptr, _silu_of_norm(x, mean, rstd, weight, bias), 0, P, ALL, C, ROWS)
        else:
            mean, variance = _moments_in_chunks(x_ptr, P, ALL, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, ALL, C, ROWS)
                _store(y_ptr, _silu_of_norm(x, mean, rstd, weight, bias), start, P, ALL, C, ROWS)
        _keep(mean_ptr, mean, slot, C, G)
        _keep(rstd_ptr, rstd, slot, C, G)

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
        mean = _recall(mean_ptr, slot, C, G)
        rstd = _recall(rstd_ptr, slot, C, G)
        if WHOLE:
            x = _load(x_ptr, 0, P, ALL, C, ROWS)
            dy = _load(dy_ptr, 0, P, ALL, C, ROWS)
            normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
            dweight = tl.sum(du * normal, axis=0)
            dbias = tl.sum(du, axis=0)
            along = _group_mean(weight * dweight, P, C, G)
            common = _group_mean(weight * dbias, P, C, G)
            dx = du * weight[None, :] - common[None, :] - normal * along[None, :]
            _store(dx_ptr, dx * rstd[None, :], 0, P, ALL, C, ROWS)
        else:
            dweights = tl.zeros((ROWS, C), tl.float32)
            dbiases = tl.zeros((ROWS, C), tl.float32)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, ALL, C, ROWS)
                dy = _load(dy_ptr, start, P, ALL, C, ROWS)
                normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
                dweights += du * normal
                dbiases += du
            dweight = tl.sum(dweights, axis=0)
            dbias = tl.sum(dbiases, axis=0)
            along = _group_mean(weight * dweight, P, C, G)
            common = _group_mean(weight * dbias, P, C, G)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, ALL, C, ROWS)
                dy = _load(dy_ptr, start, P, ALL, C, ROWS)
                normal, du = _silu_of_norm_slope(x, dy, mean, rstd, weight, bias)
                dx = du * weight[None, :] - common[None, :] - normal * along[None, :]
                _store(dx_ptr, dx * rstd[None, :], start, P, ALL, C, ROWS)
        parts_ptr += sample * 2 * ALL + channel
        tl.store(parts_ptr, dweight)
        tl.store(parts_ptr + ALL, dbias)

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
            x = _load(x_ptr, 0, P, ALL, C, ROWS)
            mean, variance = _moments(x, P, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            y = x * tl.sigmoid(v * x) * (rstd * gamma)[None, :] + beta
            _store(y_ptr, y, 0, P, ALL, C, ROWS)
        else:
            mean, variance = _moments_in_chunks(x_ptr, P, ALL, C, G, ROWS)
            rstd = 1.0 / tl.sqrt(variance + eps)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, ALL, C, ROWS)
                y = x * tl.sigmoid(v * x) * (rstd * gamma)[None, :] + beta
                _store(y_ptr, y, start, P, ALL, C, ROWS)
        _keep(mean_ptr, mean, slot, C, G)
        _keep(rstd_ptr, rstd, slot, C, G)

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
        mean = _recall(mean_ptr, slot, C, G)
        rstd = _recall(rstd_ptr, slot, C, G)
        scale = rstd * gamma
        # With a = x s: dgamma = rstd sum(dy a), dv = scale sum(dy a x (1 - s)).
        if WHOLE:
            x = _load(x_ptr, 0, P, ALL, C, ROWS)
            dy = _load(dy_ptr, 0, P, ALL, C, ROWS)
            s = tl.sigmoid(v[None, :] * x)
            dv = tl.sum(dy * x * s * x * (1.0 - s), axis=0) * scale
            dgamma = tl.sum(dy * x * s, axis=0) * rstd
            dbeta = tl.sum(dy, axis=0)
            pull = -rstd * rstd * _group_mean(gamma * dgamma, P, C, G)
            _store(dx_ptr, _evonorm_slope(x, dy, mean, v, scale, pull), 0, P, ALL, C, ROWS)
        else:
            dvs = tl.zeros((ROWS, C), tl.float32)
            dgammas = tl.zeros((ROWS, C), tl.float32)
            dbetas = tl.zeros((ROWS, C), tl.float32)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, ALL, C, ROWS)
                dy = _load(dy_ptr, start, P, ALL, C, ROWS)
                s = tl.sigmoid(v[None, :] * x)
                dvs += dy * x * s * x * (1.0 - s)
                dgammas += dy * x * s
                dbetas += dy
            dv = tl.sum(dvs, axis=0) * scale
            dgamma = tl.sum(dgammas, axis=0) * rstd
            dbeta = tl.sum(dbetas, axis=0)
            pull = -rstd * rstd * _group_mean(gamma * dgamma, P, C, G)
            for start in range(0, P, ROWS):
                x = _load(x_ptr, start, P, ALL, C, ROWS)
                dy = _load(dy_ptr, start, P, ALL, C, ROWS)
                dx = _evonorm_slope(x, dy, mean, v, scale, pull)
                _store(dx_ptr, dx, start, P, ALL, C, ROWS)
        parts_ptr += sample * 3 * ALL + channel
        tl.store(parts_ptr, dv)
        tl.store(parts_ptr + ALL, dgamma)
        tl.store(parts_ptr + 2 * ALL, dbeta)

    _norm_silu: Any = triton_op("kanerva::norm_silu", _norm_silu_forward, mutates_args={})
    _norm_silu_back: Any = triton_op(
        "kanerva::norm_silu_backward", _norm_silu_backward, mutates_args={}
    )
    _norm_silu.register_autograd(_norm_silu_grads, setup_context=_norm_silu_keep)
    _evonorm: Any = triton_op("kanerva::evonorm", _evonorm_forward, mutates_args={})
    _evonorm_back: Any = triton_op("kanerva::evonorm_backward", _evonorm_backward, mutates_args={})
    _evonorm.register_autograd(_evonorm_grads, setup_context=_evonorm_keep)
