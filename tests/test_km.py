"""The Kanerva Machine, and what it shares with the dynamic one: `any_model` is each of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from kanerva.config import AddressedMatrixConfig, KppPaperConfig, MatrixConfig, ModelConfig
from kanerva.distributions import DiagonalNormal
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models import build
from kanerva.models.rivals.km import DynamicKanervaMachine, KanervaMachine, MatrixMachine
from kanerva.models.terms import ElboTerms
from kanerva.seeding import stream

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, another batch size
ROWS = MatrixConfig(count=6, width=5, noise=0.7)
ADDRESSED = AddressedMatrixConfig(count=6, width=5, address=3, noise=0.7)
Draw = Callable[..., Tensor]
AsModel = Callable[..., ModelConfig]


def awake(config: ModelConfig, draw: Draw) -> MatrixMachine:
    """A model in evaluation mode with nothing left at its initial value, and KLs of some nats."""
    model = build(config)
    assert isinstance(model, MatrixMachine)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.1 if parameter.ndim < 2 else 0.3 * parameter.std()
            parameter.add_(size * torch.randn_like(parameter))
        if isinstance(model, KanervaMachine):
            for layer in (model.code, model.keys[-1]):
                mean, log_std = layer.bias.chunk(2)
                mean.add_(0.7 * torch.randn_like(mean))
                log_std.sub_(1.0)
        elif isinstance(model, DynamicKanervaMachine):
            model.code.weight.mul_(8)  # codes that leave a trace
        model.train()
        for _ in range(4):
            model.elbo(draw(config, 4, 4))
    return model.eval()


@pytest.fixture
def km(tiny: KppPaperConfig, as_model: AsModel, draw: Draw) -> KanervaMachine:
    model = awake(as_model(tiny, "km", rows=ADDRESSED), draw)
    assert isinstance(model, KanervaMachine)
    return model


@pytest.fixture(params=["km", "km colour", "dkm-tsm", "dkm colour"])
def any_model(
    request: pytest.FixtureRequest,
    tiny: KppPaperConfig,
    tiny_colour: KppPaperConfig,
    as_model: AsModel,
    draw: Draw,
) -> MatrixMachine:
    name, *colour = request.param.split()
    rows = ADDRESSED if name == "km" else ROWS
    tiny = tiny_colour if colour else tiny
    tiny = replace(tiny, encoder=replace(tiny.encoder, shift=0.25))  # for dkm-tsm
    return awake(as_model(tiny, name, rows=rows), draw)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw gives the mean: two ways to one number then agree without sharing noise."""
    for name in ("distributions.DiagonalNormal", "models.rivals.matrix_normal.MatrixNormal"):
        monkeypatch.setattr(f"kanerva.{name}.sample", lambda self, _g=None: self.mean)


def assert_same_terms(ours: ElboTerms, theirs: ElboTerms) -> None:
    for name in ("log_likelihood", "readout_kl", "key_kl"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **CLOSE)


# One episode, or a batch


@pytest.mark.parametrize("length", [1, 4])
def test_an_episode_is_scored_the_same_alone_and_in_a_batch(
    any_model: MatrixMachine, draw: Draw, length: int
):
    images = draw(any_model.config, 3, length)
    batch, alone = (any_model.elbo(x, sample=False) for x in (images, images[1]))
    assert batch.elbo.shape == (3, length) and alone.elbo.shape == (length,)
    assert_same_terms(batch[1], alone)
    kl, kl_alone = any_model.memory_kl(images), any_model.memory_kl(images[1])
    assert kl.shape == (3, length)
    torch.testing.assert_close(kl[1], kl_alone, **CLOSE)


