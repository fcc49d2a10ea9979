"""The matrix normal memory against slower ways to the same numbers, in float64."""

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from kanerva.config import MatrixConfig
from kanerva.models.rivals.matrix_normal import (
    MatrixNormal,
    MatrixPrior,
    cholesky,
    least_squares,
    posterior,
    solve_addresses,
    updated,
)
from kanerva.seeding import Share

B, T, K, C = 2, 5, 4, 3
VARIANCE = torch.tensor(0.3).double()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture
def prior() -> MatrixNormal:
    """Rows that are correlated already: the prior of a second episode."""
    root = random(B, K, K).triu()
    root.diagonal(dim1=-2, dim2=-1).abs_().add_(0.3)
    return MatrixNormal(random(B, K, C), root)


@pytest.fixture
def episode() -> tuple[Tensor, Tensor]:
    return random(B, T, K), random(B, T, C)


def as_vector(q: MatrixNormal) -> MultivariateNormal:
    """The same distribution over vec(M), row after row: covariance U (x) I."""
    covariance = torch.stack([torch.kron(u, torch.eye(C).double()) for u in q.covariance])
    return MultivariateNormal(q.mean.flatten(1), covariance)


def one_by_one(prior: MatrixNormal, addresses: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    mean, covariance = prior.mean, prior.covariance
    for t in range(addresses.shape[1]):
        mean, covariance = updated(mean, covariance, addresses[:, t], codes[:, t], VARIANCE)
    return mean, covariance


def by_conditioning(prior: MatrixNormal, addresses: Tensor, codes: Tensor, b: int):
    """Mean and covariance of vec(M) given z = H vec(M) + noise, from their joint normal."""
    vector = as_vector(prior)
    mean, covariance = vector.mean[b], vector.covariance_matrix[b]
    seen = torch.kron(addresses[b], torch.eye(C).double())  # (T C, K C)
    total = seen @ covariance @ seen.T + VARIANCE * torch.eye(len(seen)).double()
    gain = covariance @ seen.T @ torch.linalg.inv(total)
    return mean + gain @ (codes[b].flatten() - seen @ mean), covariance - gain @ seen @ covariance


# Writing


def test_an_episode_at_once_is_the_same_as_one_by_one(prior, episode):
    q = posterior(prior, *episode, VARIANCE)
    mean, covariance = one_by_one(prior, *episode)
    torch.testing.assert_close(q.mean, mean)
    torch.testing.assert_close(q.covariance, covariance)


def test_writing_is_conditioning_a_normal_over_all_numbers_of_the_memory(prior, episode):
    q = posterior(prior, *episode, VARIANCE)
    for b in range(B):
        mean, covariance = by_conditioning(prior, *episode, b)
        torch.testing.assert_close(q.mean[b].flatten(), mean)
        torch.testing.assert_close(as_vector(q).covariance_matrix[b], covariance)


def test_the_order_of_writing_does_not_matter(prior, episode):
    order = torch.tensor([3, 0, 4, 1, 2])
    first = posterior(prior, *episode, VARIANCE)
    second = posterior(prior, *[part[:, order] for part in episode], VARIANCE)
    torch.testing.assert_close(first.mean, second.mean)
    torch.testing.assert_close(first.covariance, second.covariance)


def test_two_episodes_one_after_another_are_one_long_one(prior, episode):
    addresses, codes = episode
    half = posterior(prior, addresses[:, :2], codes[:, :2], VARIANCE)
    rest = posterior(half, addresses[:, 2:], codes[:, 2:], VARIANCE)
    whole = posterior(prior, addresses, codes, VARIANCE)
    torch.testing.assert_close(rest.mean, whole.mean)
    torch.testing.assert_close(rest.covariance, whole.covariance)


def test_what_is_written_without_noise_is_read_back(prior):
    addresses, codes = random(B, K, K), random(B, K, C)  # as many codes as rows
    q = posterior(prior, addresses, codes, torch.tensor(1e-9).double())
    torch.testing.assert_close(addresses @ q.mean, codes, rtol=1e-4, atol=1e-4)
    assert q.covariance.abs().max() < 1e-4


def test_two_codes_at_one_address_are_averaged():
    wide = MatrixNormal(torch.zeros(1, K, C).double(), 1e3 * torch.eye(K).double()[None])
    address = torch.tensor([[[0.0, 1.0, 0.0, 0.0]] * 2]).double()
    codes = random(1, 2, C)
    q = posterior(wide, address, codes, VARIANCE)
    torch.testing.assert_close(q.mean[:, 1], codes.mean(dim=1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q.mean[:, 0], torch.zeros(1, C).double())  # other rows are left


def test_the_root_is_triangular_and_of_the_covariance(prior, episode):
    q = posterior(prior, *episode, VARIANCE)
    assert torch.equal(q.root, q.root.triu())
    torch.testing.assert_close(q.log_det, torch.linalg.slogdet(q.covariance).logabsdet)


@pytest.mark.parametrize("variance", [1e-3, 1.0])
@pytest.mark.parametrize("alike", [False, True])
def test_in_float32_the_covariance_stays_positive_and_gradients_finite(
    variance: float, alike: bool
):
    """The sizes of a run; with `alike`, all 64 codes at one address."""
    prior = MatrixPrior(MatrixConfig(noise=variance**0.5))
    addresses = torch.randn(2, 64, 32) if not alike else torch.randn(2, 1, 32).expand(2, 64, 32)
    addresses = (5 * addresses).requires_grad_()
    q = posterior(prior(2), addresses, 5 * torch.randn(2, 64, 100), prior.noise_variance)
    assert torch.linalg.eigvalsh(q.covariance.double()).min() > 0
    (q.kl(prior(2)).sum() + q.sample().square().sum()).backward()
    gradients = [addresses.grad, *(p.grad for p in prior.parameters())]
    assert all(g is not None and g.isfinite().all() for g in gradients)


# Divergence, samples


def test_the_divergence_is_that_of_normals_over_all_numbers(prior, episode):
    q = posterior(prior, *episode, VARIANCE)
    torch.testing.assert_close(q.kl(prior), kl_divergence(as_vector(q), as_vector(prior)))
    torch.testing.assert_close(prior.kl(prior), torch.zeros(B).double())


def test_the_divergence_and_the_samples_match_monte_carlo(prior, episode):
    """E_q[ln q(M) - ln p(M)], with M from `sample` and densities from torch.distributions."""
    q = posterior(prior, *episode, VARIANCE)
    draws = 20000
    many = MatrixNormal(q.mean[:1].expand(draws, -1, -1), q.root[:1].expand(draws, -1, -1))
    sample = many.sample().flatten(1)
    ours, theirs = as_vector(q), as_vector(prior)
    p, r = (MultivariateNormal(d.mean[0], d.covariance_matrix[0]) for d in (ours, theirs))
    ratio = p.log_prob(sample) - r.log_prob(sample)
    error = ratio.std() / draws**0.5
    assert (ratio.mean() - q.kl(prior)[0]).abs() < 5 * error < 0.05 * ratio.mean()
    torch.testing.assert_close(sample.mean(0), p.mean, rtol=0.0, atol=0.05)
    torch.testing.assert_close(sample.T.cov(), p.covariance_matrix, rtol=0.0, atol=0.05)


def test_the_divergence_of_an_episode_is_not_the_sum_of_its_steps(prior, episode):
    """Start to end: E_q and the steps' own averages differ."""
    addresses, codes = episode
    steps, before = torch.zeros(B).double(), prior
    for t in range(T):
        after = posterior(before, addresses[:, [t]], codes[:, [t]], VARIANCE)
        steps, before = steps + after.kl(before), after
    assert not torch.isclose(before.kl(prior), steps, rtol=1e-2).any()


def test_processes_that_share_a_batch_draw_the_memories_of_the_whole(prior):
    torch.manual_seed(3)
    whole = prior.sample()
    for rank in range(B):
        own = MatrixNormal(prior.mean[[rank]], prior.root[[rank]])
        torch.manual_seed(3)
        torch.testing.assert_close(own.sample(Share(rank, B)), whole[[rank]])


# Addresses by least squares


@pytest.mark.parametrize("rows", [2, 6])  # fewer and more than a code has numbers
def test_an_address_is_the_least_squares_solution(rows: int):
    """Of [M'; sqrt(ridge) I] w = [z; 0], by another library routine."""
    memory, codes = random(B, rows, C), random(B, T, C)
    found = least_squares(memory, codes, VARIANCE)
    identity = torch.eye(rows).double().expand(B, -1, -1)
    stacked = torch.cat([memory.mT, VARIANCE.sqrt() * identity], dim=1)
    target = torch.cat([codes.mT, torch.zeros(B, rows, T).double()], dim=1)
    torch.testing.assert_close(found.mT, torch.linalg.lstsq(stacked, target).solution)


def test_without_a_ridge_an_address_finds_a_code_that_is_there():
    memory, address = random(B, 2, C), random(B, T, 2)
    found = least_squares(memory, address @ memory, torch.tensor(0.0).double())
    torch.testing.assert_close(found, address)


def test_codes_are_written_where_they_fit_the_memory_as_it_stands(prior, episode):
    """Each address solved from the posterior of the codes before it."""
    _, codes = episode
    found = solve_addresses(prior, codes, VARIANCE)
    torch.testing.assert_close(found[:, :1], least_squares(prior.mean, codes[:, :1], VARIANCE))
    for t in range(1, T):
        before = posterior(prior, found[:, :t], codes[:, :t], VARIANCE)
        expected = least_squares(before.mean, codes[:, [t]], VARIANCE)
        torch.testing.assert_close(found[:, [t]], expected)
    assert not torch.allclose(found, least_squares(prior.mean, codes, VARIANCE), atol=1e-2)


def test_a_singular_matrix_has_a_finite_root():
    line = torch.randn(3, 32, 1)
    root = cholesky(line @ line.mT)
    assert root.isfinite().all()
    torch.testing.assert_close(root @ root.mT, line @ line.mT, rtol=1e-2, atol=1e-2)


# Gradients, parameters


def test_gradients_are_those_of_differences(prior, episode):
    def cost(mean: Tensor, addresses: Tensor, codes: Tensor, variance: Tensor) -> Tensor:
        before = MatrixNormal(mean, prior.root)
        q = posterior(before, addresses + solve_addresses(before, codes, variance), codes, variance)
        return q.kl(before).sum() + least_squares(q.mean, codes, variance).square().sum()

    inputs = [part.requires_grad_() for part in (prior.mean, *episode, VARIANCE.clone())]
    assert torch.autograd.gradcheck(cost, inputs)


def test_noise_starts_as_told_and_never_vanishes():
    prior = MatrixPrior(MatrixConfig(count=K, width=C, noise=0.7))
    torch.testing.assert_close(prior.noise_variance, torch.tensor(0.49), rtol=5e-3, atol=0.0)
    torch.testing.assert_close(
        prior(2).covariance, torch.eye(K).expand(2, K, K), **{"rtol": 0.0, "atol": 2e-3}
    )
    with torch.no_grad():
        for parameter in (prior.log_noise, prior.log_variance):
            parameter.fill_(-60)
    assert prior.noise_variance > 5e-4
    assert (prior(1).covariance.diagonal(dim1=-2, dim2=-1) > 5e-4).all()
