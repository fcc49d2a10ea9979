"""LARS around Adam against plain Adam and its own property; Muon against torch's, and against the
singular value decomposition; who decays; averages."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kanerva.config import ModelConfig, OptimConfig
from kanerva.models import build
from kanerva.training.optim import (
    LarsAdam,
    Muon,
    as_matrices,
    make_optimiser,
    muon_groups,
    orthogonalise,
    orthogonalise_each,
    parameter_groups,
    update_average,
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def test_without_adaptation_or_decay_it_is_adam():
    ours, theirs = net(), net()
    theirs.load_state_dict(ours.state_dict())
    group = [{"params": list(ours.parameters()), "adapt": False}]
    descend(ours, LarsAdam(group, lr=0.01, betas=(0.8, 0.95)), 7)
    descend(theirs, torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.8, 0.95)), 7)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_matrix_moves_by_lr_times_its_norm():
    model = net()
    before = copy.deepcopy(model)
    descend(model, LarsAdam(parameter_groups(model, 1e-3), lr=0.02), 1)
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        if old.ndim > 1:
            torch.testing.assert_close((new - old).norm(), 0.02 * old.norm())


def test_the_direction_is_adams_step_plus_decay():
    """The second step, when moments and bias correction no longer cancel, in float64 by hand."""
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    grads = [torch.tensor([[0.3, -1.0], [2.0, 0.1]]).double(), torch.full((2, 2), -0.7).double()]
    parameter = nn.Parameter(weight.clone())
    optimizer = LarsAdam([{"params": [parameter]}], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    m, v, w = torch.zeros_like(weight), torch.zeros_like(weight), weight.clone()
    for n, grad in enumerate(grads, start=1):
        parameter.grad = grad
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        step = (m / (1 - 0.9**n)) / ((v / (1 - 0.99**n)).sqrt() + 1e-8) + 0.5 * w
        w = w - 0.1 * w.norm() / step.norm() * step
    torch.testing.assert_close(parameter.data, w)


def test_a_weight_of_zeros_can_leave_zero():
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    LarsAdam([{"params": [parameter]}], lr=0.1).step()
    torch.testing.assert_close(parameter.data, torch.full((2, 2), -0.1))


def test_biases_and_norm_affines_do_not_decay(tiny: ModelConfig):
    model = build(tiny)
    decayed, plain = parameter_groups(model, 1e-3)
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 1e-3 and plain["weight_decay"] == 0
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    kept = [names[id(p)] for p in plain["params"]]
    assert all(
        n.endswith(("bias", "gamma", "beta", "v")) or "norm" in n or ".1." in n for n in kept
    )
    assert not any(names[id(p)].endswith("bias") for p in decayed["params"])


# Muon


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 20, 50), (2, 50, 20)])
def test_orthogonalised_matrices_keep_their_singular_vectors(shape: tuple[int, int, int]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    turned = left.mT @ orthogonalise(matrices) @ right.mT
    sizes = turned.diagonal(dim1=1, dim2=2)
    assert 0.5 < sizes.min() and sizes.max() < 1.3
    assert (turned - torch.diag_embed(sizes)).abs().max() < 1e-3
    assert not orthogonalise(torch.zeros(shape)).any()


def test_weights_of_one_shape_are_orthogonalised_together_as_alone():
    """Kernels as a row for each output, three dimensions as a stack; each has its own scale."""
    weights = [torch.randn(s) for s in ((8, 4), (6, 3, 2, 2), (5, 8, 4), (8, 4), (4, 8))]
    for weight, found in zip(weights, orthogonalise_each(weights), strict=True):
        stack = as_matrices(weight)
        alone = torch.cat([orthogonalise(one[None]) for one in stack])
        scale = 0.2 * math.sqrt(max(stack.shape[1:]))
        torch.testing.assert_close(found, scale * alone.reshape(weight.shape))


def test_muon_moves_a_matrix_as_torchs_does(monkeypatch: pytest.MonkeyPatch):
    """Torch's in float32: bfloat16 is not safe on every CPU."""

    def in_float32(grad, coefficients, steps, eps):
        return orthogonalise(grad[None])[0]

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float32)
    ours, theirs = net(), net()
    theirs.load_state_dict(ours.state_dict())
    matrices, plain = parameter_groups(ours, 0.3)[0], {"adapt": False}
    descend(ours, Muon([matrices | plain | {"orthogonal": True}], lr=0.02), 5)
    how = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    descend(theirs, torch.optim.Muon([p for p in theirs.parameters() if p.ndim > 1], **how), 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_takes_large_weights_and_adamw_the_rest():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(16, 20), nn.Linear(15, 20)
            self.kernel = nn.Conv2d(2, 16, 3)  # 16 rows of 18
            self.place = nn.Parameter(torch.ones(16, 16))

    model = Parts()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = muon_groups(model, 0.1)
    found = [[names[id(p)] for p in group["params"]] for group in groups]
    assert sorted(found[0]) == ["kernel.weight", "large.weight"]
    assert sorted(found[1]) == ["place", "small.weight"]
    assert sorted(found[2]) == ["kernel.bias", "large.bias", "small.bias"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    muon = make_optimiser(OptimConfig(optimiser="muon", weight_decay=0.1), ours)
    adamw = make_optimiser(OptimConfig(optimiser="adamw", weight_decay=0.1), theirs)
    for part, optimizer in ((ours, muon), (theirs, adamw)):
        for _ in range(3):
            optimizer.zero_grad()
            sum((p**3).sum() for p in part.parameters()).backward()
            optimizer.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same = torch.allclose(a, b, atol=1e-6)
        assert same == (name not in found[0]), name


def test_a_step_that_is_skipped_changes_nothing():
    model = net()
    optimizer = Muon(
        [{"params": [p], "adapt": False, "orthogonal": p.ndim > 1} for p in model.parameters()],
        lr=0.1,
        weight_decay=0.1,
    )
    descend(model, optimizer, 2)
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()["state"]])
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [list(model.parameters()), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_every_optimiser_lowers_the_loss(tiny: ModelConfig, draw):
    for name, lr in (("lars_adam", 0.01), ("adamw", 3e-3), ("muon", 3e-3)):
        torch.manual_seed(0)
        model, episode = build(tiny), draw(tiny, 4, 6)
        optimizer = make_optimiser(OptimConfig(optimiser=name, lr=lr), model)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = model.elbo(episode).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-5:]) / 5 < losses[0] - 3, name  # a loss is noisy: keys are drawn


@pytest.mark.parametrize("name", ["lars_adam", "muon"])
def test_a_step_waits_for_no_number(name: str):
    """As part of a CUDA graph it could not: a fake tensor has no number to give."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(20, 40), nn.Conv2d(3, 16, 3))
        optimizer = make_optimiser(OptimConfig(optimiser=name), model)  # pyright: ignore
        optimizer.found_inf = torch.zeros(())  # pyright: ignore
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.step()
        with pytest.raises(DataDependentOutputException):
            model[0].weight.sum().item()


def test_an_average_follows_its_weights_and_copies_buffers(tiny: ModelConfig, draw):
    model = build(tiny)
    average = copy.deepcopy(model)
    before = [p.clone() for p in average.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.train()
    model.elbo(draw(tiny, 2, 3))
    update_average(average, model, 0.1)
    for old, new in zip(before, average.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.1)
    for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
