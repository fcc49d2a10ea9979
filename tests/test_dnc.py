"""`dnc` as its users call it, and what makes its bound valid: p sees an episode through M alone."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from kanerva.config import DncConfig, KppPaperConfig, SlotsConfig
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.rivals.dnc import KEY, STEPS, DifferentiableNeuralComputer
from kanerva.models.terms import ElboTerms
from kanerva.seeding import stream

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Draw = Callable[..., Tensor]
TERMS = ("log_likelihood", "readout_kl", "key_kl")


AsDnc = Callable[..., DncConfig]


@pytest.fixture
def as_dnc(as_model: Callable) -> AsDnc:
    def build(config: KppPaperConfig, **rows: int) -> DncConfig:
        slots = SlotsConfig(**{"count": 6, "width": 12, "heads": 2, **rows})
        return as_model(config, "dnc", rows=slots)

    return build


WOKEN: dict[DncConfig, DifferentiableNeuralComputer] = {}


def awake(config: DncConfig, draw: Draw) -> DifferentiableNeuralComputer:
    """Nothing left at its initial value, each KL worth some nats (as `wake` in conftest); one to
    keep, and a copy for each test."""
    if config not in WOKEN:
        WOKEN[config] = wake(config, draw)
    return copy.deepcopy(WOKEN[config])


def wake(config: DncConfig, draw: Draw) -> DifferentiableNeuralComputer:
    model = DifferentiableNeuralComputer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.1 if parameter.ndim < 2 else 0.3 * parameter.std()
            parameter.add_(size * torch.randn_like(parameter))
        for net in (model.key_net, model.readout_posterior.net):
            mean, log_std = net[-1].bias.chunk(2)
            mean.add_(0.7 * torch.randn_like(mean))
            log_std.sub_(1.0)
        model.train()
        for _ in range(8):
            model.elbo(draw(config, 8, 3))
    return model.eval()


@pytest.fixture
def dnc(tiny: KppPaperConfig, as_dnc: AsDnc, draw: Draw) -> DifferentiableNeuralComputer:
    return awake(as_dnc(tiny), draw)


@pytest.fixture(params=["grey", "colour"])
def any_dnc(
    request: pytest.FixtureRequest,
    tiny: KppPaperConfig,
    tiny_colour: KppPaperConfig,
    as_dnc: AsDnc,
    draw: Draw,
) -> DifferentiableNeuralComputer:
    """Grey, two heads, more slots than images; colour, one head, fewer slots than images."""
    grey = request.param == "grey"
    return awake(as_dnc(tiny) if grey else as_dnc(tiny_colour, count=3, heads=1), draw)


def assert_same_terms(ours: ElboTerms, theirs: ElboTerms) -> None:
    for name in TERMS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **CLOSE)


# One episode, or a batch


@pytest.mark.parametrize("length", [1, 4])
def test_an_episode_is_the_same_alone_and_in_a_batch(
    any_dnc: DifferentiableNeuralComputer, draw: Draw, length: int
):
    images = draw(any_dnc.config, 3, length)
    batch, alone = any_dnc.write(images), any_dnc.write(images[1])
    assert tuple(alone.map.shape) == any_dnc.memory_shape(length)
    torch.testing.assert_close(batch[1].map, alone.map, **CLOSE)
    for memory, own in ((None, None), (batch, alone)):
        terms = any_dnc.elbo(images, memory, sample=False)
        assert_same_terms(terms[1], any_dnc.elbo(images[1], own, sample=False))
    recalled = any_dnc.recall(batch, images, steps=2)
    assert recalled.shape == (2, *images.shape)
    again = any_dnc.recall(alone, images[1], steps=2)
    torch.testing.assert_close(recalled[:, 1], again, rtol=1e-3, atol=1e-3)
    pictures = any_dnc.reconstruct(images)
    torch.testing.assert_close(pictures[1], any_dnc.reconstruct(images[1]), **CLOSE)
    for one in (images[:1], images[0]):
        assert any_dnc.elbo(one, generator=stream(3)).elbo.shape == one.shape[:-3]


def test_the_memory_is_slots_and_links_and_nothing_else(
    tiny: KppPaperConfig, as_dnc: AsDnc, dnc: DifferentiableNeuralComputer, draw: Draw
):
    """(1, N, W + N): 132 numbers for each of 32 images at the default sizes."""
    assert dnc.memory_shape(4) == (1, 6, 18)
    images = draw(tiny, 2, 4)
    embedding = dnc.encoder(images)
    q_keys = dnc.key_posterior(embedding)
    codes = torch.cat([q_keys.mean, dnc.code(embedding)], dim=-1)
    state = dnc.writer(codes)
    maps = dnc.write(images).map[:, 0]
    torch.testing.assert_close(maps[..., :12], state.memory)
    torch.testing.assert_close(maps[..., 12:], state.links)
    full = DifferentiableNeuralComputer(replace(as_dnc(tiny), rows=SlotsConfig()))
    assert math.prod(full.memory_shape(32)) == 32 * 132


def test_writing_uses_every_image_and_their_order(dnc: DifferentiableNeuralComputer, draw: Draw):
    images = draw(dnc.config, 4)
    before = dnc.write(images).map
    for t in range(4):
        changed = images.clone()
        changed[t] = 1 - changed[t]
        assert not torch.allclose(dnc.write(changed).map, before, atol=1e-4)
    assert not torch.allclose(dnc.write(images.flip(0)).map, before, atol=1e-4)


def test_a_fresh_computer_writes_each_code_into_a_slot_of_its_own(
    tiny: KppPaperConfig, as_dnc: AsDnc, draw: Draw
):
    model = DifferentiableNeuralComputer(as_dnc(tiny)).train()
    embedding = model.encoder(draw(tiny, 3, 5))
    q_keys = model.key_posterior(embedding)
    codes = torch.cat([q_keys.mean, model.code(embedding)], dim=-1)
    state = model.writer(codes)
    likeness = torch.cosine_similarity(codes[:, :, None], state.memory[:, None], dim=-1)
    places = likeness.argmax(-1)
    for row in places:
        assert len(set(row.tolist())) == 5


# The bound is valid


@torch.no_grad()
def test_images_reach_p_through_the_memory_alone(dnc: DifferentiableNeuralComputer, draw: Draw):
    """Another image t, after writing: with the saved memory no term of image s moves."""
    images = draw(dnc.config, 2, 4)
    memory = dnc.write(images)
    before = dnc.elbo(images, memory, generator=stream(4))
    changed = images.clone()
    changed[:, 2] = 1 - changed[:, 2]
    after = dnc.elbo(changed, memory, generator=stream(4))
    for name in TERMS:
        ours, theirs = getattr(before, name), getattr(after, name)
        kept = [0, 1, 3]
        torch.testing.assert_close(ours[:, kept], theirs[:, kept], rtol=1e-6, atol=1e-5)
        assert not torch.allclose(ours[:, 2], theirs[:, 2], atol=1e-5)


@torch.no_grad()
def test_reading_leaves_no_trace(dnc: DifferentiableNeuralComputer, draw: Draw):
    """Given the memory, an image scores the same alone, first, last, or twice."""
    images = draw(dnc.config, 4)
    memory = dnc.write(images)
    together = dnc.elbo(images, memory, sample=False)
    for order in ([3, 2, 1, 0], [2], [1, 1, 1, 3]):
        found = dnc.elbo(images[order], memory, sample=False)
        for name in TERMS:
            torch.testing.assert_close(
                getattr(found, name), getattr(together, name)[order], **CLOSE
            )
    keys = torch.randn(1, 5, KEY)
    traces = dnc.traces(memory.map[None], keys)
    torch.testing.assert_close(dnc.traces(memory.map[None], keys.flip(1)), traces.flip(1), **CLOSE)


@torch.no_grad()
def test_one_memory_written_first_serves_the_whole_episode(
    any_dnc: DifferentiableNeuralComputer, draw: Draw
):
    images = draw(any_dnc.config, 2, 4)
    memory = any_dnc.write(images)
    own, given = (any_dnc.elbo(images, m, generator=stream(2)) for m in (None, memory))
    assert_same_terms(own, given)
    other = any_dnc.elbo(images, any_dnc.empty(2), generator=stream(2))
    torch.testing.assert_close(own.log_likelihood, other.log_likelihood)
    assert not torch.allclose(own.readout_kl, other.readout_kl)


@torch.no_grad()
def test_the_key_in_memory_is_a_mean_and_never_the_sample(
    dnc: DifferentiableNeuralComputer, draw: Draw
):
    images = draw(dnc.config, 2, 4)
    first, second = (dnc.write(images, generator=stream(s)).map for s in (1, 2))
    assert torch.equal(first, second)


@torch.no_grad()
def test_both_divergences_are_those_of_torch(dnc: DifferentiableNeuralComputer, draw: Draw):
    images = draw(dnc.config, 2, 4)
    embedding = dnc.encoder(images)
    q_keys, q_readout = dnc.key_posterior(embedding), dnc.readout_posterior(embedding)
    prior = dnc.read(dnc.write(images), q_keys.mean)
    terms = dnc.elbo(images, sample=False)
    keys = kl_divergence(Normal(q_keys.mean, q_keys.std), Normal(0.0, 1.0)).sum(-1)
    readout = kl_divergence(Normal(q_readout.mean, q_readout.std), Normal(prior.mean, prior.std))
    torch.testing.assert_close(terms.key_kl, keys, **CLOSE)
    torch.testing.assert_close(terms.readout_kl, readout.sum(-1), **CLOSE)
    assert (keys > 0.5).all() and (readout.sum(-1) > 0).all()


@torch.no_grad()
def test_the_bound_is_the_average_log_weight(dnc: DifferentiableNeuralComputer, draw: Draw):
    images = draw(dnc.config, 1, 2)
    many = images.expand(1500, -1, -1, -1, -1)
    weights = dnc.log_weights(many, 1, generator=stream(5))[0]
    bounds = dnc.elbo(many, generator=stream(6)).elbo
    spread = ((weights.var(0) + bounds.var(0)) / 1500).sqrt()
    assert ((weights.mean(0) - bounds.mean(0)).abs() < 4 * spread).all()
    assert (weights.logsumexp(0) - math.log(1500) > weights.mean(0)).all()
    batch, alone = (dnc.log_weights(x, 3, generator=stream(5)) for x in (images, images[0]))
    assert batch.shape == (3, 1, 2)
    torch.testing.assert_close(alone, batch[:, 0], **CLOSE)


# Reads


@torch.no_grad()
def test_the_second_step_can_follow_links(dnc: DifferentiableNeuralComputer, draw: Draw):
    """Links are part of what p reads, and counted: without them the reads change."""
    assert STEPS > 1
    memory, keys = dnc.write(draw(dnc.config, 2, 5)).map, torch.randn(2, 3, KEY)
    unlinked = memory.clone()
    unlinked[..., 12:] = 0
    assert dnc.traces(memory, keys).shape == (2, 3, 2, 12)
    assert not torch.allclose(dnc.traces(memory, keys), dnc.traces(unlinked, keys), atol=1e-4)


@torch.no_grad()
def test_a_sure_reader_walks_along_the_links(dnc: DifferentiableNeuralComputer):
    """Heads find by content the slot that begins with y; then one goes back, the other on."""
    slots = torch.zeros(1, 6, 12)
    slots[0, :, :6] = 3 * torch.eye(6)
    links = torch.diag(torch.ones(5), -1)[None]  # written in order 0, 1, 2, ...
    for parameter in dnc.reader.parameters():
        parameter.zero_()
    bias = dnc.reader.ask.bias.view(2, 16)
    bias[:, 12] = 100.0
    bias[0, 13:], bias[1, 13:] = torch.tensor([50.0, 0, 0]), torch.tensor([0, 0, 50.0])
    keys = torch.zeros(1, 1, KEY)
    keys[..., 2] = 1.0
    back, on = dnc.traces(torch.cat([slots, links], dim=-1)[:, None], keys)[0, 0]
    torch.testing.assert_close(back, slots[0, 1], **CLOSE)
    torch.testing.assert_close(on, slots[0, 3], **CLOSE)


def test_an_empty_memory_reads_as_nothing(dnc: DifferentiableNeuralComputer):
    assert not dnc.traces(dnc.empty(2).map, torch.randn(2, 3, KEY)).any()
    assert tuple(dnc.empty().map.shape) == dnc.memory_shape(4)


# Controls


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 4])
def test_left_out_scores_each_image_under_the_memory_of_the_others(
    any_dnc: DifferentiableNeuralComputer,
    draw: Draw,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
):
    monkeypatch.setattr("kanerva.distributions.DiagonalNormal.sample", lambda self, _g: self.mean)
    images = draw(any_dnc.config, 2, length)
    batch, alone = any_dnc.left_out(images), any_dnc.left_out(images[1])
    assert_same_terms(batch[1], alone)
    for t in range(length):
        rest = torch.cat([images[:, :t], images[:, t + 1 :]], dim=1)
        expected = any_dnc.elbo(images, any_dnc.write(rest), sample=False)
        for name in TERMS:
            ours, theirs = getattr(batch, name)[:, t], getattr(expected, name)[:, t]
            torch.testing.assert_close(ours, theirs, **CLOSE)


@torch.no_grad()
def test_permuted_reads_each_image_at_its_neighbours_key(
    dnc: DifferentiableNeuralComputer, draw: Draw, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kanerva.distributions.DiagonalNormal.sample", lambda self, _g: self.mean)
    images = draw(dnc.config, 4)
    found, own = dnc.permuted(images), dnc.elbo(images)
    embedding = dnc.encoder(images[None])
    prior = dnc.read(dnc.write(images), dnc.key_posterior(embedding).mean[0].roll(1, dims=0))
    torch.testing.assert_close(
        found.readout_kl, dnc.readout_posterior(embedding).kl(prior)[0], **CLOSE
    )
    torch.testing.assert_close(found.key_kl, own.key_kl.roll(1), **CLOSE)
    torch.testing.assert_close(found.log_likelihood, own.log_likelihood, **CLOSE)


# Generate and recall


def test_generating_draws_y_reads_draws_z_and_decodes(
    any_dnc: DifferentiableNeuralComputer, draw: Draw
):
    config = any_dnc.config
    memory = any_dnc.write(draw(config, 2, 4))
    generated = any_dnc.generate(memory, 5, generator=stream(7))
    noise = stream(7)
    keys = torch.randn(2, 5, KEY, generator=noise)
    jitter = torch.randn(2, 5, config.readout.size, generator=noise)
    prior = any_dnc.read(memory, keys)
    expected = any_dnc.likelihood.mean(any_dnc.decoder(prior.mean + prior.std * jitter))
    torch.testing.assert_close(generated, expected, **CLOSE)
    assert not generated.requires_grad
    assert any_dnc.generate(memory[1], 3).shape == (3, *config.image)


def test_spread_moves_keys_off_the_given_one(dnc: DifferentiableNeuralComputer, draw: Draw):
    memory, key = dnc.write(draw(dnc.config, 4)), torch.zeros(KEY)
    near, far, prior = (
        dnc.generate(memory, 6, near=near, generator=stream(5))
        for near in [(key, 0.0), (key, 1.0), None]
    )
    assert not torch.allclose(near, far, atol=1e-5)
    torch.testing.assert_close(far, prior)


def test_recall_infers_y_reads_and_decodes_again(any_dnc: DifferentiableNeuralComputer, draw: Draw):
    memory, cue = any_dnc.write(draw(any_dnc.config, 4)), draw(any_dnc.config, 2)
    picture = cue[None]
    for found in any_dnc.recall(memory, cue, steps=3):
        keys = any_dnc.key_posterior(any_dnc.encoder(picture)).mean
        picture = any_dnc.likelihood.mean(any_dnc.decoder(any_dnc.read(memory, keys).mean))
        torch.testing.assert_close(found, picture[0], **CLOSE)
    drawn = [any_dnc.recall(memory, cue, sample=True, generator=stream(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.allclose(drawn[0], drawn[2])


# Training


def test_training_reaches_every_parameter(any_dnc: DifferentiableNeuralComputer, draw: Draw):
    any_dnc.train()
    ElboTerms(**any_dnc(draw(any_dnc.config, 2, 4))).loss.backward()
    for name, parameter in any_dnc.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name


def test_a_few_steps_of_training_raise_the_bound(tiny: KppPaperConfig, as_dnc: AsDnc, draw: Draw):
    config = as_dnc(tiny)
    model, images = DifferentiableNeuralComputer(config), draw(config, 6, 2)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = ElboTerms(**model(images)).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 5


def test_training_takes_a_lone_image_per_episode_and_half_precision(
    tiny: KppPaperConfig, as_dnc: AsDnc, draw: Draw
):
    model = DifferentiableNeuralComputer(as_dnc(tiny)).train()
    assert model.elbo(draw(tiny, 2, 1)).loss.isfinite()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = model.elbo(draw(tiny, 2, 3))
        assert model.write(draw(tiny, 2, 3)).map.dtype == torch.float32
    assert terms.elbo.dtype == torch.float32 and terms.loss.isfinite()


# Errors


def test_a_call_that_cannot_work_is_an_error_that_gives_the_value(
    dnc: DifferentiableNeuralComputer, tiny: KppPaperConfig, as_dnc: AsDnc, draw: Draw
):
    images = draw(dnc.config, 4)
    memory = dnc.write(images)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: DifferentiableNeuralComputer(as_dnc(tiny, width=8)), "8"),
        (lambda: dnc.generate(None, 2), "dnc"),
        (lambda: dnc.generate(memory, -3), "-3"),
        (lambda: dnc.generate(memory, 2, near=(torch.zeros(3), 0.1)), "(3,)"),
        (lambda: dnc.read(memory, torch.zeros(2, 3)), "(2, 3)"),
        (lambda: dnc.recall(memory, images, steps=0), "0"),
        (lambda: dnc.elbo(images, Memory(torch.zeros(1, 6, 12))), "(1, 6, 12)"),
        (lambda: dnc.elbo(images * 0.5), "0.5"),
        (lambda: dnc.log_weights(images, 0), "0"),
        (lambda: dnc.left_out(images[:1]), "1"),
        (lambda: dnc.append(memory, images), "dnc"),
        (lambda: dnc.familiarity(memory, images), "dnc"),
        (lambda: dnc.memory_kl(images), "dnc"),
    ]
    for call, value in calls:
        with pytest.raises(UserError) as error:
            call()
        assert value in str(error.value) and "\n" not in str(error.value)
