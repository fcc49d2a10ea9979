"""LARS around Adam against plain Adam and its own property; who decays; averages."""

import copy

import torch
from torch import nn

from kanerva.config import ModelConfig, OptimConfig
from kanerva.models import build
from kanerva.training.optim import LarsAdam, make_optimiser, parameter_groups, update_average


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


def test_both_optimisers_lower_the_loss(tiny: ModelConfig, draw):
    for name, lr in (("lars_adam", 0.01), ("adamw", 3e-3)):
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
