"""The fused mixture against `LogisticMixture` and plain sigmoids, both in float64.

It needs a GPU; without one `TRITON_INTERPRET=1` runs the same kernels on the CPU (torch >= 2.13).
"""

import inspect
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kanerva.layers.kernels import mixture as fused_mixture
from kanerva.layers.kernels.mixture import AVAILABLE, mixture_log_prob
from kanerva.likelihoods import LogisticMixture

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = AVAILABLE and torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs triton and a GPU")
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or (AVAILABLE and INTERPRETED)),
    reason="needs triton, and a GPU or TRITON_INTERPRET=1",
)
compiling = pytest.mark.filterwarnings("default")  # compilation warns of its own affairs
grey_and_colour = pytest.mark.parametrize("channels", [1, 3], ids=["grey", "colour"])

Score = Callable[[Tensor, Tensor], Tensor]


def drawn(
    channels: int, components: int, *side: int, log_scale: float = -2.0
) -> tuple[Tensor, Tensor, Tensor]:
    """A decoder's output, images with their first row black and second white, and d ln p."""
    torch.manual_seed(0)
    output = torch.randn(2, 3 if channels == 1 else 10, components, *side)
    output[:, 1 + channels : 1 + 2 * channels] += log_scale
    images = torch.randint(0, 256, (2, channels, *side)) / 255
    images[:, :, 0], images[:, :, 1] = 0, 1
    dy = torch.randn(2, *side)
    return output.flatten(1, 2).to(DEVICE), images.to(DEVICE), dy.to(DEVICE)


def exact(output: Tensor, images: Tensor) -> Tensor:
    """The class, with its float32 arithmetic in float64."""
    mixture = LogisticMixture(output.shape[1] // (3 if images.shape[1] == 1 else 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        return mixture.pixel_log_prob(output[None], images[None])[0]


def difference_of_sigmoids(output: Tensor, images: Tensor) -> Tensor:
    """The definition, for inputs in float64: it underflows some 700 scales from a mean."""
    red, *others = (2 * images - 1)[:, :, None].unbind(1)  # each (N, 1, H, W)
    logits, *rest = output.unflatten(1, (10 if others else 3, -1)).unbind(1)
    if others:
        a, b, c = (raw.tanh() for raw in rest[6:])
        means = [rest[0], rest[1] + a * red, rest[2] + b * red + c * others[0]]
    else:
        means = rest[:1]
    weights = logits.softmax(1)
    for level, mean, log_scale in zip(
        [red, *others], means, rest[len(means) : 2 * len(means)], strict=True
    ):
        scale = log_scale.clamp(min=-7).exp()
        # On the side where sigmoids are small: their difference loses nothing.
        side = torch.where(level > mean, -1.0, 1.0)
        ends = [(level + step - mean) / scale * side for step in (-1 / 255, 1 / 255)]
        black, white = level < -0.999, level > 0.999
        lower = ends[0].sigmoid().where(~black, (side < 0).double())
        upper = ends[1].sigmoid().where(~white, (side > 0).double())
        weights = weights * (upper - lower) * side
    return weights.sum(1).log()


def doubled(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    output, images, dy = inputs
    return output.double(), images.double(), dy.double()


def results(score: Score, output: Tensor, images: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """ln p and the gradient of the output."""
    leaf = output.detach().clone().requires_grad_()
    y = score(leaf, images)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


def errors(got: Tensor, expected: Tensor, images: Tensor) -> list[float]:
    """Of a gradient: each field's largest error as a fraction of its largest entry.

    A field is the logits, or one mean, log scale or coefficient of all components.
    """
    fields = (3 if images.shape[1] == 1 else 10, -1)
    pairs = zip(
        got.double().unflatten(1, fields).unbind(1),
        expected.double().unflatten(1, fields).unbind(1),
        strict=True,
    )
    # A single component's logit gets none: its error is taken as it is.
    return [(g - e).abs().max().item() / (e.abs().max().item() or 1.0) for g, e in pairs]


@needs_kernels
@grey_and_colour
@pytest.mark.parametrize("components", [1, 5, 10])
@pytest.mark.parametrize("side", [(7, 7), (28, 28), (2, 64)], ids=["7x7", "28x28", "2x64"])
def test_kernels_are_the_formula(channels: int, components: int, side: tuple[int, int]):
    """49 and 784 pixels leave a block part empty; 128 fill one."""
    inputs = drawn(channels, components, *side)
    y, gradient = results(mixture_log_prob, *inputs)
    expected_y, expected_gradient = results(exact, *doubled(inputs))
    assert y.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=1e-5)
    assert max(errors(gradient, expected_gradient, inputs[1])) < 2e-5


@needs_kernels
@grey_and_colour
def test_a_bin_is_a_difference_of_sigmoids(channels: int):
    inputs = drawn(channels, 4, 9, 9)
    y, gradient = results(mixture_log_prob, *inputs)
    expected_y, expected_gradient = results(difference_of_sigmoids, *doubled(inputs))
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=1e-5)
    assert max(errors(gradient, expected_gradient, inputs[1])) < 2e-5


@needs_kernels
@pytest.mark.parametrize("log_scale", [-9.0, -7.0, -4.0, 0.0, 3.0])
def test_the_256_values_sum_to_one(log_scale: float):
    output = drawn(1, 33, 2, 6, log_scale=log_scale)[0][:1, :, :1]
    images = (torch.arange(256, device=DEVICE) / 255).view(1, 1, 256, 1).expand(-1, -1, -1, 6)
    total = mixture_log_prob(output.expand(-1, -1, 256, -1), images).exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=0)


