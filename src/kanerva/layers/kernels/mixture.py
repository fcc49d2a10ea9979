"""The discretized mixture of logistics: one forward and one backward kernel for a GPU.

Plain PyTorch makes some ten kernels of `LogisticMixture.pixel_log_prob` and its gradient. Here one
Triton program takes a block of pixels and loops once over their components, in registers. The
backward kernel reads the decoder's output once more and writes its gradient.

Call `supported` first. Where it returns False, `LogisticMixture` computes the same numbers.
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
    from torch.library import triton_op, wrap_triton


def supported(output: Tensor, images: Tensor, components: int) -> bool:
    """Whether the kernels take this output and these images: on a GPU, grey or colour."""
    if not (AVAILABLE and output.is_cuda and images.is_cuda):
        return False
    if not (output.ndim == images.ndim == 4 and output.numel() > 0 and images.shape[1] in (1, 3)):
        return False
    return (
        output.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and images.dtype == torch.float32
        and output.shape[1] == components * _fields(images)
        and (output.shape[0], *output.shape[2:]) == (images.shape[0], *images.shape[2:])
    )


def mixture_log_prob(
    output: Float[Tensor, "N F H W"], images: Float[Tensor, "N C H W"]
) -> Float[Tensor, "N H W"]:
    """ln p of each pixel, all its channels together: `LogisticMixture.pixel_log_prob`.

    Computed in float32; `output` gets a gradient, in its own dtype, and `images` none.
    """
    _insist()
    flat = output.flatten(2).contiguous()  # (N, F, P)
    log_prob, b_slope = _mixture(flat, images.flatten(2).contiguous())
    return log_prob.unflatten(1, images.shape[2:])


@no_type_check  # under torch.compile the shape checks of a test run cannot be traced
def _fields(images: Tensor) -> int:
    return 3 if images.shape[1] == 1 else 10


@no_type_check
def _insist() -> None:
    if not AVAILABLE:
        raise RuntimeError("the fused mixture needs triton and torch>=2.6: call `supported` first")


# The operators, on flat maps: output (N, F, P), images (N, C, P), log-probabilities (N, P). The
# forward also returns two log-sums over a pixel's components, (N, 2, P), which would cost the
# backward another pass: the sum of e^logit, and the sum of e^logit times the density.


def _tiling(output: Tensor, images: Tensor) -> tuple[tuple[Any], dict[str, Any]]:
    """Two pixels for each thread, so that a warp reads 128 bytes of half precision at a time."""
    samples, fields, pixels = output.shape
    block = min(max(1 << (int(pixels) - 1).bit_length(), 64), 128)  # int: not symbolic
    sizes: dict[str, Any] = {"M": int(fields) // _fields(images), "C": int(images.shape[1])}
    blocks = (int(pixels) + block - 1) // block
    return (samples * blocks,), {**sizes, "BLOCK": block, "num_warps": block // 64}


def _mixture_forward(output: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    samples, _, pixels = output.shape
    log_prob = output.new_empty(samples, pixels, dtype=torch.float32)
    sums = output.new_empty(samples, 2, pixels, dtype=torch.float32)
    grid, sizes = _tiling(output, images)
    wrap_triton(_mixture_kernel)[grid](output, images, log_prob, sums, pixels, **sizes)
    return log_prob, sums


def _mixture_backward(dy: Tensor, output: Tensor, images: Tensor, sums: Tensor) -> Tensor:
    gradient = torch.empty_like(output)
    grid, sizes = _tiling(output, images)
    wrap_triton(_mixture_backward_kernel)[grid](
        dy, output, images, sums, gradient, output.shape[2], **sizes
    )
    return gradient


def _mixture_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, sums = output
    ctx.mark_non_differentiable(sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, sums)


def _mixture_grads(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _mixture_back(dy.contiguous(), *ctx.saved_tensors), None


# The kernels. A tile holds one number per pixel; a loop runs over the components.
#
# A bin's probability is computed with few exponentials and one logarithm for all channels. Let x be
# the distance from the mean in units of the scale, k = 1 / (255 scale) half a bin, t = e^-|x|:
#
#   inside  s(x + k) - s(x - k) = 2 sinh(k) t / ((1 + t e^k) (1 + t e^-k))
#   edge    s(v), v = k + x in the first bin and k - x in the last:
#           1 / (1 + t e^-k) where v > k, else t e^k / (1 + t e^k)
#
# Nothing cancels or underflows: ln t = -|x| and ln 2k = ln(2/255) - ln scale stay outside the
# logarithm, and k <= e^7 / 255 = 4.3. `edge` is 1 in the first bin, -1 in the last, 0 inside.

if AVAILABLE:

    @triton.jit
    @no_type_check
    def _load(ptr, mask):
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    @no_type_check
    def _level(ptr, mask):
        # Return a channel on [-1, 1], and its `edge`.
        level = 2.0 * _load(ptr, mask) - 1.0
        edge = tl.where(level < -1.0 + 0.5 / 255.0, 1.0, 0.0)
        return level, tl.where(level > 1.0 - 0.5 / 255.0, -1.0, edge)

    @triton.jit
    @no_type_check
    def _clamp(log_scale):
        return tl.where(log_scale < -7.0, -7.0, log_scale)  # unlike a maximum, keeps a NaN

    @triton.jit
    @no_type_check
    def _tanh(x):
        # Return tanh(x) and its slope.
        e = tl.exp(-2.0 * tl.abs(x))
        d = 1.0 / (1.0 + e)
        size = (1.0 - e) * d
        return tl.where(x < 0.0, -size, size), 4.0 * e * d * d

    @triton.jit
    @no_type_check
    def _sinh_ratio(k):
        # sinh(k) / k for k <= 4.3: Taylor's series to k^18 / 19!, within 2e-8.
        q = k * k
        s = 8.22063524662433e-18 * q + 2.8114572543455206e-15
        s = s * q + 7.647163731819816e-13
        s = s * q + 1.6059043836821613e-10
        s = s * q + 2.505210838544172e-08
        s = s * q + 2.7557319223985893e-06
        s = s * q + 0.0001984126984126984
        s = s * q + 0.008333333333333333
        s = s * q + 0.16666666666666666
        return s * q + 1.0

    @triton.jit
    @no_type_check
    def _parts(distance, log_scale, edge):
        # `near` and `far` are the denominators at the bin's two ends; `beyond` is the case v > k.
        inverse = tl.exp(-log_scale)
        x = distance * inverse
        k = inverse * (1.0 / 255.0)
        t = tl.exp(-tl.abs(x))
        near, far = 1.0 + t * tl.exp(k), 1.0 + t * tl.exp(-k)
        return inverse, x, k, t, near, far, edge == 0.0, x * edge > 0.0

    @triton.jit
    @no_type_check
    def _bin(distance, log_scale, edge):
        # Return ln p of one channel as three parts: linear + ln(over / under).
        inverse, x, k, t, near, far, inside, beyond = _parts(distance, log_scale, edge)
        over = tl.where(inside, _sinh_ratio(k), tl.where(beyond, 1.0, tl.exp(k)))
        under = tl.where(beyond, 1.0, near) * tl.where(inside | beyond, far, 1.0)
        linear = tl.where(beyond, 0.0, -tl.abs(x))
        linear += tl.where(inside, -4.848116364598481 - log_scale, 0.0)  # ln(2 / 255)
        return linear, over, under

    @triton.jit
    @no_type_check
    def _bin_slopes(distance, log_scale, edge):
        # Return d ln p / d mean and d ln p / d log scale of one channel. The compiler shares the
        # subexpressions with `_bin`.
        inverse, x, k, t, near, far, inside, beyond = _parts(distance, log_scale, edge)
        ratio = _sinh_ratio(k)
        shared = 1.0 / (near * far * ratio)  # one division where two are needed
        both = shared * ratio  # 1 / (near far)
        # At an edge s(-v): t e^-k / far or 1 / near.
        gate = tl.where(beyond, t * tl.exp(-k) * near, far) * both
        along = tl.where(x > 0.0, t * t - 1.0, 1.0 - t * t) * both
        along = tl.where(inside, along, edge * gate)  # d / dx
        # k d / dk: inside, k coth(k) minus k times the bin's probability; at an edge, k s(-v).
        coth = 0.5 * (tl.exp(k) + tl.exp(-k)) * near * far * shared
        widen = tl.where(inside, coth - 2.0 * k * k * ratio * t * both, k * gate)
        return -inverse * along, -x * along - widen

    @triton.jit
    @no_type_check
    def _join(top, total, value):
        # Add one term to a sum of exponentials that is kept as total * e^top.
        step = value - top
        shrink = tl.exp(-tl.abs(step))
        total = tl.where(step > 0.0, total * shrink + 1.0, total + shrink)
        return tl.where(step > 0.0, value, top), total

    @triton.jit
    @no_type_check
    def _mixture_kernel(
        output_ptr,
        images_ptr,
        log_prob_ptr,
        sums_ptr,
        P,
        M: tl.constexpr,
        C: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        F: tl.constexpr = 3 if C == 1 else 10
        blocks = tl.cdiv(P, BLOCK)
        sample = (tl.program_id(0) // blocks).to(tl.int64)
        pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < P
        images_ptr += sample * C * P + pixel
        red, red_edge = _level(images_ptr, mask)
        if C == 3:
            green, green_edge = _level(images_ptr + P, mask)
            blue, blue_edge = _level(images_ptr + 2 * P, mask)
        top = tl.full((BLOCK,), -1e38, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        prior_top = tl.full((BLOCK,), -1e38, tl.float32)
        prior_total = tl.zeros((BLOCK,), tl.float32)
        first = output_ptr + sample * F * M * P + pixel
        step = M * P  # from field to field of a component
        for m in range(M):
            row = first + m * P
            logit = _load(row, mask)
            distance = red - _load(row + step, mask)
            log_scale = _clamp(_load(row + (C + 1) * step, mask))
            linear, over, under = _bin(distance, log_scale, red_edge)
            if C == 3:
                a, a_slope = _tanh(_load(row + 7 * step, mask))
                distance = green - _load(row + 2 * step, mask) - a * red
                log_scale = _clamp(_load(row + 5 * step, mask))
                more, up, down = _bin(distance, log_scale, green_edge)
                linear, over, under = linear + more, over * up, under * down
                b, b_slope = _tanh(_load(row + 8 * step, mask))
                c, c_slope = _tanh(_load(row + 9 * step, mask))
                distance = blue - _load(row + 3 * step, mask) - b * red - c * green
                log_scale = _clamp(_load(row + 6 * step, mask))
                more, up, down = _bin(distance, log_scale, blue_edge)
                linear, over, under = linear + more, over * up, under * down
            prior_top, prior_total = _join(prior_top, prior_total, logit)
            top, total = _join(top, total, logit + linear + tl.log(over / under))
        prior = prior_top + tl.log(prior_total)
        joint = top + tl.log(total)
        tl.store(log_prob_ptr + sample * P + pixel, joint - prior, mask=mask)
        sums_ptr += sample * 2 * P + pixel
        tl.store(sums_ptr, prior, mask=mask)
        tl.store(sums_ptr + P, joint, mask=mask)

    @triton.jit
    @no_type_check
    def _mixture_backward_kernel(
        dy_ptr,
        output_ptr,
        images_ptr,
        sums_ptr,
        gradient_ptr,
        P,
        M: tl.constexpr,
        C: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        F: tl.constexpr = 3 if C == 1 else 10
        blocks = tl.cdiv(P, BLOCK)
        sample = (tl.program_id(0) // blocks).to(tl.int64)
        pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = pixel < P
        images_ptr += sample * C * P + pixel
        red, red_edge = _level(images_ptr, mask)
        if C == 3:
            green, green_edge = _level(images_ptr + P, mask)
            blue, blue_edge = _level(images_ptr + 2 * P, mask)
        dy = _load(dy_ptr + sample * P + pixel, mask)
        sums_ptr += sample * 2 * P + pixel
        prior = _load(sums_ptr, mask)
        joint = _load(sums_ptr + P, mask)
        start = sample * F * M * P + pixel
        step = M * P
        for m in range(M):
            row = output_ptr + start + m * P
            back = gradient_ptr + start + m * P
            logit = _load(row, mask)
            distance = red - _load(row + step, mask)
            raw = _load(row + (C + 1) * step, mask)
            linear, over, under = _bin(distance, _clamp(raw), red_edge)
            mean, scale = _bin_slopes(distance, _clamp(raw), red_edge)
            scale = tl.where(raw < -7.0, 0.0, scale)
            if C == 3:
                a, a_slope = _tanh(_load(row + 7 * step, mask))
                distance = green - _load(row + 2 * step, mask) - a * red
                raw = _load(row + 5 * step, mask)
                more, up, down = _bin(distance, _clamp(raw), green_edge)
                linear, over, under = linear + more, over * up, under * down
                green_mean, green_scale = _bin_slopes(distance, _clamp(raw), green_edge)
                green_scale = tl.where(raw < -7.0, 0.0, green_scale)
                b, b_slope = _tanh(_load(row + 8 * step, mask))
                c, c_slope = _tanh(_load(row + 9 * step, mask))
                distance = blue - _load(row + 3 * step, mask) - b * red - c * green
                raw = _load(row + 6 * step, mask)
                more, up, down = _bin(distance, _clamp(raw), blue_edge)
                linear, over, under = linear + more, over * up, under * down
                blue_mean, blue_scale = _bin_slopes(distance, _clamp(raw), blue_edge)
                blue_scale = tl.where(raw < -7.0, 0.0, blue_scale)
            # The component's responsibility for the pixel, times the incoming gradient.
            share = dy * tl.exp(logit + linear + tl.log(over / under) - joint)
            tl.store(back, share - dy * tl.exp(logit - prior), mask=mask)
            tl.store(back + step, share * mean, mask=mask)
            tl.store(back + (C + 1) * step, share * scale, mask=mask)
            if C == 3:
                green_mean *= share
                blue_mean *= share
                tl.store(back + 2 * step, green_mean, mask=mask)
                tl.store(back + 3 * step, blue_mean, mask=mask)
                tl.store(back + 5 * step, share * green_scale, mask=mask)
                tl.store(back + 6 * step, share * blue_scale, mask=mask)
                tl.store(back + 7 * step, green_mean * red * a_slope, mask=mask)
                tl.store(back + 8 * step, blue_mean * red * b_slope, mask=mask)
                tl.store(back + 9 * step, blue_mean * green * c_slope, mask=mask)

    _mixture: Any = triton_op("kanerva::mixture_log_prob", _mixture_forward, mutates_args={})
    _mixture_back: Any = triton_op(
        "kanerva::mixture_log_prob_backward", _mixture_backward, mutates_args={}
    )
    _mixture.register_autograd(_mixture_grads, setup_context=_mixture_keep)
