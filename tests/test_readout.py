"""The readout: a posterior from the embedding, a prior from the traces and from nothing else.
`kpp`'s has two parts, and a posterior in units of its prior."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kanerva.config import KppReadoutConfig, PaperMemoryConfig, PaperReadoutConfig
from kanerva.readout import ReadoutPosterior, ReadoutPrior, SpatialReadout

CONFIG = PaperReadoutConfig(size=5, hidden=8, prior_width=8)


@pytest.mark.parametrize("block", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("reads, channels", [(1, 1), (3, 2)])
def test_any_stack_of_traces_gives_a_normal_over_the_readout(block: int, reads: int, channels: int):
    memory = PaperMemoryConfig(channels=channels, size=16, reads=reads, block=block)
    prior = ReadoutPrior(CONFIG, memory)(torch.randn(2, 3, reads, channels, block, block))
    assert prior.mean.shape == prior.log_std.shape == (2, 3, 5)
    assert not torch.equal(prior.mean[0, 0], prior.mean[0, 1])


@pytest.mark.parametrize("training", [True, False])
def test_the_prior_of_one_image_does_not_see_the_others_traces(training: bool):
    """Condition 1: no batch statistic, index or state, in training either."""
    net = ReadoutPrior(CONFIG, PaperMemoryConfig(size=16, block=4)).train(training)
    traces = torch.randn(3, 4, 2, 3, 4, 4)
    whole, alone = net(traces), net(traces[1:2, 2:3])
    again = net(traces.flip(0, 1))
    torch.testing.assert_close(whole.mean[1, 2], alone.mean[0, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.log_std[1, 2], alone.log_std[0, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.mean, again.mean.flip(0, 1), rtol=1e-5, atol=1e-5)


def test_the_prior_carries_no_state():
    assert not list(ReadoutPrior(CONFIG, PaperMemoryConfig(size=16, block=4)).buffers())


def test_every_read_and_channel_reaches_the_prior():
    """The K traces are stacked along channels (App. E)."""
    net = ReadoutPrior(CONFIG, PaperMemoryConfig(size=16, block=4, reads=3, channels=2))
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


def test_the_posterior_amplifies_nothing_unless_spectral_norm_is_off():
    """Layers seven times as large: the same map, or one 7^3 as large."""
    a, b = torch.randn(2, 1, 1, 6)
    apart = {}
    for spectral in (True, False):
        net = ReadoutPosterior(replace(CONFIG, spectral_norm=spectral), embedding=6).eval()
        before = (net(a).mean - net(b).mean).norm()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(7)
        apart[spectral] = (net(a).mean - net(b).mean).norm() / before
    torch.testing.assert_close(torch.stack(list(apart.values())), torch.tensor([1.0, 343.0]))


# kpp: a global and a spatial part

PARTS = [(4, 0), (0, 2), (3, 2)]  # numbers of the global part, maps of the spatial one
TRACE, FEATURES, SIDE = (2, 4, 3), 6, (2, 3)


def spatial(size: int, channels: int) -> SpatialReadout:
    config = KppReadoutConfig(size=size, channels=channels, prior_width=8)
    return SpatialReadout(config, TRACE, FEATURES, SIDE)


def awake(net: SpatialReadout, noise: float = 0.15) -> SpatialReadout:
    """Nothing at its initial value, the layers that start at zero included."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return net


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Traces, and the samples' maps."""
    return torch.randn(batch, length, *TRACE), torch.randn(batch, length, FEATURES, *SIDE)


@pytest.mark.parametrize("size, channels", PARTS)
def test_a_reading_has_all_its_parts(size: int, channels: int):
    net, (traces, maps) = awake(spatial(size, channels)), inputs(2, 5)
    for reading in (net(traces), net(traces, maps)):
        assert reading.readout.shape == (2, 5, size + channels * 2 * 3)
        spread = reading.readout.flatten(0, 1).std(0)
        assert (spread > 0).all()
        for nats in (reading.kl, reading.log_prior, reading.log_posterior):
            assert nats.shape == (2, 5)


@pytest.mark.parametrize("size, channels", PARTS)
def test_a_residual_posterior_starts_at_the_prior(size: int, channels: int):
    """KL z is exactly zero, and a readout from q is the one p would have drawn."""
    net, (traces, maps) = spatial(size, channels), inputs(2, 3)
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    q, p = net(traces, maps, generator=seeds[0]), net(traces, generator=seeds[1])
    assert (q.kl == 0).all()
    assert torch.equal(q.readout, p.readout) and torch.equal(q.log_posterior, q.log_prior)


