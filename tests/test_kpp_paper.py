"""Kanerva++ as its users call it: one episode or a batch, any T and K, grey or colour."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kanerva.config import KppPaperConfig
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.kpp_paper import KppPaper
from kanerva.models.terms import ElboTerms
from kanerva.seeding import derive_seed, stream

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, another batch size
Wake = Callable[[KppPaperConfig], KppPaper]
Draw = Callable[..., Tensor]


@pytest.fixture(params=["grey", "colour"])
def any_model(
    request: pytest.FixtureRequest, wake: Wake, tiny: KppPaperConfig, tiny_colour: KppPaperConfig
) -> KppPaper:
    """Grey, square, K = 2, Bernoulli; and colour, not square, K = 3, mixture."""
    return wake(tiny if request.param == "grey" else tiny_colour)


def assert_same_terms(ours: ElboTerms, theirs: ElboTerms) -> None:
    for name in ("log_likelihood", "readout_kl", "key_kl"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **CLOSE)


# One episode, or a batch


@pytest.mark.parametrize("length", [1, 4])
def test_an_episode_is_written_the_same_alone_and_in_a_batch(
    any_model: KppPaper, draw: Draw, length: int
):
    images = draw(any_model.config, 3, length)
    batch, alone = any_model.write(images), any_model.write(images[1])
    assert batch.is_batch and not alone.is_batch
    torch.testing.assert_close(batch[1].map, alone.map, **CLOSE)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("own_memory", [True, False])
def test_an_episode_is_scored_the_same_alone_and_in_a_batch(
    any_model: KppPaper, draw: Draw, length: int, own_memory: bool
):
    images = draw(any_model.config, 3, length)
    memory = None if own_memory else any_model.write(draw(any_model.config, 3, length))
    batch = any_model.elbo(images, memory, sample=False)
    alone = any_model.elbo(images[1], memory and memory[1], sample=False)
    assert batch.elbo.shape == (3, length) and alone.elbo.shape == (length,)
    assert_same_terms(batch[1], alone)


@pytest.mark.parametrize("length", [1, 4])
def test_an_episode_is_recalled_the_same_alone_and_in_a_batch(
    any_model: KppPaper, draw: Draw, length: int
):
    images = draw(any_model.config, 3, length)
    memory = any_model.write(images)
    batch = any_model.recall(memory, images, steps=3)
    alone = any_model.recall(memory[1], images[1], steps=3)
    assert batch.shape == (3, *images.shape) and alone.shape == (3, *images[1].shape)
    torch.testing.assert_close(batch[:, 1], alone, rtol=1e-3, atol=1e-3)  # rounding feeds back


def test_generating_from_a_batch_reads_each_episodes_own_memory(any_model: KppPaper, draw: Draw):
    """The box of Fig. 4, step by step for each episode, with the noise drawn again."""
    config = any_model.config
    memory = any_model.write(draw(config, 2, 4))
    generated = any_model.generate(memory, 5, generator=stream(7))
    noise = stream(7)
    keys = torch.randn(2, 5, config.memory.reads, 3, generator=noise)
    jitter = torch.randn(2, 5, config.readout.size, generator=noise)
    assert generated.shape == (2, 5, *config.image)
    for episode in range(2):
        prior = any_model.read(memory[episode], keys[episode])
        readout = prior.mean + prior.std * jitter[episode]
        expected = any_model.likelihood.mean(any_model.decoder(readout))[0]
        torch.testing.assert_close(generated[episode], expected, **CLOSE)


def test_generating_from_one_memory_gives_one_episode(any_model: KppPaper, draw: Draw):
    memory = any_model.write(draw(any_model.config, 2, 4))
    alone = any_model.generate(memory[1], 5, generator=stream(7))
    batch = any_model.generate(Memory(memory.map[1:]), 5, generator=stream(7))
    torch.testing.assert_close(alone, batch[0])


# Write


def test_writing_uses_every_image(model: KppPaper, draw: Draw):
    images = draw(model.config, 4)
    before = model.write(images).map
    for t in range(4):
        changed = images.clone()
        changed[t] = 1 - changed[t]
        assert not torch.allclose(model.write(changed).map, before, atol=1e-4)


def test_bytes_are_written_as_the_floats_they_stand_for(wake: Wake, tiny_colour: KppPaperConfig):
    model = wake(tiny_colour)
    levels = torch.randint(256, (4, *tiny_colour.image), dtype=torch.uint8)
    torch.testing.assert_close(model.write(levels).map, model.write(levels.float() / 255).map)


# Read and recall


def test_recall_is_the_loop_of_the_paper(any_model: KppPaper, draw: Draw):
    """Eq. 7: keys from the last picture, a readout at those keys, a picture from that readout."""
    memory, cue = any_model.write(draw(any_model.config, 4)), draw(any_model.config, 2)
    steps = any_model.recall(memory, cue, steps=3)
    picture = cue[None]
    for step in steps:
        keys = any_model.key_network(any_model.encoder(picture)).mean
        readout = any_model.read(memory, keys).mean
        picture = any_model.likelihood.mean(any_model.decoder(readout))
        torch.testing.assert_close(step, picture[0], **CLOSE)


def test_recalling_further_begins_the_same(model: KppPaper, draw: Draw):
    memory, cue = model.write(draw(model.config, 4)), draw(model.config, 2)
    long, short = (model.recall(memory, cue, steps=steps) for steps in (4, 2))
    torch.testing.assert_close(long[:2], short)
    torch.testing.assert_close(model.recall(memory, long[1], steps=2), long[2:])


def test_recall_draws_keys_only_when_asked(model: KppPaper, draw: Draw):
    memory, cue = model.write(draw(model.config, 4)), draw(model.config, 2)

    def recall(seed: int, sample: bool) -> Tensor:
        return model.recall(memory, cue, steps=2, sample=sample, generator=stream(seed))

    assert torch.equal(recall(0, False), recall(1, False))
    assert torch.equal(recall(0, True), recall(0, True))
    assert not torch.allclose(recall(0, True), recall(1, True))


def test_what_is_recalled_depends_on_the_memory(model: KppPaper, draw: Draw):
    cue = draw(model.config, 2)
    first, second = (model.recall(model.write(draw(model.config, 4)), cue, steps=1) for _ in "ab")
    assert not torch.allclose(first, second, atol=1e-5)


def test_recalling_and_generating_keep_no_graph(model: KppPaper, draw: Draw):
    images = draw(model.config, 4)
    memory = model.write(images)
    assert memory.map.requires_grad  # training writes
    assert not model.recall(memory, images, steps=1).requires_grad
    assert not model.generate(memory, 2).requires_grad


def test_read_gives_the_prior_of_the_bound(model: KppPaper, draw: Draw):
    images = draw(model.config, 4)
    keys = model.key_network(model.encoder(images[None])).mean
    prior = model.read(model.write(images), keys[0])
    posterior = model.readout_posterior(model.encoder(images[None]))
    expected = model.elbo(images, sample=False).readout_kl
    torch.testing.assert_close(posterior.kl(prior)[0], expected, **CLOSE)


# Generate


def test_the_same_generator_generates_the_same_images(model: KppPaper, draw: Draw):
    memory = model.write(draw(model.config, 4))
    first, again, other = (model.generate(memory, 3, generator=stream(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_without_spread_all_keys_lie_at_the_given_one(any_model: KppPaper, draw: Draw):
    """§4.1.1 at its limit: samples differ by readouts alone, all from the prior at that key."""
    config, noise = any_model.config, stream(5)
    memory, key = any_model.write(draw(config, 4)), torch.randn(config.memory.reads, 3)
    generated = any_model.generate(memory, 6, near=(key, 0.0), generator=stream(5))
    torch.randn(1, 6, config.memory.reads, 3, generator=noise)  # drawn and scaled away
    jitter = torch.randn(1, 6, config.readout.size, generator=noise)
    prior = any_model.read(memory, key[None])
    readout = prior.mean + prior.std * jitter
    expected = any_model.likelihood.mean(any_model.decoder(readout))[0]
    torch.testing.assert_close(generated, expected, **CLOSE)


def test_spread_moves_keys_off_the_given_one(model: KppPaper, draw: Draw):
    memory, key = model.write(draw(model.config, 4)), torch.zeros(2, 3)
    near, far, prior = (
        model.generate(memory, 6, near=near, generator=stream(5))
        for near in [(key, 0.0), (key, 1.0), None]
    )
    assert not torch.allclose(near, far, atol=1e-5)
    torch.testing.assert_close(far, prior)  # zero plus one times noise is the prior itself


# The bound


def test_the_bound_is_its_three_terms(any_model: KppPaper, draw: Draw):
    terms = any_model.elbo(draw(any_model.config, 2, 4))
    torch.testing.assert_close(
        terms.elbo, terms.log_likelihood - terms.readout_kl - terms.key_kl, **CLOSE
    )
    assert (terms.readout_kl > 0).all() and (terms.key_kl > 0).all()
    assert (terms.log_likelihood < 0).all()
    assert terms.elbo.isfinite().all()


def test_one_memory_written_first_serves_the_whole_episode(any_model: KppPaper, draw: Draw):
    """Condition 2: scoring under the memory that `write` gives is the same bound."""
    images = draw(any_model.config, 2, 4)
    memory = any_model.write(images)
    own, given = (any_model.elbo(images, m, generator=stream(2)) for m in (None, memory))
    assert_same_terms(own, given)


def test_another_memory_changes_the_readout_term_alone(model: KppPaper, draw: Draw):
    images = draw(model.config, 2, 4)
    zeroed = Memory(torch.zeros_like(model.write(images).map))
    own, other = (model.elbo(images, m, generator=stream(2)) for m in (None, zeroed))
    torch.testing.assert_close(own.log_likelihood, other.log_likelihood)
    torch.testing.assert_close(own.key_kl, other.key_kl)
    assert not torch.allclose(own.readout_kl, other.readout_kl)


def test_the_key_term_charges_every_head(wake: Wake, tiny: KppPaperConfig, draw: Draw):
    """Joint over the K heads, charged in full, for each image, not divided by T."""
    model = wake(replace(tiny, memory=replace(tiny.memory, reads=3)))
    images = draw(tiny, 2, 4)
    q = model.key_network(model.encoder(images))
    by_hand = torch.zeros(2, 4)
    for head in range(3):
        mean, std = q.mean[:, :, head], q.std[:, :, head]
        by_hand += (0.5 * (std**2 + mean**2 - 1) - std.log()).sum(-1)
    torch.testing.assert_close(model.elbo(images).key_kl, by_hand, **CLOSE)


def test_the_same_generator_scores_the_same_and_another_does_not(model: KppPaper, draw: Draw):
    images = draw(model.config, 2, 4)
    first, again, other = (model.elbo(images, generator=stream(s)).elbo for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other)
    means = [model.elbo(images, sample=False, generator=stream(s)).elbo for s in (1, 2)]
    assert torch.equal(*means)


def test_streams_differ_by_every_part_of_their_name():
    names = [(0,), (1,), (0, "a"), (0, "b"), (0, "a", 1), (0, "a", 2), ("0a",)]
    assert len({derive_seed(*name) for name in names}) == len(names)
    assert derive_seed(0, "binarize", 3) == derive_seed(0, "binarize", 3) < 2**63


def test_calling_the_model_gives_the_terms_by_name(model: KppPaper, draw: Draw):
    """A plain dict of tensors, which wrappers that spread a module over devices can look into."""
    images = draw(model.config, 2, 4)
    torch.manual_seed(3)
    called = model(images)
    torch.manual_seed(3)
    assert type(called) is dict
    assert_same_terms(ElboTerms(**called), model.elbo(images))


def test_training_reaches_every_parameter(any_model: KppPaper, draw: Draw):
    any_model.train()
    ElboTerms(**any_model(draw(any_model.config, 2, 4))).loss.backward()
    for name, parameter in any_model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name


def test_a_few_steps_of_training_raise_the_bound(tiny: KppPaperConfig, draw: Draw):
    model, images = KppPaper(tiny), draw(tiny, 4, 3)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = ElboTerms(**model(images)).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 5


def test_training_takes_a_lone_image_per_episode(tiny: KppPaperConfig, draw: Draw):
    assert KppPaper(tiny).train().elbo(draw(tiny, 2, 1)).loss.isfinite()


# Importance weights, and the memory that lacks an image


def test_log_weights_come_draw_by_draw_for_one_episode_or_a_batch(any_model: KppPaper, draw: Draw):
    images = draw(any_model.config, 1, 4)
    batch, alone = (any_model.log_weights(x, 3, generator=stream(2)) for x in (images, images[0]))
    assert batch.shape == (3, 1, 4) and alone.shape == (3, 4)
    torch.testing.assert_close(batch[:, 0], alone, **CLOSE)
    assert not torch.allclose(alone[0], alone[1])  # independent draws


def by_leaving_out(model: KppPaper, images: Tensor, t: int) -> ElboTerms:
    """The whole episode under the memory of all images but t; only entry t counts."""
    rest = torch.cat([images[:t], images[t + 1 :]])
    return model.elbo(images, model.write(rest), sample=False)


@pytest.mark.parametrize("length", [2, 4])
def test_left_out_scores_each_image_under_the_memory_of_the_others(
    any_model: KppPaper, draw: Draw, monkeypatch: pytest.MonkeyPatch, length: int
):
    """Posterior means in place of draws, so that both ways decode the same latents."""
    monkeypatch.setattr("kanerva.distributions.DiagonalNormal.sample", lambda self, _g: self.mean)
    images = draw(any_model.config, 2, length)
    batch, alone = any_model.left_out(images), any_model.left_out(images[1])
    assert_same_terms(batch[1], alone)
    for b in range(2):
        for t in range(length):
            expected = by_leaving_out(any_model, images[b], t)
            for name in ("log_likelihood", "readout_kl", "key_kl"):
                ours, theirs = getattr(batch, name)[b, t], getattr(expected, name)[t]
                torch.testing.assert_close(ours, theirs, **CLOSE)


def test_the_memory_that_lacks_an_image_does_not_change_with_it(
    wake: Wake, tiny: KppPaperConfig, draw: Draw
):
    """What a `left_out` bound gets for free tells nothing of the image it scores."""
    model, images = wake(tiny), draw(tiny, 4)
    written: list[Tensor] = []
    model.writer.register_forward_hook(lambda _m, _i, out: written.append(out))
    for image in (images[1], 1 - images[1]):
        model.left_out(torch.stack([images[0], image, images[2], images[3]]))
    first, second = torch.cat(written).chunk(2)
    torch.testing.assert_close(first[1], second[1])
    for t in (0, 2, 3):
        assert not torch.allclose(first[t], second[t], atol=1e-4)


# Errors


def bad(model: KppPaper, good: Tensor, kind: str) -> tuple[Callable[[], object], str]:
    """A call that cannot work, and the value its message must give."""
    memory = model.write(good)
    channels, height, width = model.config.image
    match kind:
        case "size":
            return lambda: model.write(torch.zeros(3, channels, height, width + 1)), "(3, 1, 8, 9)"
        case "channels":
            return lambda: model.elbo(torch.zeros(2, 3, 3, height, width)), "(2, 3, 3, 8, 8)"
        case "cue size":
            return lambda: model.recall(memory, torch.zeros(1, 1, 9, 9)), "(1, 1, 9, 9)"
        case "rank":
            return lambda: model.write(torch.zeros(1, 2, 3, *model.config.image)), "(1, 2, 3, 1, 8"
        case "dtype":
            return lambda: model.elbo(good.long()), "torch.int64"
        case "no images":
            return lambda: model.write(good[:0]), "none"
        case "memory size":
            return lambda: model.generate(Memory(torch.zeros(3, 16, 16)), 2), "(3, 16, 16)"
        case "memory channels":
            return lambda: model.elbo(good, Memory(torch.zeros(5, 12, 12))), "(5, 12, 12)"
        case "batch memory, one episode":
            return lambda: model.elbo(good, Memory(memory.map.expand(2, -1, -1, -1))), "2"
        case "one memory, batch of episodes":
            return lambda: model.elbo(good.expand(2, -1, -1, -1, -1), memory), "(2, 4, 1, 8, 8)"
        case "two memories, three episodes":
            cue = good.expand(3, -1, -1, -1, -1)
            return lambda: model.recall(Memory(memory.map.expand(2, -1, -1, -1)), cue), "(3, 4, 1"
        case "no steps":
            return lambda: model.recall(memory, good, steps=0), "0"
        case "negative steps":
            return lambda: model.recall(memory, good, steps=-2), "-2"
        case "negative samples":
            return lambda: model.generate(memory, -3), "-3"
        case "key of another K":
            return lambda: model.generate(memory, 2, near=(torch.zeros(4, 3), 0.1)), "(4, 3)"
        case "grey pixels":
            return lambda: model.elbo(good * 0.5), "0.5"
        case "grey pixels to weigh":
            return lambda: model.log_weights(good * 0.5, 2), "0.5"
        case "grey pixels to leave out":
            return lambda: model.left_out(good * 0.5), "0.5"
        case "no weights":
            return lambda: model.log_weights(good, 0), "0"
        case "nothing to leave out":
            return lambda: model.left_out(good[:1]), "1"
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    ["size", "channels", "cue size", "rank", "dtype", "no images", "memory size"]
    + ["memory channels", "batch memory, one episode", "one memory, batch of episodes"]
    + ["two memories, three episodes", "no steps", "negative steps", "negative samples"]
    + ["key of another K", "grey pixels", "grey pixels to weigh", "grey pixels to leave out"]
    + ["no weights", "nothing to leave out"],
)
def test_a_call_that_cannot_work_is_an_error_that_gives_the_value(
    model: KppPaper, draw: Draw, kind: str
):
    call, value = bad(model, draw(model.config, 4), kind)
    with pytest.raises(UserError) as error:
        call()
    assert value in str(error.value)
    assert "\n" not in str(error.value)


def test_grey_pixels_may_be_trained_on_but_not_scored(model: KppPaper, draw: Draw):
    grey = 0.5 * draw(model.config, 4)
    with pytest.raises(UserError, match="kanerva.prepare"):
        model.elbo(grey)
    assert model.train().elbo(grey).loss.isfinite()


def test_a_reconstruction_decodes_the_posterior_and_not_the_memory(any_model: KppPaper, draw: Draw):
    """Same as by hand, alone or in a batch, and the same whatever the writer would write."""
    images = draw(any_model.config, 3, 4)
    posterior = any_model.readout_posterior(any_model.encoder(images))
    by_hand = any_model.likelihood.mean(any_model.decoder(posterior.mean))
    torch.testing.assert_close(any_model.reconstruct(images), by_hand)
    torch.testing.assert_close(any_model.reconstruct(images[1]), by_hand[1], **CLOSE)
    with torch.no_grad():
        any_model.writer.project.weight.mul_(5)
    torch.testing.assert_close(any_model.reconstruct(images), by_hand)


def test_it_says_what_it_cannot_do(model: KppPaper, draw):
    images = draw(model.config, 3)
    memory = model.write(images)
    for call in (lambda: model.append(memory, images), lambda: model.familiarity(memory, images)):
        with pytest.raises(UserError, match="kpp-paper"):
            call()
    with pytest.raises(UserError, match="written as a whole"):
        memory.free(0)
