"""Diagonal normals against torch.distributions and against Monte Carlo."""

import pytest
import torch
from torch import Tensor
from torch import distributions as td

from kanerva.distributions import DiagonalNormal
from kanerva.seeding import stream


def normal(*shape: int) -> DiagonalNormal:
    return DiagonalNormal(2 * torch.randn(shape), 0.5 * torch.randn(shape))


def oracle(ours: DiagonalNormal) -> td.Independent:
    mean, std = ours.mean.double(), ours.log_std.double().exp()
    return td.Independent(td.Normal(mean, std), mean.ndim - 2)


@pytest.mark.parametrize("event", [(7,), (3, 3)])  # a readout's event, and a key's
def test_log_prob_agrees_with_torch(event: tuple[int, ...]):
    p, value = normal(2, 4, *event), 3 * torch.randn(2, 4, *event)
    expected = oracle(p).log_prob(value.double())
    torch.testing.assert_close(p.log_prob(value).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("event", [(7,), (3, 3)])
def test_kl_agrees_with_torch(event: tuple[int, ...]):
    q, p = normal(2, 4, *event), normal(2, 4, *event)
    expected = td.kl_divergence(oracle(q), oracle(p))
    torch.testing.assert_close(q.kl(p).double(), expected, rtol=1e-5, atol=1e-5)


def test_kl_from_itself_is_nothing_and_from_others_is_positive():
    q = normal(2, 4, 7)
    torch.testing.assert_close(q.kl(q), torch.zeros(2, 4))
    assert (q.kl(normal(2, 4, 7)) > 0).all()


def test_kl_is_the_expected_log_ratio():
    q, p, draws = normal(1, 1, 5), normal(1, 1, 5), 20_000
    many = DiagonalNormal(*(x.expand(1, draws, 5) for x in (q.mean, q.log_std)))
    there = DiagonalNormal(*(x.expand(1, draws, 5) for x in (p.mean, p.log_std)))
    value = many.sample()
    ratio = many.log_prob(value) - there.log_prob(value)
    error = ratio.std() / draws**0.5
    assert abs(ratio.mean() - q.kl(p).item()) < 5 * error
    assert error < 0.02 * q.kl(p).item()  # sharp enough to notice a missing half


def test_samples_have_the_mean_and_the_standard_deviation_not_the_variance():
    """The paper prints sigma^2 * noise (§3.3): at std 3 the two are far apart."""
    mean, std = torch.tensor([-2.0, 0.0, 5.0]), torch.tensor([0.1, 1.0, 3.0])
    q = DiagonalNormal(mean.expand(1, 50_000, 3), std.log().expand(1, 50_000, 3))
    value = q.sample()[0]
    assert ((value.mean(0) - mean).abs() < 5 * std / 50_000**0.5).all()
    torch.testing.assert_close(value.std(0), std, rtol=0.02, atol=0)


def test_a_sample_carries_gradient_to_its_parameters():
    mean, log_std = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    q = DiagonalNormal(mean.requires_grad_(), log_std.requires_grad_())
    value = q.sample()
    value.sum().backward()
    torch.testing.assert_close(mean.grad, torch.ones(1, 2, 3))
    torch.testing.assert_close(log_std.grad, value.detach())  # d(e^s noise)/ds at s = 0


def test_the_same_stream_gives_the_same_sample_and_another_name_another():
    q = normal(2, 4, 7)
    assert torch.equal(q.sample(stream(0, "keys")), q.sample(stream(0, "keys")))
    assert not torch.equal(q.sample(stream(0, "keys")), q.sample(stream(1, "keys")))
    assert not torch.equal(q.sample(stream(0, "keys")), q.sample(stream(0, "readout")))


def test_the_key_prior_is_a_standard_normal():
    value = torch.randn(2, 3, 2, 3)
    expected = td.Normal(0.0, 1.0).log_prob(value).sum((-1, -2))
    torch.testing.assert_close(DiagonalNormal.standard_like(value).log_prob(value), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_networks_output_splits_into_mean_and_log_std_in_float32(dtype: torch.dtype):
    output = torch.randn(2, 3, 8).to(dtype)
    q = DiagonalNormal.from_network(output)
    assert torch.equal(q.mean, output[..., :4].float())
    assert torch.equal(q.log_std, output[..., 4:].float())
    assert q.log_prob(q.mean.to(dtype)).dtype == torch.float32


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_a_network_that_runs_away_keeps_a_finite_kl(far: float):
    output: Tensor = torch.zeros(1, 1, 4)
    output[..., 2:] = far
    q, p = DiagonalNormal.from_network(output), normal(1, 1, 2)
    assert q.kl(p).isfinite().all() and p.kl(q).isfinite().all()
    assert q.std.isfinite().all() and (q.std > 0).all()