def test_an_episode_is_written_and_recalled_the_same_alone_and_in_a_batch(
    any_model: MatrixMachine, draw: Draw, means: None
):
    images = draw(any_model.config, 3, 4)
    batch, alone = any_model.write(images), any_model.write(images[1])
    assert batch.is_batch and not alone.is_batch and alone.map.shape == (1, 6, 5)
    torch.testing.assert_close(batch[1].map, alone.map, **CLOSE)
    many, one = (any_model.recall(m, x, steps=3) for m, x in ((batch, images), (alone, images[1])))
    assert many.shape == (3, *images.shape)
    torch.testing.assert_close(many[:, 1], one, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        any_model.reconstruct(images)[1], any_model.reconstruct(images[1]), **CLOSE
    )


# The distribution over memories


def as_vector(mean: Tensor, covariance: Tensor) -> MultivariateNormal:
    """One matrix normal as a normal over all its numbers, in float64."""
    width = torch.eye(mean.shape[-1]).double()
    return MultivariateNormal(mean.double().flatten(), torch.kron(covariance.double(), width))


def test_the_memorys_divergence_is_that_of_normals_shared_by_its_images(
    any_model: MatrixMachine, draw: Draw
):
    images = draw(any_model.config, 2, 4)
    q, p = any_model.matrix_posterior(any_model.encoder(images)), any_model.prior(1)
    expected = [
        kl_divergence(as_vector(r, u), as_vector(p.mean[0], p.covariance[0])) / 4
        for r, u in zip(q.mean, q.covariance, strict=True)
    ]
    kl = any_model.memory_kl(images)
    assert any_model.has_memory_kl and (kl > 0.1).all()
    torch.testing.assert_close(kl.double(), torch.stack(expected)[:, None].expand(2, 4), **CLOSE)


@pytest.mark.parametrize("any_model", ["km", "dkm"], indirect=True)
def test_memories_are_drawn_from_their_posterior(any_model: MatrixMachine, draw: Draw):
    images = draw(any_model.config, 3)
    q = any_model.matrix_posterior(any_model.encoder(images[None]))
    memories = any_model.write(images.expand(4000, -1, -1, -1, -1)).map[:, 0]
    torch.testing.assert_close(memories.mean(0), q.mean[0], rtol=0.0, atol=0.1)
    for column in (0, 4):
        found = memories[:, :, column].T.cov()
        torch.testing.assert_close(found, q.covariance[0], rtol=0.0, atol=0.12)
    assert not torch.allclose(memories[:, :, 0], memories[:, :, 1], atol=0.1)


def test_one_memory_written_first_serves_the_whole_episode(any_model: MatrixMachine, draw: Draw):
    """Condition 2: `elbo` draws M as `write` does, then goes on as if that memory were given."""
    images, noise = draw(any_model.config, 2, 4), stream(2)
    memory = any_model.write(images, generator=noise)
    assert memory.map.shape == (2, 1, 6, 5)  # per episode, not per image
    given = any_model.elbo(images, memory, generator=noise)
    assert_same_terms(any_model.elbo(images, generator=stream(2)), given)


def test_memory_matters_and_an_untouched_one_is_the_priors_mean(
    any_model: MatrixMachine, draw: Draw
):
    images = draw(any_model.config, 2, 4)
    empty = any_model.empty(2)
    torch.testing.assert_close(empty.map[1, 0], any_model.prior.mean)
    torch.testing.assert_close(any_model.empty().map[0], any_model.prior.mean)
    assert not empty.map.requires_grad
    own = any_model.elbo(images, sample=False).elbo
    assert not torch.allclose(own, any_model.elbo(images, empty, sample=False).elbo, atol=1e-3)


def test_writing_uses_every_image(any_model: MatrixMachine, draw: Draw, means: None):
    images = draw(any_model.config, 4)
    before = any_model.write(images).map
    for t in range(4):
        changed = images.clone()
        changed[t] = 1 - changed[t]
        assert not torch.allclose(any_model.write(changed).map, before, atol=1e-4)


# The bound is one


def many_draws(model: MatrixMachine, images: Tensor) -> tuple[Tensor, Tensor]:
    """4,000 importance weights and as many one-sample bounds: copies of an episode in a batch."""
    with torch.no_grad():
        weights = model.log_weights(images.expand(4000, -1, -1, -1, -1), 1)[0]
        return weights, model.elbo(images.expand(4000, -1, -1, -1, -1)).elbo


