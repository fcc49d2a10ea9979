"""Claims that no single module owns: the paper's sizes, and that the bound is one.

The conditions of docs/evaluation.md: p sees an episode through M only, KLs are those of the samples
that are used. test_contract.py shows for all models that weights, M, y and z suffice to score.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from kanerva.config import KppPaperConfig, RunConfig
from kanerva.distributions import DiagonalNormal
from kanerva.encoder import EpisodeEncoder
from kanerva.layers.dense import LAYERS
from kanerva.memory.keys import window
from kanerva.models.kpp_paper import KppPaper

Wake = Callable[[KppPaperConfig], KppPaper]
Draw = Callable[..., Tensor]


# The paper's values


def test_defaults_are_those_of_appendix_e():
    run, config = RunConfig(), KppPaperConfig()
    memory = config.memory
    assert (memory.channels, memory.size, memory.base) == (3, 64, 256)
    assert (config.keys.hidden, config.readout.hidden, LAYERS) == (512, 512, 3)
    assert config.encoder.shift == 0.125
    assert len(EpisodeEncoder(config.encoder, 1).net.blocks) == 8  # of a ResNet-18
    assert run.optim.optimiser == "lars_adam" and run.optim.weight_decay == 1e-3
    assert run.optim.warmup_epochs == 10
    epochs = run.steps * run.batch * run.episode_length / 50_000
    assert 500 < epochs < 1000
    assert memory.reads == 2  # §4.3


def test_the_default_model_writes_384_floats_per_image_at_32():
    """docs/evaluation.md: M is free, so its size is said: 3 x 64 x 64 shared by T = 32 images."""
    model = KppPaper(KppPaperConfig()).eval()
    with torch.no_grad():
        memory = model.write(torch.zeros(2, 1, 28, 28))
    assert memory.map.shape == (3, 64, 64) and memory.floats / 32 == 384
    assert model.encoder.features == 512


def test_an_episode_is_exchangeable_up_to_the_temporal_shift(
    wake: Wake, tiny: KppPaperConfig, draw: Draw
):
    """§3.1: the order does not matter, and only the shift (§3.3) makes it matter."""
    images, order = draw(tiny, 5), torch.tensor([3, 0, 4, 1, 2])
    still = wake(replace(tiny, encoder=replace(tiny.encoder, shift=0.0)))
    torch.testing.assert_close(still.write(images).map, still.write(images[order]).map)
    terms = still.elbo(images, sample=False).elbo
    torch.testing.assert_close(still.elbo(images[order], sample=False).elbo, terms[order])
    shifted = wake(tiny)
    assert not torch.allclose(shifted.write(images).map, shifted.write(images[order]).map)


def test_memory_that_no_read_covers_gets_no_gradient(model: KppPaper, draw: Draw):
    """§3.4, through the whole bound: this is what allocates blocks."""
    images = draw(model.config, 1, 1)
    maps = model.write(images).map.detach().requires_grad_()
    corner = torch.tensor([0.25, 0.7, -0.7])  # top right, a quarter of the side
    keys = torch.special.ndtri((corner + 1) / 2).expand(1, 1, 2, 3)
    torch.testing.assert_close(window(keys)[0, 0, 0], corner)
    model.read_maps(maps, keys).mean.sum().backward()
    assert maps.grad is not None
    touched = (maps.grad != 0).any(1)[0]
    assert touched[:4, 8:].any()
    assert not touched[4:].any() and not touched[:, :8].any()


# The bound is one


def copies(normal: DiagonalNormal, count: int) -> DiagonalNormal:
    event = normal.mean.shape[1:]
    return DiagonalNormal(normal.mean.expand(count, *event), normal.log_std.expand(count, *event))


@pytest.fixture(params=["grey", "colour"])
def parts(
    request: pytest.FixtureRequest,
    wake: Wake,
    tiny: KppPaperConfig,
    tiny_colour: KppPaperConfig,
    draw: Draw,
):
    """A model with one episode of two images, its embedding and its memory, no gradient."""
    model = wake(tiny if request.param == "grey" else tiny_colour)
    episode = draw(model.config, 1, 2)
    with torch.no_grad():
        embedding = model.encoder(episode)
        yield model, episode, embedding, model.writer(embedding)


def test_both_divergences_match_monte_carlo(parts):
    """The closed forms against average log-ratios of the same q and p, at one fixed key."""
    model, _, embedding, maps = parts
    draws = 4000
    q_keys, q_readout = model.key_network(embedding), model.readout_posterior(embedding)
    prior = model.read_maps(maps, q_keys.mean)
    standard = DiagonalNormal.standard_like(q_keys.mean)
    for q, p in [(q_keys, standard), (q_readout, prior)]:
        many = copies(q, draws)
        value = many.sample()
        ratio = many.log_prob(value) - copies(p, draws).log_prob(value)
        error = ratio.std(0) / draws**0.5
        assert ((ratio.mean(0) - q.kl(p)[0]).abs() < 5 * error).all()
        assert (q.kl(p) > 20 * error).all()  # a test that could fail


def many_draws(model: KppPaper, episode: Tensor) -> tuple[Tensor, Tensor]:
    """4,000 importance weights and as many one-sample bounds of each image: copies in a batch."""
    weights = model.log_weights(episode.expand(400, -1, -1, -1, -1), 10).flatten(0, 1)
    return weights, model.elbo(episode.expand(4000, -1, -1, -1, -1)).elbo


def test_the_bound_is_the_average_log_weight(parts):
    """E[ln p(x, z, y | M) - ln q(z, y | X)] is E[L_T]: no term is lost, doubled or divided."""
    model, episode, _, _ = parts
    weights, bounds = many_draws(model, episode)
    error = ((weights.var(0) + bounds.var(0)) / 4000).sqrt()
    assert ((weights.mean(0) - bounds.mean(0)).abs() < 5 * error).all()
    terms = model.elbo(episode, sample=False)
    assert (terms.readout_kl > 10 * error).all() and (terms.key_kl > 10 * error).all()


def test_more_samples_tighten_the_bound(parts):
    """IWAE with k = 50 lies above the ELBO on average, and k = 1 is the ELBO."""
    model, episode, _, _ = parts
    weights, bounds = many_draws(model, episode)
    grouped = {k: weights.unflatten(0, (-1, k)) for k in (1, 5, 50)}
    iwae = {k: (w.logsumexp(1) - log(k)).mean(0) for k, w in grouped.items()}
    torch.testing.assert_close(iwae[1], weights.mean(0), rtol=1e-4, atol=1e-4)
    assert (iwae[5] > iwae[1]).all() and (iwae[50] > iwae[5]).all()
    assert (iwae[50] > bounds.mean(0)).all()


def test_a_weight_is_the_joint_over_the_posterior_of_the_same_draw(parts):
    """Condition 4: one y sample serves the prior, the weight and its own density."""
    model, episode, embedding, maps = parts
    weights = model.log_weights(episode, 3, generator=torch.Generator().manual_seed(4))
    noise = torch.Generator().manual_seed(4)
    q_keys, q_readout = model.key_network(embedding), model.readout_posterior(embedding)
    for weight in weights:
        keys, readout = q_keys.sample(noise), q_readout.sample(noise)
        joint = model.joint(episode, maps, keys, readout)
        expected = joint.total - q_keys.log_prob(keys) - q_readout.log_prob(readout)
        torch.testing.assert_close(weight, expected)


def test_each_images_joint_density_knows_nothing_of_the_others(parts):
    """Condition 1: given M, an image is scored alike alone, last or in training."""
    model, _, _, maps = parts
    config = model.config
    episode = torch.bernoulli(torch.full((1, 5, *config.image), 0.5))
    keys, readout = (
        torch.randn(1, 5, config.memory.reads, 3),
        torch.randn(1, 5, config.readout.size),
    )
    together = model.joint(episode, maps, keys, readout).total
    model.train()
    for t in (0, 3):
        alone = model.joint(episode[:, [t]], maps, keys[:, [t]], readout[:, [t]]).total
        torch.testing.assert_close(together[:, [t]], alone, rtol=1e-4, atol=1e-4)