@pytest.mark.parametrize("size, channels", PARTS)
def test_a_residual_is_counted_in_units_of_the_prior(size: int, channels: int):
    """Off by delta standard deviations and exp(rho) times as wide: a KL of
    delta^2 / 2 + (exp(2 rho) - 1) / 2 - rho for each number, whatever the prior."""
    net, delta, rho = awake(spatial(size, channels)), 0.8, -0.6
    for head in net.q.values():
        head[-1].weight.data.zero_()
        mean, log_std = head[-1].bias.data.chunk(2)
        mean.fill_(delta), log_std.fill_(rho)
    traces, maps = inputs(2, 3)
    each = delta**2 / 2 + (math.exp(2 * rho) - 1) / 2 - rho
    expected = torch.full((2, 3), (size + 6 * channels) * each)
    torch.testing.assert_close(net(traces, maps).kl, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size, channels", PARTS)
def test_a_readings_divergence_is_its_expected_log_ratio(size: int, channels: int):
    """Monte Carlo; with both parts the spatial KL depends on the global draw, so both are means."""
    net, draws = awake(spatial(size, channels)), 4000
    traces, maps = (x.expand(-1, draws, -1, -1, -1) for x in inputs(1, 1))
    with torch.no_grad():
        reading = net(traces, maps)
    ratio = reading.log_posterior - reading.log_prior
    error = (ratio - reading.kl).std() / draws**0.5
    assert abs(ratio.mean() - reading.kl.mean()) < 5 * error
    assert reading.kl.mean() > 0.1 and error < 0.1 * reading.kl.mean()  # sharp enough to tell


def test_densities_of_one_number_integrate_to_one():
    net = awake(spatial(1, 0), noise=0.05)  # neither too wide nor too narrow
    traces, maps = (x.expand(-1, 4001, -1, -1, -1) for x in inputs(1, 1))
    line = torch.linspace(-20, 20, 4001).view(1, 4001, 1)
    reading = net(traces, maps, readout=line)
    for density in (reading.log_prior, reading.log_posterior):
        assert abs(density.exp().sum() * 0.01 - 1) < 1e-3
    mean = net(traces[:, :1], maps[:, :1], sample=False).readout
    assert abs((reading.log_posterior.exp() * line[..., 0]).sum() * 0.01 - mean) < 1e-3


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("size, channels", PARTS)
def test_a_readout_that_is_given_keeps_its_densities(size: int, channels: int, seen: bool):
    net, (traces, maps) = awake(spatial(size, channels)), inputs(2, 3)
    drawn = net(traces, maps if seen else None)
    again = net(traces, maps if seen else None, readout=drawn.readout)
    assert torch.equal(again.readout, drawn.readout)
    for name in ("kl", "log_prior", "log_posterior"):
        torch.testing.assert_close(getattr(again, name), getattr(drawn, name))
    prior = net(traces, readout=drawn.readout).log_prior  # p needs no sample to say the same
    torch.testing.assert_close(prior, drawn.log_prior)


@pytest.mark.parametrize("size, channels", PARTS)
def test_a_reading_from_the_prior_costs_nothing(size: int, channels: int):
    reading = awake(spatial(size, channels))(inputs(2, 3)[0])
    assert (reading.kl == 0).all() and torch.equal(reading.log_prior, reading.log_posterior)


def test_the_mean_of_a_part_is_the_average_of_its_draws():
    net, (traces, maps) = awake(spatial(4, 0)), inputs(1, 1)
    many = [x.expand(-1, 5000, -1, -1, -1) for x in (traces, maps)]
    for given in (many[:1], many):
        draws = net(*given).readout[0]
        mean = net(*[x[:, :1] for x in given], sample=False).readout[0, 0]
        assert ((draws.mean(0) - mean).abs() < 5 * draws.std(0) / 5000**0.5).all()


def test_the_spatial_part_hears_the_global_one():
    """p(g, s) is no product of p(g) and p(s): swapping parts between draws changes the total."""
    net, traces = awake(spatial(3, 2)), inputs(1, 1)[0]
    g, s = torch.randn(2, 3), torch.randn(2, 12)

    def density(i: int, j: int) -> Tensor:
        return net(traces, readout=torch.cat([g[i], s[j]]).view(1, 1, 15)).log_prior

    assert abs(density(0, 0) + density(1, 1) - density(0, 1) - density(1, 0)) > 1e-2


@pytest.mark.parametrize("training", [True, False])
def test_a_reading_is_its_own_samples_alone(training: bool):
    """Condition 1 for `kpp`: other images, their order and their number change nothing."""
    net, (traces, maps) = awake(spatial(3, 2)).train(training), inputs(3, 4)
    z = torch.randn(3, 4, 15)
    whole = net(traces, maps, readout=z)
    alone = net(traces[1:2, 2:3], maps[1:2, 2:3], readout=z[1:2, 2:3])
    for name in ("kl", "log_prior", "log_posterior"):
        mine, theirs = getattr(whole, name)[1, 2], getattr(alone, name)[0, 0]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    assert not list(net.buffers())


def test_the_prior_does_not_see_the_sample():
    net, (traces, maps) = awake(spatial(3, 2)), inputs(2, 3)
    z = torch.randn(2, 3, 15)
    one, other = (net(traces, m, readout=z) for m in (maps, torch.randn_like(maps)))
    assert torch.equal(one.log_prior, other.log_prior)
    assert not torch.isclose(one.log_posterior, other.log_posterior).any()
