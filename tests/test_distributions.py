"""Diagonal and confined normals against torch.distributions and against Monte Carlo."""

import pytest
import torch
from torch import Tensor
from torch import distributions as td

from kanerva.distributions import (
    ConfinedNormal,
    DiagonalNormal,
    as_normal,
    as_uniform,
    recoverable_clamp,
)
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


@pytest.mark.parametrize("far", [-9.0, 9.0])
def test_a_posterior_that_has_run_away_finds_back(far: float):
    """The divergence pulls both ways: a std at its floor, or its ceiling, is not stuck there."""
    output: Tensor = torch.zeros(1, 1, 4)
    output[..., 2:] = far
    output.requires_grad_()
    prior = DiagonalNormal.standard_like(torch.zeros(1, 1, 2))
    for _ in range(300):
        kl = DiagonalNormal.from_network(output).kl(prior).sum()
        (slope,) = torch.autograd.grad(kl, output)
        output = (output - 0.1 * slope.clamp(-1, 1)).detach().requires_grad_()
    assert output[..., 2:].abs().max() < 0.1


def test_inside_its_range_a_log_std_has_its_own_gradient_and_outside_none_outwards():
    x = torch.tensor([-8.0, -8.0, 0.5, 0.5, 5.0, 5.0], requires_grad=True)
    slope = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    held = recoverable_clamp(x, -7.0, 4.0)
    assert torch.equal(held, x.clamp(-7, 4))
    (found,) = torch.autograd.grad(held, x, slope)
    assert found.tolist() == [0.0, -1.0, 1.0, -1.0, 1.0, 0.0]


def test_maps_split_into_mean_and_log_std_along_their_channels():
    output = torch.randn(2, 3, 6, 4, 5)
    q = DiagonalNormal.from_network(output, dim=2)
    assert torch.equal(q.mean, output[:, :, :3]) and torch.equal(q.log_std, output[:, :, 3:])


@pytest.mark.parametrize("event", [(2,), (3, 3)])
def test_the_divergence_from_the_prior_and_its_log_ratio_are_torchs(event: tuple[int, ...]):
    q, value = normal(2, 4, *event), 2 * torch.randn(2, 4, *event)
    p = td.Independent(td.Normal(torch.zeros(2, 4, *event).double(), 1.0), len(event))
    expected = td.kl_divergence(oracle(q), p)
    torch.testing.assert_close(q.kl_to_prior().double(), expected, rtol=1e-5, atol=1e-5)
    ratio = oracle(q).log_prob(value.double()) - p.log_prob(value.double())
    torch.testing.assert_close(q.log_ratio(value).double(), ratio, rtol=1e-5, atol=1e-5)


# Quantiles


def test_as_uniform_is_twice_the_normal_distribution_function_less_one():
    y = torch.linspace(-5, 5, 101)
    expected = 2 * td.Normal(0.0, 1.0).cdf(y.double()) - 1
    torch.testing.assert_close(as_uniform(y).double(), expected, rtol=1e-5, atol=1e-6)


def test_as_normal_is_the_normal_quantile_function():
    u = torch.linspace(-0.999, 0.999, 101)
    expected = td.Normal(0.0, 1.0).icdf((u.double() + 1) / 2)
    torch.testing.assert_close(as_normal(u).double(), expected, rtol=1e-4, atol=1e-5)


def test_as_uniform_and_as_normal_undo_each_other():
    """As far as float32 can tell: at four standard deviations it keeps three digits of a key."""
    u, y = torch.linspace(-1, 1, 2001), torch.linspace(-4, 4, 801)
    torch.testing.assert_close(as_uniform(as_normal(u)), u, rtol=0, atol=2e-6)
    back = as_normal(as_uniform(y))
    torch.testing.assert_close(back, y, rtol=0, atol=2e-3)
    torch.testing.assert_close(back[200:601], y[200:601], rtol=0, atol=1e-5)  # within two


def test_the_ends_of_the_range_are_finite_keys_at_the_ends():
    ends = as_normal(torch.tensor([-1.0, 1.0]).bfloat16())
    assert ends.dtype == torch.float32 and ends.isfinite().all()
    torch.testing.assert_close(as_uniform(ends), torch.tensor([-1.0, 1.0]), rtol=0, atol=2e-6)


# Confined normals


def confined(centre: list[float], half: list[float], draws: int = 1) -> ConfinedNormal:
    """One box, so many times over; its mass is the product of its half widths."""
    lead = (1, draws, len(centre))
    mass = torch.tensor(half).prod().expand(1, draws)
    return ConfinedNormal(torch.tensor(centre).expand(lead), torch.tensor(half).expand(lead), mass)