@pytest.mark.parametrize("any_model", ["km", "dkm"], indirect=True)
def test_the_bound_is_the_average_log_weight(any_model: MatrixMachine, draw: Draw):
    """E[ln p(x, z, y | M) - ln q(z, y | X, M)]: no term is lost, doubled or divided by T."""
    images = draw(any_model.config, 2)
    weights, bounds = many_draws(any_model, images)
    error = ((weights.var(0) + bounds.var(0)) / 4000).sqrt()
    assert ((weights.mean(0) - bounds.mean(0)).abs() < 5 * error).all()
    terms = any_model.elbo(images, sample=False)
    assert (terms.key_kl > 8 * error).all()
    if any_model.config.name == "km":
        assert (terms.readout_kl > 8 * error).all()


def test_left_out_scores_each_image_under_the_memory_of_the_others(
    any_model: MatrixMachine, draw: Draw, means: None
):
    images = draw(any_model.config, 2, 3)
    batch, alone = any_model.left_out(images), any_model.left_out(images[1])
    assert_same_terms(batch[1], alone)
    for t in range(3):
        rest = torch.cat([images[1, :t], images[1, t + 1 :]])
        expected = any_model.elbo(images[1], any_model.write(rest))
        for name in ("log_likelihood", "readout_kl", "key_kl"):
            torch.testing.assert_close(getattr(alone, name)[t], getattr(expected, name)[t], **CLOSE)


def test_a_permuted_image_pays_for_its_neighbours_key(
    any_model: MatrixMachine, draw: Draw, means: None
):
    images = draw(any_model.config, 2, 4)
    own, permuted = any_model.elbo(images), any_model.permuted(images)
    torch.testing.assert_close(permuted.key_kl, own.key_kl.roll(1, dims=1), **CLOSE)
    assert not torch.allclose(permuted.log_likelihood, own.log_likelihood, rtol=0.0, atol=1e-4)
    assert permuted.elbo.shape == (2, 4) and any_model.permuted(images[0]).elbo.shape == (4,)


# Training


@pytest.mark.parametrize("charged", [True, False])
@pytest.mark.parametrize("any_model", ["km", "dkm"], indirect=True)
def test_what_is_trained_adds_the_memorys_share(
    any_model: MatrixMachine, draw: Draw, charged: bool
):
    images = draw(any_model.config, 2, 4)
    assert any_model.config.rows.charge  # unless told otherwise
    rows = replace(any_model.config.rows, charge=charged)
    any_model.config = replace(any_model.config, rows=rows)
    torch.manual_seed(3)
    called = any_model(images)
    torch.manual_seed(3)
    auxiliary = called.pop("auxiliary")
    assert_same_terms(ElboTerms(**called), any_model.elbo(images))
    expected = any_model.memory_kl(images).mean() if charged else torch.tensor(0.0)
    if any_model.config.name != "km":  # and that of an autoencoder
        output = any_model.decoder(any_model.codes(any_model.encoder(images)))
        expected = expected - any_model.likelihood.log_prob(output, images).mean()
    torch.testing.assert_close(auxiliary, expected, **CLOSE)


def test_training_reaches_every_parameter(any_model: MatrixMachine, draw: Draw):
    any_model.train()
    called = any_model(draw(any_model.config, 2, 4))
    auxiliary = called.pop("auxiliary")
    (ElboTerms(**called).loss + auxiliary).backward()
    for name, parameter in any_model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name


# km's own: addresses, codes, reading


def test_an_address_is_a_keys_fit_to_unit_addresses(km: KanervaMachine):
    keys = torch.randn(2, 4, 3)
    pointer = km.to_address(keys)
    for row, address in enumerate(km.table):
        expected = (pointer * address / address.norm()).sum(-1)
        torch.testing.assert_close(km.weights(keys)[..., row], expected, **CLOSE)
    with torch.no_grad():
        before = km.weights(keys)
        km.table.mul_(3)
    torch.testing.assert_close(km.weights(keys), before, **CLOSE)


