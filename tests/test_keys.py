"""Keys: N(0, 1) a priori, so windows are uniform over the memory before anything is written."""

import torch
from torch import distributions as td

from kanerva.config import KeyConfig
from kanerva.memory.keys import KeyNetwork, window


def test_a_window_is_the_keys_quantile():
    keys = torch.linspace(-6, 6, 61).view(1, 61, 1, 1).expand(1, 61, 2, 3)
    expected = 2 * td.Normal(0.0, 1.0).cdf(keys) - 1
    torch.testing.assert_close(window(keys), expected, rtol=1e-5, atol=1e-6)


def test_keys_from_their_prior_become_uniform_windows():
    """Kolmogorov-Smirnov at the 0.1% level, for scale, x and y each."""
    draws = 20_000
    windows = window(torch.randn(1, draws, 1, 3))[0, :, 0]
    uniform = (windows.sort(0).values + 1) / 2
    steps = torch.arange(draws)[:, None]
    gap = torch.maximum(uniform - steps / draws, (steps + 1) / draws - uniform).amax(0)
    assert (gap < 1.95 / draws**0.5).all()


def test_windows_stay_in_the_papers_range():
    """App. A: {s, x, y} lie on [-1, 1], however far a key strays, and the centre is 0."""
    windows = window(torch.tensor([-100.0, 0.0, 100.0]).view(1, 1, 1, 3))
    assert windows.flatten().tolist() == [-1.0, 0.0, 1.0]


def test_a_key_can_be_learned_through_its_window():
    keys = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 3).requires_grad_()
    window(keys).sum().backward()
    density = 2 * td.Normal(0.0, 1.0).log_prob(keys.detach()).exp()
    torch.testing.assert_close(keys.grad, density)


def test_each_sample_gets_k_keys_of_its_own_embedding():
    net = KeyNetwork(KeyConfig(hidden=8), embedding=6, reads=3).eval()
    embedding = torch.randn(2, 5, 6)
    posterior = net(embedding)
    assert posterior.mean.shape == (2, 5, 3, 3)
    alone = net(embedding[1:, 2:3])
    torch.testing.assert_close(posterior.mean[1, 2], alone.mean[0, 0])
    torch.testing.assert_close(posterior.std[1, 2], alone.std[0, 0])


def test_heads_differ():
    """K reads look at K places: no head repeats another's numbers."""
    net = KeyNetwork(KeyConfig(hidden=8), embedding=6, reads=2).eval()
    mean = net(torch.randn(1, 1, 6)).mean[0, 0]
    assert (mean[0] - mean[1]).abs().min() > 1e-4


def test_the_key_network_is_linear_in_the_embedding():
    net = KeyNetwork(KeyConfig(hidden=8), embedding=6, reads=2).eval()
    a, b = torch.randn(1, 2, 6), torch.randn(1, 2, 6)
    between = net(0.25 * a + 0.75 * b).mean
    torch.testing.assert_close(between, 0.25 * net(a).mean + 0.75 * net(b).mean)