BOXES = [
    ([0.0, 0.0], [1.0, 1.0]),  # everywhere: the prior itself
    ([-0.75, 0.5], [0.25, 0.5]),  # a cell of two rows of four, at the edge
    ([0.95, -0.2], [0.05, 0.01]),  # far in one tail, narrow along the other
]


@pytest.mark.parametrize("centre, half", BOXES)
def test_confined_samples_stay_in_their_box_and_follow_the_prior_there(
    centre: list[float], half: list[float]
):
    """Kolmogorov-Smirnov at the 0.1% level against (Phi(y) - Phi(a)) / (Phi(b) - Phi(a))."""
    draws, phi = 20_000, td.Normal(0.0, 1.0).cdf
    y = confined(centre, half, draws).sample()[0].double()
    for axis in range(2):
        low, high = (0.5 * (1 + centre[axis] + side * half[axis]) for side in (-1, 1))
        share = ((phi(y[:, axis]) - low) / (high - low)).sort().values
        assert share[0] > -1e-4 and share[-1] < 1 + 1e-4  # float32, at a box of width 0.02
        steps = torch.arange(draws)
        gap = torch.maximum(share - steps / draws, (steps + 1) / draws - share).max()
        assert gap < 1.95 / draws**0.5


def test_the_axes_of_a_confined_sample_are_independent():
    y = as_uniform(confined([-0.5, 0.5], [0.5, 0.5], 20_000).sample()[0])
    assert abs(torch.corrcoef(y.T)[0, 1]) < 5 / 20_000**0.5


@pytest.mark.parametrize("centre, half", BOXES)
def test_a_confined_divergence_is_the_prior_mass_of_the_box(centre: list[float], half: list[float]):
    """KL = -ln p(box): with torch's distribution function, and by counting the prior's draws."""
    q = confined(centre, half)
    standard = td.Normal(torch.zeros(2).double(), 1.0)
    middle, reach = torch.tensor(centre).double(), torch.tensor(half).double()
    ends = [standard.icdf(((1 + middle + side * reach) / 2).clamp(1e-12, 1)) for side in (-1, 1)]
    mass = (standard.cdf(ends[1]) - standard.cdf(ends[0])).prod()
    torch.testing.assert_close(q.kl_to_prior().double(), -mass.log().view(1, 1), atol=1e-5, rtol=0)
    keys, draws = torch.randn(200_000, 2).double(), 200_000
    counted = ((keys > ends[0]) & (keys < ends[1])).all(1).double().mean()
    error = (mass * (1 - mass) / draws).sqrt()
    assert abs(counted - q.kl_to_prior().neg().exp().item()) < 5 * error + 1e-6


def test_a_confined_log_ratio_is_its_density_over_the_priors():
    """q = p / mass inside: its logarithm less the prior's is the divergence, at every draw."""
    q = confined([-0.75, 0.5], [0.25, 0.5], 1000)
    value = q.sample()
    torch.testing.assert_close(q.log_ratio(value), torch.full((1, 1000), 8.0).log())
    torch.testing.assert_close(q.log_ratio(value), q.kl_to_prior())


def test_a_mass_of_several_boxes_counts_all_of_them():
    """Three of eight cells that look the same: naming one of them costs ln(8/3)."""
    box = confined([-0.75, 0.5], [0.25, 0.5])
    q = ConfinedNormal(box.centre, box.half, torch.full((1, 1), 3 / 8))
    torch.testing.assert_close(q.kl_to_prior(), torch.full((1, 1), 8 / 3).log())
    torch.testing.assert_close(q.log_ratio(q.sample()), torch.full((1, 1), 8 / 3).log())


def test_a_confined_mean_is_the_median_of_its_draws():
    q = confined([-0.75, 0.5], [0.25, 0.5], 20_000)
    torch.testing.assert_close(as_uniform(q.mean), q.centre)
    below = (q.sample() < q.mean).double().mean((0, 1))
    assert ((below - 0.5).abs() < 5 * 0.5 / 20_000**0.5).all()


def test_the_same_stream_draws_the_same_confined_keys():
    q = confined([0.2, -0.3], [0.1, 0.4], 5)
    assert torch.equal(q.sample(stream(0, "keys")), q.sample(stream(0, "keys")))
    assert not torch.equal(q.sample(stream(0, "keys")), q.sample(stream(1, "keys")))