def test_the_generative_side_by_hand(km: KanervaMachine, draw: Draw):
    """p(y) p(z | y, M) p(x | z) with torch.distributions, from M, y and z."""
    images, keys, readout = draw(km.config, 1, 4), torch.randn(1, 4, 3), torch.randn(1, 4, 5)
    maps = torch.randn(1, 1, 6, 5)
    joint = km.joint(images, maps, keys, readout)
    sigma = ((2 * km.prior.log_noise).exp() + 1e-3).sqrt()
    read = km.weights(keys)[0] @ maps[0, 0]
    torch.testing.assert_close(km.traces(maps, keys)[0], read, **CLOSE)
    expected = Normal(read, sigma).log_prob(readout[0]).sum(-1)
    torch.testing.assert_close(joint.readout_log_prior[0], expected, **CLOSE)
    torch.testing.assert_close(joint.key_log_prior, Normal(0, 1).log_prob(keys).sum(-1), **CLOSE)
    logits = km.decoder(readout)
    expected = torch.distributions.Bernoulli(logits=logits).log_prob(images).sum((2, 3, 4))
    torch.testing.assert_close(joint.log_likelihood, expected, **CLOSE)


def test_the_readouts_posterior_is_a_product_of_two_words(km: KanervaMachine):
    """ln N(z; top-down) + ln N(z; bottom-up) - ln q(z) is the same for every z."""
    prior, seen = (DiagonalNormal(torch.randn(1, 1, 5), torch.randn(1, 1, 5)) for _ in "ab")
    km.bottom_up = lambda _features: seen
    q = km.readout_posterior_at(torch.zeros(1, 1, 64), prior)
    constant = [
        prior.log_prob(z) + seen.log_prob(z) - q.log_prob(z) for z in torch.randn(9, 1, 1, 5)
    ]
    torch.testing.assert_close(torch.stack(constant).std(), torch.tensor(0.0), atol=1e-4, rtol=0.0)


def test_the_terms_by_hand(km: KanervaMachine, draw: Draw, means: None):
    images = draw(km.config, 2, 4)
    memory, embedding, terms = km.write(images), km.encoder(images), km.elbo(images)
    mean, log_std = km.keys(embedding).chunk(2, dim=-1)
    key_kl = kl_divergence(Normal(mean, log_std.exp()), Normal(0.0, 1.0)).sum(-1)
    torch.testing.assert_close(terms.key_kl, key_kl, **CLOSE)
    sigma = km.prior.noise_variance.sqrt()
    code, log_std = km.code(embedding).chunk(2, dim=-1)
    read, own = km.traces(memory.map, mean), log_std.exp()
    trust = sigma**2 / (sigma**2 + own**2)  # in the image's own word
    q = Normal(read + trust * (code - read), own * sigma / (own**2 + sigma**2).sqrt())
    expected = kl_divergence(q, Normal(read, sigma)).sum(-1)
    torch.testing.assert_close(terms.readout_kl, expected, **CLOSE)
    output = km.decoder(q.mean)
    torch.testing.assert_close(terms.log_likelihood, km.likelihood.log_prob(output, images))


def test_the_memory_does_not_know_which_key_is_drawn(km: KanervaMachine, draw: Draw):
    """Condition 3: written at key means, so neither the spread of q(y|x) nor its draws enter M."""
    images = draw(km.config, 4)
    embedding = km.encoder(images[None])
    before = km.write(images, generator=stream(1)).map
    expected = km.weights(km.key_posterior(embedding, before[None]).mean)
    torch.testing.assert_close(km.addresses(embedding, km.codes(embedding)), expected)
    with torch.no_grad():
        km.keys[-1].bias[3:].add_(1.0)
    torch.testing.assert_close(km.write(images, generator=stream(1)).map, before)
    seen: list[Tensor] = []
    km.decoder.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    memory = Memory(before)
    for seed in (1, 2):  # the same M, other reads
        km.elbo(images, memory, generator=stream(seed))
    assert not torch.allclose(*seen)