@needs_kernels
@grey_and_colour
@pytest.mark.parametrize("log_scale, tolerance", [(-7.0, 1e-3), (20.0, 1e-4), (80.0, 1e-4)])
def test_extreme_scales_stay_finite_and_right(channels: int, log_scale: float, tolerance: float):
    """At -7 pixels lie thousands of scales off: float32 rounds ln p, and so shares, by 1e-3."""
    inputs = drawn(channels, 5, 16, 16, log_scale=log_scale)
    y, gradient = results(mixture_log_prob, *inputs)
    expected_y, expected_gradient = results(exact, *doubled(inputs))
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=2e-4)
    assert max(errors(gradient, expected_gradient, inputs[1])) < tolerance


@needs_kernels
@grey_and_colour
def test_a_component_on_the_pixel_is_exact_at_the_smallest_scale(channels: int):
    """Means at the image: bins as wide as nine scales, all of the mixture's mass in one."""
    output, images, dy = drawn(channels, 1, 8, 8)
    output = torch.cat([output[:, :1], 2 * images - 1 + 0.003 * output[:, 1 : 1 + channels]], 1)
    output = torch.cat([output, torch.full_like(images, -7.0)], 1)
    if channels == 3:
        output = torch.cat([output, torch.zeros_like(images)], 1)
    inputs = output, images, dy
    y, gradient = results(mixture_log_prob, *inputs)
    expected_y, expected_gradient = results(exact, *doubled(inputs))
    assert y.max() > -0.2
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=2e-4)
    assert max(errors(gradient, expected_gradient, images)) < 2e-4


@needs_kernels
@grey_and_colour
def test_a_log_scale_below_the_smallest_gets_no_gradient(channels: int):
    output, images, dy = drawn(channels, 2, 4, 4)
    fields = output.unflatten(1, (-1, 2))
    scales = fields[:, 1 + channels : 1 + 2 * channels]
    scales.fill_(-7.0)
    scales[:, :, 0] = -7.01
    gradient = results(mixture_log_prob, output, images, dy)[1].unflatten(1, (-1, 2))
    gradient = gradient[:, 1 + channels : 1 + 2 * channels]
    assert (gradient[:, :, 0] == 0).all()
    assert (gradient[:, :, 1] != 0).any()
    scales.fill_(-7.0)  # clamped: the same ln p
    assert torch.equal(
        mixture_log_prob(output, images),
        mixture_log_prob(torch.where(output == -7.0, -20.0, output), images),
    )


@needs_kernels
@grey_and_colour
@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision_rounds_only_the_gradient(
    channels: int, dtype: torch.dtype, rounding: float
):
    output, images, dy = drawn(channels, 10, 7, 7)
    inputs = output.to(dtype), images, dy
    y, gradient = results(mixture_log_prob, *inputs)
    expected_y, expected_gradient = results(exact, *doubled(inputs))
    assert (y.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=1e-5)
    assert max(errors(gradient, expected_gradient, images)) < rounding


@needs_kernels
@grey_and_colour
def test_memory_format_changes_no_number(channels: int):
    output, images, dy = drawn(channels, 3, 5, 6)
    strided, images_too = (t.to(memory_format=torch.channels_last) for t in (output, images))
    expected = results(mixture_log_prob, output, images, dy)
    got = results(mixture_log_prob, strided, images_too, dy.mT.contiguous().mT)
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))


