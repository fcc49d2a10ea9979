"""The fused layers of the pixel code against the plain ones.

They need a GPU; without one `TRITON_INTERPRET=1` runs the same kernels on the CPU (torch >= 2.13).
"""

import pytest
import torch
from torch import Tensor

from kanerva.layers.kernels import fixed_layers as fused
from kanerva.memory import pixel_code
from kanerva.memory.fixed_point import activate
from kanerva.memory.pixel_code import PixelCode
from test_fused import DEVICE, compiling, needs_gpu, needs_kernels

# What bfloat16 rounds of gradients, relative to the largest: 2**-9 a factor, and they add up
ROUNDED = 0.02


def whole(*shape: int, size: float) -> Tensor:
    """Random integers, as floats."""
    return (size * torch.randn(shape)).round().to(DEVICE)


def drawn(images: int, pixels: int, width: int) -> list[Tensor]:
    """Sums, of which some are below 0 and some above 255 * 64, and weights."""
    sums = [whole(images, pixels, width, size=6000) for _ in range(2)]
    weights = whole(2, width, width, size=30).clamp(-127, 127)
    place, biases = whole(pixels, width, size=3000), whole(2, width, size=2000)
    return [*sums, place, weights, biases, whole(width, size=30).clamp(-127, 127)]


def plain(known: Tensor, looked: Tensor, place: Tensor, weights, biases, last: Tensor) -> Tensor:
    sums = known + looked + place
    for weight, bias in zip(weights, biases, strict=True):
        sums = activate(sums) @ weight.mT + bias
    return activate(sums) @ last


def results(function, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y))]


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    assert torch.equal(found[0].double(), expected[0])  # integers
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= ROUNDED * float(other.abs().max())


@needs_kernels
@pytest.mark.parametrize("images, pixels, width", [(3, 49, 16), (2, 64, 64), (1, 30, 128)])
def test_kernels_are_the_plain_layers(images: int, pixels: int, width: int):
    """The last program of each is only partly filled, and every pixel has its own place."""
    inputs, dy = drawn(images, pixels, width), torch.randn(images, pixels, device=DEVICE)
    expected = results(plain, [each.double() for each in inputs], dy)
    assert_near(results(fused.fixed_layers, inputs, dy), expected)
    inside = activate(inputs[0] + inputs[1] + inputs[2])
    assert bool((inside == 0).any()) and bool((inside == 255).any())


@needs_kernels
def test_a_nan_is_not_hidden():
    inputs = drawn(1, 20, 16)
    inputs[1][0, 7, 3] = torch.nan
    y = fused.fixed_layers(*inputs)
    assert bool(y[0, 7].isnan()) and bool(y[0, 8:].isfinite().all())


@needs_kernels
def test_the_pixel_code_trains_with_them(monkeypatch: pytest.MonkeyPatch):
    """Same costs, and gradients within what bfloat16 rounds, for every parameter."""
    code = PixelCode(12, (8, 8), radius=2, width=16, maps=4, depth=2).to(DEVICE)
    with torch.no_grad():
        for parameter in code.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    traces, beside = whole(3, 12, size=2), torch.randn(3, 4, 2, 2, device=DEVICE)
    pixels = (torch.rand(3, 8, 8, device=DEVICE) < 0.4).float()

    def step(mixed: bool = True) -> list[Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
            nats = code.nats(traces, pixels, beside)
        return [nats.detach(), *torch.autograd.grad(nats.sum(), list(code.parameters()))]

    expected = step()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(pixel_code, "supported", lambda sums, layers: True)
    calls = []
    monkeypatch.setattr(
        pixel_code, "fixed_layers", lambda *args: calls.append(1) or fused.fixed_layers(*args)
    )
    found = step()
    assert len(calls) == 1
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert float((one - other).abs().max()) <= ROUNDED * float(other.abs().max()) + 1e-6
    step(mixed=False)
    code.table(traces, pixels)  # codes are made without them
    assert len(calls) == 1


@compiling
@needs_gpu
def test_compiles_into_one_graph():
    inputs, dy = drawn(4, 784, 128), torch.randn(4, 784, device=DEVICE)
    compiled = torch.compile(fused.fixed_layers, fullgraph=True)
    expected = results(plain, [each.double() for each in inputs], dy)
    assert_near(results(compiled, inputs, dy), expected)


@needs_gpu
@pytest.mark.parametrize(
    "width, layers, dtype, expected",
    [
        (128, 2, torch.float32, True),
        (16, 2, torch.float32, True),
        (48, 2, torch.float32, False),
        (256, 2, torch.float32, False),
        (128, 3, torch.float32, False),
        (128, 2, torch.bfloat16, False),
    ],
)
def test_supported_names_what_works(width: int, layers: int, dtype: torch.dtype, expected: bool):
    assert fused.supported(torch.zeros(2, 9, width, dtype=dtype, device="cuda"), layers) is expected


def test_supported_is_false_on_the_cpu():
    assert not fused.supported(torch.zeros(2, 9, 128), 2)


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "AVAILABLE", False)
    with pytest.raises(RuntimeError, match="triton"):
        fused.fixed_layers(*drawn(1, 9, 16))