def test_the_order_of_an_episode_does_not_matter(km: KanervaMachine, draw: Draw, means: None):
    images, order = draw(km.config, 5), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(km.write(images).map, km.write(images[order]).map, **CLOSE)


def test_what_is_written_with_little_noise_is_read_back(
    km: KanervaMachine, draw: Draw, means: None
):
    """Two codes at two addresses: both come back; with much noise the prior stays."""
    images = draw(km.config, 2)
    embedding = km.encoder(images[None])
    keys, codes = km.key_posterior(embedding, torch.zeros(1, 1, 6, 5)).mean, km.codes(embedding)
    with torch.no_grad():
        km.table.copy_(torch.eye(6)[:, :3] + 0.1 * torch.randn(6, 3))
        km.keys[-1].weight.mul_(20)
        errors = []
        for log_noise in (-20.0, 5.0):
            km.prior.log_noise.fill_(log_noise)
            keys = km.key_posterior(embedding, torch.zeros(1, 1, 6, 5)).mean
            errors.append((km.traces(km.write(images).map[None], keys) - codes).abs().max())
    assert errors[0] < 0.1 and errors[1] > 0.5


def test_generating_reads_the_memory_at_keys_from_the_prior(km: KanervaMachine, draw: Draw):
    memory = km.write(draw(km.config, 2, 4))
    generated = km.generate(memory, 3, generator=stream(7))
    noise = stream(7)
    keys = torch.randn(2, 3, 3, generator=noise)
    jitter = torch.randn(2, 3, 5, generator=noise)
    readout = km.traces(memory.map, keys) + km.prior.noise_variance.sqrt() * jitter
    torch.testing.assert_close(generated, km.likelihood.mean(km.decoder(readout)), **CLOSE)
    key = torch.zeros(3)
    near = km.generate(memory, 3, near=(key, 1.0), generator=stream(7))
    torch.testing.assert_close(near, generated)


# Recall, errors


def test_recall_reads_again_what_it_decoded(any_model: MatrixMachine, draw: Draw):
    memory, cue = any_model.write(draw(any_model.config, 4)), draw(any_model.config, 2)
    long = any_model.recall(memory, cue, steps=4)
    torch.testing.assert_close(any_model.recall(memory, long[1], steps=2), long[2:], **CLOSE)
    maps = memory.map[None]
    keys = any_model.key_posterior(any_model.encoder(cue[None]), maps).mean
    first = any_model.likelihood.mean(any_model.decoder(any_model.traces(maps, keys)))
    torch.testing.assert_close(long[0], first[0], **CLOSE)
    drawn = [any_model.recall(memory, cue, sample=True, generator=stream(s)) for s in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.allclose(drawn[0], drawn[2])


@pytest.mark.parametrize(
    "kind, value",
    [("memory", "(3, 6, 5)"), ("steps", "0"), ("samples", "-1"), ("weights", "0"), ("key", "(9,)")]
    + [("none", "write one first"), ("grey", "0.5"), ("lone", "1"), ("append", "appended")],
)
def test_a_call_that_cannot_work_is_an_error_that_gives_the_value(
    km: KanervaMachine, draw: Draw, kind: str, value: str
):
    images = draw(km.config, 3)
    memory = km.write(images)
    calls: dict[str, Callable[[], object]] = {
        "memory": lambda: km.elbo(images, Memory(torch.zeros(3, 6, 5))),
        "steps": lambda: km.recall(memory, images, steps=0),
        "samples": lambda: km.generate(memory, -1),
        "weights": lambda: km.log_weights(images, 0),
        "key": lambda: km.generate(memory, 1, near=(torch.zeros(9), 0.1)),
        "none": lambda: km.generate(None, 1),
        "grey": lambda: km.elbo(0.5 * images),
        "lone": lambda: km.left_out(images[:1]),
        "append": lambda: km.append(memory, images),
    }
    with pytest.raises(UserError) as error:
        calls[kind]()
    assert value in str(error.value) and "\n" not in str(error.value)
