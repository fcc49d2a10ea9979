"""The readout: a posterior from the embedding, a prior from the traces and from nothing else."""

import pytest
import torch

from kanerva.config import MemoryConfig, ReadoutConfig
from kanerva.readout import ReadoutPosterior, ReadoutPrior

CONFIG = ReadoutConfig(size=5, hidden=8, layers=2, prior_width=8)


@pytest.mark.parametrize("block", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("reads, channels", [(1, 1), (3, 2)])
def test_any_stack_of_traces_gives_a_normal_over_the_readout(block: int, reads: int, channels: int):
    memory = MemoryConfig(channels=channels, size=16, reads=reads, block=block)
    prior = ReadoutPrior(CONFIG, memory)(torch.randn(2, 3, reads, channels, block, block))
    assert prior.mean.shape == prior.log_std.shape == (2, 3, 5)
    assert not torch.equal(prior.mean[0, 0], prior.mean[0, 1])


@pytest.mark.parametrize("training", [True, False])
def test_the_prior_of_one_image_does_not_see_the_others_traces(training: bool):
    """Condition 1: no batch statistic, index or state, in training either."""
    net = ReadoutPrior(CONFIG, MemoryConfig(size=16, block=4)).train(training)
    traces = torch.randn(3, 4, 2, 3, 4, 4)
    whole, alone = net(traces), net(traces[1:2, 2:3])
    again = net(traces.flip(0, 1))
    torch.testing.assert_close(whole.mean[1, 2], alone.mean[0, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.log_std[1, 2], alone.log_std[0, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.mean, again.mean.flip(0, 1), rtol=1e-5, atol=1e-5)


def test_the_prior_carries_no_state():
    assert not list(ReadoutPrior(CONFIG, MemoryConfig(size=16, block=4)).buffers())


def test_every_read_and_channel_reaches_the_prior():
    """The K traces are stacked along channels (App. E)."""
    net = ReadoutPrior(CONFIG, MemoryConfig(size=16, block=4, reads=3, channels=2))
    traces = torch.randn(1, 1, 3, 2, 4, 4, requires_grad=True)
    net(traces).mean.sum().backward()
    assert traces.grad is not None and (traces.grad.abs().sum((0, 1, 4, 5)) > 0).all()


def test_the_posterior_is_linear_in_its_own_embedding():
    net = ReadoutPosterior(CONFIG, embedding=6).eval()
    a, b = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    blend = net(0.25 * a + 0.75 * b)
    torch.testing.assert_close(blend.mean, 0.25 * net(a).mean + 0.75 * net(b).mean)
    torch.testing.assert_close(net(a).mean[1, 2], net(a[1:, 2:]).mean[0, 0])
    assert blend.mean.shape == (2, 3, 5)
