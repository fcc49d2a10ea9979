"""The Dynamic Kanerva Machine's own: addresses that are solved for, and what is decoded.

What it shares with `km` (writing, scores, controls, files) is in test_km.py.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence

from kanerva.config import DecoderConfig, DkmConfig, KppPaperConfig, MatrixConfig, ResNetConfig
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.rivals.km import DynamicKanervaMachine
from kanerva.models.rivals.matrix_normal import updated
from kanerva.models.terms import ElboTerms
from kanerva.seeding import stream

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Draw = Callable[..., Tensor]


@pytest.fixture(params=[0.0, 0.25])
def dkm(
    request: pytest.FixtureRequest, tiny: KppPaperConfig, as_model: Callable, draw: Draw
) -> DynamicKanervaMachine:
    """`dkm` and `dkm-tsm`, nothing at its initial value."""
    tiny = replace(tiny, encoder=replace(tiny.encoder, shift=request.param))
    rows = MatrixConfig(count=6, width=5, noise=0.7)
    config = as_model(tiny, "dkm-tsm" if request.param else "dkm", rows=rows)
    model = DynamicKanervaMachine(config)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.1 if parameter.ndim < 2 else 0.3 * parameter.std()
            parameter.add_(size * torch.randn_like(parameter))
        model.code.weight.mul_(8)  # codes that leave a trace
        model.train()
        for _ in range(8):
            model.elbo(draw(config, 4, 6))
    return model.eval()


def solved(memory: Tensor, codes: Tensor, ridge: Tensor) -> Tensor:
    """argmin |z - w M|^2 + ridge |w|^2 of one episode, by another routine, in float64."""
    rows = len(memory)
    stacked = torch.cat([memory.double().T, ridge.double().sqrt() * torch.eye(rows).double()])
    target = torch.cat([codes.double().T, torch.zeros(rows, len(codes)).double()])
    return torch.linalg.lstsq(stacked, target).solution.T.float()


# Writing


def test_each_code_is_written_where_it_fits_the_memory_so_far(
    dkm: DynamicKanervaMachine, draw: Draw
):
    """Sequentially, solve and update, by hand: q(M | X) is what is left at the end."""
    images = draw(dkm.config, 4)
    with torch.no_grad():
        embedding = dkm.encoder(images[None])
        q, codes = dkm.matrix_posterior(embedding), dkm.codes(embedding)[0]
        prior, variance = dkm.prior(1), dkm.prior.noise_variance
        mean, covariance = prior.mean, prior.covariance
        for code in codes:
            address = solved(mean[0], code[None], variance)
            mean, covariance = updated(mean, covariance, address, code[None], variance)
    torch.testing.assert_close(q.mean, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(q.covariance, covariance, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(q.mean, prior.mean, atol=0.05)


def test_with_little_noise_what_is_written_is_found(dkm: DynamicKanervaMachine, draw: Draw):
    """The mean memory gives a code back that R0 alone could not."""
    images = draw(dkm.config, 4)
    with torch.no_grad():
        dkm.prior.mean[2:].zero_()  # a prior that spans two directions of five
        dkm.prior.log_noise.fill_(-2.0)
        embedding = dkm.encoder(images[None])
        codes, maps = dkm.codes(embedding), dkm.matrix_posterior(embedding).mean[:, None]
        errors = [
            (dkm.traces(m, dkm.key_posterior(embedding, m).mean) - codes).square().mean()
            for m in (maps, dkm.prior(1).mean[:, None])
        ]
    assert errors[0] < 0.2 * errors[1]


# Reading


def test_an_image_reads_where_its_code_is_explained_best(dkm: DynamicKanervaMachine, draw: Draw):
    images = draw(dkm.config, 2, 4)
    memory = dkm.write(images)
    with torch.no_grad():
        embedding = dkm.encoder(images)
        q, codes = dkm.key_posterior(embedding, memory.map), dkm.codes(embedding)
    for b in range(2):
        expected = solved(memory.map[b, 0].detach(), codes[b], dkm.prior.noise_variance.detach())
        torch.testing.assert_close(q.mean[b], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(q.std, dkm.log_spread.exp().expand_as(q.std))


def test_the_terms_by_hand(dkm: DynamicKanervaMachine, draw: Draw):
    """w ~ q(w | x, M), KL(w), ln p(x | w M); no KL(z)."""
    images = draw(dkm.config, 2, 4)
    memory = dkm.write(images)
    terms = dkm.elbo(images, memory, generator=stream(4))
    q = dkm.key_posterior(dkm.encoder(images), memory.map)
    spread = dkm.log_spread.exp()
    expected = kl_divergence(Normal(q.mean, spread), Normal(0.0, 1.0)).sum(-1)
    torch.testing.assert_close(terms.key_kl, expected, **CLOSE)
    rows = 6
    printed = 0.5 * (q.mean.square().sum(-1) + rows * (spread**2 - 1 - (spread**2).log()))
    torch.testing.assert_close(terms.key_kl, printed, **CLOSE)
    assert torch.equal(terms.readout_kl, torch.zeros(2, 4))
    address = q.mean + spread * torch.randn(2, 4, rows, generator=stream(4))
    logits = dkm.decoder(torch.einsum("btk,bkc->btc", address, memory.map[:, 0]))
    expected = Bernoulli(logits=logits).log_prob(images).sum((2, 3, 4))
    torch.testing.assert_close(terms.log_likelihood, expected, **CLOSE)
    joint = dkm.joint(images, memory.map, address, dkm.traces(memory.map, address))
    torch.testing.assert_close(joint.log_likelihood, expected, **CLOSE)
    expected = Normal(0.0, 1.0).log_prob(address).sum(-1)
    torch.testing.assert_close(joint.total - joint.log_likelihood, expected, **CLOSE)


def test_a_weight_is_the_joint_over_the_posterior_of_the_same_draw(
    dkm: DynamicKanervaMachine, draw: Draw
):
    images, noise = draw(dkm.config, 2, 4), stream(4)
    weights = dkm.log_weights(images, 3, generator=stream(4))
    memory = dkm.write(images, generator=noise)
    q = dkm.key_posterior(dkm.encoder(images), memory.map)
    for weight in weights:  # one M, three addresses
        address = q.sample(noise)
        expected = dkm.joint(
            images, memory.map, address, dkm.traces(memory.map, address)
        ).total - q.log_prob(address)
        torch.testing.assert_close(weight, expected, **CLOSE)


def test_an_image_is_read_from_the_memory_alone(dkm: DynamicKanervaMachine, draw: Draw):
    """Condition 1: with a memory of zeros every image gets one and the same distribution."""
    images = draw(dkm.config, 2, 4)
    seen: list[Tensor] = []
    dkm.decoder.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    dkm.elbo(images, Memory(torch.zeros(2, 1, 6, 5)))
    assert torch.equal(seen[0], torch.zeros(2, 4, 5))


def test_no_draw_decides_where_an_episode_is_written(dkm: DynamicKanervaMachine, draw: Draw):
    """Condition 3: neither the draw of M nor sigma_w enters q(M | X)."""
    embedding = dkm.encoder(draw(dkm.config, 2, 4))
    before = dkm.matrix_posterior(embedding)
    with torch.no_grad():
        dkm.log_spread.add_(1.0)
    torch.manual_seed(9)
    after = dkm.matrix_posterior(embedding)
    assert torch.equal(before.mean, after.mean) and torch.equal(before.root, after.root)


# Generating, reconstructing


def test_generating_decodes_mixes_of_rows(dkm: DynamicKanervaMachine, draw: Draw):
    memory = dkm.write(draw(dkm.config, 2, 4))
    generated = dkm.generate(memory, 3, generator=stream(7))
    address = torch.randn(2, 3, 6, generator=stream(7))
    expected = dkm.likelihood.mean(dkm.decoder(address @ memory.map[:, 0]))
    torch.testing.assert_close(generated, expected, **CLOSE)
    key = torch.randn(6)
    near = dkm.generate(memory[0], 2, near=(key, 0.0))
    expected = dkm.likelihood.mean(dkm.decoder((key @ memory.map[0, 0])[None, None]))[0]
    torch.testing.assert_close(near, expected.expand(2, -1, -1, -1), **CLOSE)
    with pytest.raises(UserError, match="(6,)"):
        dkm.generate(memory, 1, near=(torch.zeros(5), 0.1))


def test_a_reconstruction_decodes_the_code_itself(dkm: DynamicKanervaMachine, draw: Draw):
    images = draw(dkm.config, 2, 4)
    expected = dkm.likelihood.mean(dkm.decoder(dkm.codes(dkm.encoder(images))))
    torch.testing.assert_close(dkm.reconstruct(images), expected)
    with torch.no_grad():
        dkm.prior.mean.zero_()
    torch.testing.assert_close(dkm.reconstruct(images), expected)


# Training on a toy


def test_a_few_steps_of_training_and_recall_cleans_a_cue():
    """Bars: the bound rises, and a noisy cue comes back closer to what was written. (After 300
    steps, over five seeds, at 0.07 or less; the cue's own error is 0.1.)"""
    config = DkmConfig(
        image=(1, 8, 8),
        encoder=ResNetConfig(width=8),
        rows=MatrixConfig(count=8, width=16),
        decoder=DecoderConfig(base=16, layers=2),
    )
    model = DynamicKanervaMachine(config)

    def bars(episodes: int) -> Tensor:
        where = torch.randint(8, (episodes, 4))
        rows = torch.nn.functional.one_hot(where, 8).float()[..., None].expand(-1, -1, -1, 8)
        flip = torch.rand(episodes, 4, 1, 1) < 0.5
        return torch.where(flip, rows, rows.mT)[:, :, None]

    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(300):
        optimiser.zero_grad()
        outputs = model(bars(8))
        auxiliary = outputs.pop("auxiliary")
        terms = ElboTerms(**outputs)
        (terms.loss + auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        losses.append(terms.loss.item())
    assert sum(losses[-10:]) / 10 < 0.75 * losses[0]
    model.eval()
    images = bars(16)
    noisy = (images + (torch.rand_like(images) < 0.1)).remainder(2)
    recalled = model.recall(model.write(images), noisy, steps=3)
    error = (recalled - images).square().mean(dim=(1, 2, 3, 4, 5))
    assert (error < (noisy - images).square().mean()).all()