@needs_kernels
@grey_and_colour
def test_pixels_do_not_meet(channels: int):
    output, images, dy = drawn(channels, 3, 12, 16)
    y, gradient = results(mixture_log_prob, output, images, dy)
    part = (slice(1, 2), slice(None), slice(3, 11), slice(2, 9))
    got_y, got_gradient = results(
        mixture_log_prob, output[part], images[part], dy[part[0], part[2], part[3]]
    )
    torch.testing.assert_close(got_y, y[part[0], part[2], part[3]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_gradient, gradient[part], rtol=1e-4, atol=1e-4)


@needs_kernels
@grey_and_colour
def test_a_component_without_weight_is_not_there(channels: int):
    output, images, dy = drawn(channels, 3, 5, 5)
    fields = output.unflatten(1, (-1, 3))
    fields[:, 0, 0] = -torch.inf
    y, gradient = results(mixture_log_prob, output, images, dy)
    fewer = fields[:, :, 1:].flatten(1, 2)
    expected_y, expected_gradient = results(mixture_log_prob, fewer, images, dy)
    torch.testing.assert_close(y, expected_y, rtol=1e-4, atol=1e-4)
    gradient = gradient.unflatten(1, (-1, 3))
    assert (gradient[:, :, 0] == 0).all()
    rest = gradient[:, :, 1:].flatten(1, 2)
    torch.testing.assert_close(rest, expected_gradient, rtol=1e-4, atol=1e-4)


@needs_kernels
@grey_and_colour
def test_a_nan_is_not_hidden(channels: int):
    output, images, _ = drawn(channels, 1, 4, 4)
    images = images * 0.5 + 0.25  # nobody's coefficient is multiplied by zero
    for field in range(output.shape[1]):
        broken = output.clone()
        broken[:, field] = torch.nan
        assert mixture_log_prob(broken, images).isnan().all(), f"field {field}"


@compiling
@needs_gpu
@grey_and_colour
@pytest.mark.parametrize("side", [7, 32])
@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 2e-5), (torch.bfloat16, 2**-7)])
def test_compiles_into_one_graph(channels: int, side: int, dtype: torch.dtype, rounding: float):
    plain_function = inspect.unwrap(mixture_log_prob)  # shape checks are not for the compiler
    compiled = torch.compile(plain_function, fullgraph=True)
    output, images, dy = drawn(channels, 10, side, side)
    inputs = output.to(dtype), images, dy
    y, gradient = results(compiled, *inputs)
    expected_y, expected_gradient = results(exact, *doubled(inputs))
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=1e-5)
    assert max(errors(gradient, expected_gradient, images)) < rounding


@compiling
@needs_gpu
def test_replays_from_a_captured_graph():
    output, images, dy = drawn(3, 10, 32, 32)
    later = [t.flip(0).clone() for t in (output, images, dy)]
    leaf = output.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        y = mixture_log_prob(leaf, images)
        return y, torch.autograd.grad(y, leaf, dy)[0]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # compiles, and warms the allocator
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for old, new in zip((output, images, dy), later, strict=True):
            old.copy_(new)
    graph.replay()
    for c, e in zip(captured, results(mixture_log_prob, *later), strict=True):
        assert torch.equal(c, e)


@needs_gpu
@pytest.mark.parametrize(
    "outputs, channels, components, dtype, expected",
    [
        (100, 3, 10, torch.bfloat16, True),
        (30, 1, 10, torch.float16, True),
        (330, 3, 33, torch.float32, True),
        (100, 3, 10, torch.float64, False),
        (100, 3, 5, torch.float32, False),
        (100, 1, 10, torch.float32, False),
        (100, 2, 10, torch.float32, False),
    ],
)
def test_supported_names_what_works(
    outputs: int, channels: int, components: int, dtype: torch.dtype, expected: bool
):
    output = torch.zeros(2, outputs, 5, 7, dtype=dtype, device="cuda")
    images = torch.zeros(2, channels, 5, 7, device="cuda")
    assert fused_mixture.supported(output, images, components) is expected
    assert not fused_mixture.supported(output[:0], images[:0], components)
    assert not fused_mixture.supported(output, images.cpu(), components)
    assert not fused_mixture.supported(output, images[..., :5], components)


def test_supported_is_false_on_the_cpu():
    output, images = torch.zeros(2, 100, 4, 4), torch.zeros(2, 3, 4, 4)
    assert not fused_mixture.supported(output, images, 10)


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_mixture, "AVAILABLE", False)
    with pytest.raises(RuntimeError, match="triton"):
        mixture_log_prob(torch.zeros(2, 30, 4, 4), torch.zeros(2, 1, 4, 4))
