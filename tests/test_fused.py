"""The fused norms against their formulas, differentiated by autograd in float64.

They need a GPU; without one `TRITON_INTERPRET=1` runs the same kernels on the CPU (torch >= 2.13).
"""

import inspect
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kanerva.layers.evonorm import EvoNormS0
from kanerva.layers.kernels import AVAILABLE, norm_tiles, norms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = AVAILABLE and torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs triton and a GPU")
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or (AVAILABLE and INTERPRETED)),
    reason="needs triton, and a GPU or TRITON_INTERPRET=1",
)
# numpy, which interprets, warns where a sigmoid saturates; compilation warns of its own affairs
calmly = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
compiling = pytest.mark.filterwarnings("default")

EPS = 1e-5


def norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def evonorm(x: Tensor, v: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> Tensor:
    variance = x.unflatten(1, (groups, -1)).var(dim=(2, 3, 4), unbiased=False)
    std = (variance + eps).sqrt().repeat_interleave(x.shape[1] // groups, dim=1)[..., None, None]
    v, gamma, beta = (p.view(1, -1, 1, 1) for p in (v, gamma, beta))
    return x * torch.sigmoid(v * x) / std * gamma + beta


both = pytest.mark.parametrize(
    "op, formula, parameters",
    [(norms.norm_silu, norm_silu, 2), (norms.evonorm, evonorm, 3)],
    ids=["norm_silu", "evonorm"],
)


def drawn(parameters: int, *shape: int) -> list[Tensor]:
    """A map, its parameters, and the gradient that arrives at the output; channels-last."""
    maps = [torch.randn(shape).to(memory_format=torch.channels_last) for _ in range(2)]
    x, dy = (m.to(DEVICE) for m in maps)
    return [x, *torch.randn(parameters, shape[1], device=DEVICE).unbind(0), dy]


def results(op: Callable[..., Tensor], groups: int, drawn: list[Tensor]) -> list[Tensor]:
    """The output, then the gradients of the map and of every parameter."""
    *inputs, dy = drawn
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = op(*leaves, groups, EPS)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_near(got: list[Tensor], exact: list[Tensor], maps: float, parameters: float):
    """Largest error of each tensor, as a fraction of its largest entry."""
    for i, (g, e) in enumerate(zip(got, exact, strict=True)):
        error = (g.double() - e).abs().max() / e.abs().max()
        assert error < (maps if i < 2 else parameters), f"result {i} is off by {error:.1e}"


def doubled(drawn: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in drawn]


@calmly
@needs_kernels
@both
@pytest.mark.parametrize(
    "shape, groups",
    [
        ((3, 16, 7, 7), 8),  # 49 positions: one tile, part of it empty
        ((2, 64, 14, 14), 1),  # the largest tile
        ((2, 32, 4, 8), 32),  # every channel its own group
        ((2, 16, 1, 1), 1),
        ((2, 128, 14, 14), 8),  # 196 positions in chunks, the last one short
        ((2, 64, 28, 28), 8),
        ((1, 32, 32, 32), 1),
        ((1, 1024, 5, 5), 8),
    ],
)
def test_kernels_are_their_formula(
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    parameters: int,
    shape: tuple[int, ...],
    groups: int,
):
    inputs = drawn(parameters, *shape)
    exact = results(formula, groups, doubled(inputs))
    assert_near(results(op, groups, inputs), exact, maps=1e-5, parameters=1e-5)


@calmly
@needs_kernels
@both
@pytest.mark.parametrize("shape", [(2, 64, 7, 7), (2, 64, 28, 28)], ids=["one tile", "chunks"])
@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision_rounds_only_what_it_stores(
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    parameters: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rounding: float,
):
    x, *values, dy = drawn(parameters, *shape)
    inputs = [x.to(dtype), *values, dy.to(dtype)]
    got = results(op, 8, inputs)
    assert [t.dtype for t in got] == [dtype, dtype] + [torch.float32] * parameters
    assert_near(got, results(formula, 8, doubled(inputs)), maps=rounding, parameters=1e-5)


@calmly
@needs_kernels
@both
@pytest.mark.parametrize("shape", [(2, 64, 7, 7), (2, 64, 28, 28)], ids=["one tile", "chunks"])
def test_a_mean_far_from_zero_costs_little(
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    parameters: int,
    shape: tuple[int, ...],
):
    """A variance from E[x^2] - E[x]^2 would miss by a thousandth here."""
    x, first, *rest = drawn(parameters, *shape)
    inputs = [
        x + 100,
        first / (100 if op is norms.evonorm else 1),
        *rest,
    ]  # gates stay half open
    exact = results(formula, 8, doubled(inputs))
    assert_near(results(op, 8, inputs), exact, maps=5e-5, parameters=5e-5)


@calmly
@needs_kernels
@both
def test_memory_format_changes_no_number(
    op: Callable[..., Tensor], formula: Callable[..., Tensor], parameters: int
):
    """Any layout of the map and of the gradient; the output is channels-last."""
    x, *values, dy = drawn(parameters, 2, 16, 5, 6)
    expected = results(op, 8, [x, *values, dy])
    got = results(op, 8, [x.contiguous(), *values, dy.contiguous()])
    for e, g in zip(expected, got, strict=True):
        assert torch.equal(e, g)
    assert got[0].is_contiguous(memory_format=torch.channels_last)


@calmly
@needs_kernels
@both
def test_samples_do_not_meet(
    op: Callable[..., Tensor], formula: Callable[..., Tensor], parameters: int
):
    x, *values, _ = drawn(parameters, 3, 16, 5, 6)
    together = op(x, *values, 8, EPS)
    assert torch.equal(together[1:2], op(x[1:2], *values, 8, EPS))


@calmly
@needs_kernels
def test_evonorm_is_the_layer():
    layer = EvoNormS0(32).to(DEVICE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 32, 6, 6, device=DEVICE)
    got = norms.evonorm(x, layer.v, layer.gamma, layer.beta, layer.groups, layer.eps)
    torch.testing.assert_close(got, layer(x), rtol=1e-5, atol=1e-5)


@calmly
@needs_kernels
@both
def test_a_constant_map_has_a_finite_gradient(
    op: Callable[..., Tensor], formula: Callable[..., Tensor], parameters: int
):
    x, *rest = drawn(parameters, 1, 16, 2, 2)
    assert all(t.isfinite().all() for t in results(op, 8, [torch.full_like(x, 2.0), *rest]))


@compiling
@needs_gpu
@both
@pytest.mark.parametrize("side", [7, 28])
@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_compiles_into_one_graph(
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    parameters: int,
    side: int,
    dtype: torch.dtype,
    rounding: float,
):
    plain = inspect.unwrap(op)  # a test run's shape checks are not for the compiler
    compiled = torch.compile(plain, fullgraph=True)
    x, *values, dy = drawn(parameters, 4, 64, side, side)
    inputs = [x.to(dtype), *values, dy.to(dtype)]
    got = results(compiled, 8, inputs)
    assert_near(got, results(formula, 8, doubled(inputs)), maps=rounding, parameters=1e-5)


@compiling
@needs_gpu
@both
def test_replays_from_a_captured_graph(
    op: Callable[..., Tensor], formula: Callable[..., Tensor], parameters: int
):
    inputs, later = (drawn(parameters, 4, 64, 14, 14) for _ in range(2))
    *leaves, dy = inputs
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def step() -> tuple[Tensor, ...]:
        y = op(*leaves, 8, EPS)
        return y, *torch.autograd.grad(y, leaves, dy)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # compiles, and warms the allocator
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for old, new in zip(inputs, later, strict=True):
            old.copy_(new)
    graph.replay()
    for c, e in zip(captured, results(op, 8, later), strict=True):
        assert torch.equal(c, e)


@needs_gpu
@pytest.mark.parametrize(
    "shape, groups, dtype, expected",
    [
        ((2, 64, 5, 7), 8, torch.bfloat16, True),
        ((2, 64, 5, 7), 64, torch.float32, True),
        ((2, 48, 4, 4), 8, torch.float32, False),
        ((2, 64, 4, 4), 3, torch.float32, False),
        ((2, 2048, 4, 4), 8, torch.float32, False),
        ((2, 64, 4, 4), 8, torch.float64, False),
        ((0, 64, 4, 4), 8, torch.float32, False),
        ((2, 64, 16), 8, torch.float32, False),
    ],
)
def test_supported_names_the_sizes_that_work(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, expected: bool
):
    x = torch.zeros(shape, dtype=dtype, device="cuda")
    assert norm_tiles.supported(x, groups) is expected


def test_supported_is_false_on_the_cpu():
    assert not norm_tiles.supported(torch.zeros(2, 64, 4, 4), 8)


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(norm_tiles, "AVAILABLE", False)
    x, ones = torch.zeros(2, 64, 4, 4), torch.ones(64)
    with pytest.raises(RuntimeError, match="triton"):
        norms.norm_silu(x, ones, ones, 8, EPS)
    with pytest.raises(RuntimeError, match="triton"):
        norms.evonorm(x, ones, ones, ones, 8, EPS)
