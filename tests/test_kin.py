"""What is said of images that are not held: a distribution, of the memory alone, fairly charged."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributions as D
from torch import Tensor

from kanerva import Memory
from kanerva.errors import UserError
from kanerva.memory.fixed_point import BIT
from kanerva.memory.kin import NEW, UNLIKE, key_costs, new_costs, waves
from kanerva.models import kpp_bits
from kanerva.models.kpp_bits import KppBits
from kanerva.models.reads_kin import Kin
from test_bits import CONFIG, shaken, twin_of

SMALL = replace(CONFIG, image=(1, 3, 3))  # small enough to count all images


def make(config=CONFIG) -> KppBits:
    """A model whose reader of kin says something, and whose q is not p."""
    torch.manual_seed(5)
    return shaken(config, pixel_code=0.4, kin=0.1, readout=0.05)


@pytest.fixture
def model() -> KppBits:
    return make()


@pytest.fixture
def images() -> Tensor:
    return torch.bernoulli(torch.full((6, 1, 10, 7), 0.3), generator=seeded(6))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gist_bits(memory: Memory, handle: int) -> float:
    assert memory.detail is not None
    return float(memory.detail.gist_costs[memory.slot_of(handle)].sum()) / BIT


def every_image() -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=9))).view(-1, 1, 3, 3)


@torch.no_grad()
def test_all_images_under_all_keys_add_up_to_one_and_no_bound_says_more():
    """Whole blocks, part of their pixels, part of a gist, nothing but an occupied cell."""
    model, every = make(SMALL), every_image()
    memory = model.write(every[[3, 77, 130, 200, 300, 511]]).free(2)
    memory = memory.shrink(int(gist_bits(memory, 1)) + 5, 1)
    memory = memory.shrink(int(gist_bits(memory, 3) / 2), 3).shrink(0, 4).as_batch()
    stored = memory.detail.stored[0, memory.cells[0]].tolist() if memory.detail else []
    assert stored[0] == 9 and 0 < stored[1] < 9 and stored[2:4] == [0, 0]
    keys = [
        model._terms_at(memory, torch.full((1, len(every)), int(cell)), every[None])
        for cell in memory.cells[0]
    ]
    keys.append(model._terms_new(memory, every[None]))
    joint = torch.stack([terms.elbo[0] for terms in keys])
    assert float(joint.logsumexp(dim=(0, 1)).exp()) == pytest.approx(1, abs=1e-9)
    assert bool((model.elbo(every, memory[0]).elbo <= joint.logsumexp(dim=0) + 1e-9).all())
    apart = keys[-1].log_likelihood - model.elbo(every[None], model.empty(1)).log_likelihood
    assert float(apart.abs().max()) > 0.1  # the kin do say something


@torch.no_grad()
def test_the_bound_of_independent_pixels_is_its_formula_and_below_the_likelihood():
    model, every = make(SMALL), every_image()
    images, memory = every[[5, 100, 341]], model.write(every[[7, 101]])
    new = NEW / (NEW + 2)  # two images are written
    cases = [(None, new * UNLIKE), (model._read_kin(memory.as_batch()), new * (1 - UNLIKE))]
    check_independent_terms(model, memory, images, cases)


def check_independent_terms(
    model: KppBits, memory: Memory, images: Tensor, cases: list[tuple[Tensor | None, float]]
) -> None:
    """`cases`: what a new image is expected to look like, and its probability. q, p and their
    divergence by `torch.distributions`; ln p(x | M, new) by sums over many z."""
    nothing = torch.zeros(1, 1, *model.writer.shape)
    draws, total = 4000, []
    for kin, share in cases:
        beside = None if kin is None else model._split_kin(kin[:, None])[1]
        wide = None if beside is None else beside.expand(-1, draws, -1, -1, -1)
        traces = nothing.expand(-1, draws, -1, -1, -1)
        reading = model.readout(traces, beside=wide, generator=seeded(0))
        logits = model.decoder(reading.readout)[0, :, None]  # (draws, 1, 1, 3, 3)
        score = D.Bernoulli(logits=logits).log_prob(images).sum(dim=(2, 3, 4))
        total.append(score.logsumexp(dim=0) - math.log(draws) + math.log(share))
    likelihood = torch.stack(total).logsumexp(dim=0)
    found = [model.independent_terms(images, memory, generator=seeded(seed)) for seed in range(64)]
    bound = torch.stack([terms.elbo for terms in found]).mean(dim=0)
    assert bool((bound < likelihood + 0.05).all()) and bool((bound > likelihood - 9).all())
    noise = seeded(3)
    terms = model.independent_terms(images, memory, generator=noise)
    noise.manual_seed(3)
    costs = []
    for kin, share in cases:
        beside = None if kin is None else model._split_kin(kin[:, None])[1]
        wide = None if beside is None else beside.expand(-1, len(images), -1, -1, -1)
        traces = nothing.expand(-1, len(images), -1, -1, -1)
        features = model.encoder(images[None])
        middle = model.readout(traces, features, beside=wide, sample=False)
        drawn = model.readout(traces, features, beside=wide, generator=noise)
        nll = []
        for reading in (middle, drawn):
            pairs = zip(reading.sources, reading.priors, strict=True)
            kl = sum(
                D.kl_divergence(D.Normal(q.mean, q.std), D.Normal(p.mean, p.std)).flatten(2).sum(-1)
                for q, p in pairs
            )
            score = D.Bernoulli(logits=model.decoder(reading.readout)).log_prob(images[None])
            nll.append(kl - score.sum(dim=(2, 3, 4)) - math.log(share))
        costs.append(torch.cat(nll))  # at means, then drawn
    q = (-torch.stack([pair[0] for pair in costs])).softmax(dim=0)  # by the costs at means
    drawn = torch.stack([pair[1] for pair in costs])
    expected = (q * (drawn + q.log())).sum(dim=0)
    assert torch.allclose(terms.nll_nats, expected, atol=1e-4)
    assert bool((q > 0.01).any()) and bool((q < 0.99).any())


@torch.no_grad()
def test_an_empty_memory_is_the_twin_that_never_had_one(model: KppBits, images: Tensor):
    twin = twin_of(model)
    empty = [model.empty(), model.write(images).free(*range(6))]
    for memory in empty:
        assert torch.equal(model.elbo(images, memory).nll_nats, twin.elbo(images).nll_nats)
        ours = model.independent_terms(images, memory, generator=seeded(1))
        theirs = twin.independent_terms(images, generator=seeded(1))
        assert torch.equal(ours.nll_nats, theirs.nll_nats)
    assert torch.equal(
        model.generate(empty[0], 3, sample_pixels=True, generator=seeded(2)),
        twin.generate(None, 3, sample_pixels=True, generator=seeded(2)),
    )


@torch.no_grad()
def test_the_decoder_sees_what_a_memory_tells_and_zeros_tell_it_nothing(
    model: KppBits, images: Tensor
):
    blocks = torch.zeros(1, 6, *model.writer.shape)
    told = model.ask_kin(blocks, model.encoder(images[None]), *torch.ones(2, 1, 6).bool())
    told = model._split_kin(told[:, None].expand(-1, 6, -1, -1, -1))[1]
    with_kin, nothing, zeros = (
        model.readout(blocks, beside=beside, sample=False)
        for beside in (told, None, torch.zeros_like(told))
    )
    assert torch.equal(model.decoder(zeros.readout), model.decoder(nothing.readout))
    z = torch.cat([value.flatten(2) for value in with_kin.values], dim=-1)
    assert not torch.allclose(model.decoder(with_kin.readout), model.decoder(z), atol=1e-3)
    again = model.readout(blocks, beside=told, readout=with_kin.readout)
    assert torch.equal(again.readout, with_kin.readout)


def test_the_costs_of_being_new_add_up():
    held = torch.tensor([0, 1, 40])
    new = key_costs(held, torch.zeros(3, 1, dtype=torch.bool))
    both = [(-new_costs(held, like)).exp() for like in (True, False)]
    assert torch.allclose(both[0] + both[1], (-new).exp())
    assert float(both[0][0]) == 0 and float(both[1][0]) == 1


@torch.no_grad()
def test_what_is_scored_has_no_say_in_what_is_read(
    model: KppBits, images: Tensor, monkeypatch: pytest.MonkeyPatch
):
    """Change x, hold M: what the memory tells does not move. Left out, an image tells the others
    of itself and hears nothing of itself."""
    memory, asked = model.write(images[:4]), []
    ask, beside = model.ask_kin, model.terms_beside

    def listen(kin: Kin, *rest: Tensor):
        asked.append(kin.maps)
        return beside(kin, *rest)

    monkeypatch.setattr(model, "terms_beside", listen)
    model.elbo(images[4:], memory)
    model.elbo(1 - images[4:], memory)
    assert torch.equal(asked[0], asked[1])
    changed = images.clone()
    changed[2] = 1 - changed[2]
    monkeypatch.setattr(model, "ask_kin", ask)
    model.left_out(images)
    model.left_out(changed)
    same = (asked[2] - asked[3]).flatten(1).abs().amax(dim=1) < 1e-5
    assert same.tolist() == [False, False, True, False, False, False]


@torch.no_grad()
def test_pixels_of_a_block_that_holds_a_part_of_them_are_not_read(model: KppBits, images: Tensor):
    """Nor what lies in cells that are free."""
    memory = model.write(images)
    memory = memory.shrink(int(gist_bits(memory, 1)) + 20, 1).free(5)
    assert memory.detail is not None
    cells = [memory.slot_of(handle) for handle in range(5)]
    assert 0 < int(memory.detail.stored[cells[1]]) < 70
    gone = int((memory.require_slots() < 0).nonzero()[0])
    before = model._read_kin(memory.as_batch())
    for cell, matters in ((cells[0], True), (cells[1], False), (gone, False)):
        pixels = memory.detail.pixels.clone()
        pixels[cell] = 1 - pixels[cell]
        other = replace(memory, detail=replace(memory.detail, pixels=pixels))
        again = model._read_kin(other.as_batch())
        assert torch.allclose(before, again, atol=1e-5) is not matters


@torch.no_grad()
def test_memories_of_a_batch_that_hold_different_numbers_are_read_as_if_alone(
    model: KppBits, images: Tensor
):
    full = model.write(images)
    single = [full, full.free(0, 3, 4), full.shrink(60, 2), full.free(*range(6)), full.free(1)]
    batch, new = Memory.stack(single), images.flip(-1)
    terms = model.elbo(new.expand(len(single), -1, -1, -1, -1), batch)
    for row, memory in enumerate(single):
        alone = model.elbo(new, memory)
        assert torch.allclose(terms[row].nll_nats, alone.nll_nats, atol=1e-4)
        assert torch.allclose(terms[row].key_kl, alone.key_kl)


@torch.no_grad()
def test_a_file_tells_of_new_images_what_the_memory_did(
    model: KppBits, images: Tensor, tmp_path: Path
):
    memory = model.write(images[:5]).free(1).shrink(70, 0, 3)
    memory.save(tmp_path / "memory.bin")
    again = Memory.load(tmp_path / "memory.bin", model)
    assert torch.allclose(
        model._read_kin(memory.as_batch()), model._read_kin(again.as_batch()), atol=1e-5
    )


@torch.no_grad()
def test_a_memory_larger_than_what_is_read_is_charged_for_all_it_holds(model: KppBits):
    large = model.with_capacity(NEW + 4)
    assert isinstance(large, KppBits)
    images = torch.bernoulli(torch.full((NEW + 4, 1, 10, 7), 0.3))
    memory = large.write(images)
    held = large.elbo(images, memory, handles=memory.handles)
    assert float(held.key_kl[0]) == pytest.approx(math.log(2 * (NEW + 4)))
    left = large.left_out(images[None])[0]
    shorter = large._terms_new(large.write(images[:-1]).as_batch(), images[None, -1:])
    assert torch.allclose(left.nll_nats[-1:], shorter.nll_nats[0], atol=1e-4)


@torch.no_grad()
def test_samples_near_a_handle_are_those_of_a_memory_of_that_image_alone(
    model: KppBits, images: Tensor
):
    memory = model.write(images).free(0)
    alone = memory.free(1, 2, 4, 5)
    for how in ({}, {"sample_pixels": True}):
        near = model.generate(memory, 4, near=3, generator=seeded(1), **how)
        for same in (torch.tensor(3), np.int64(3), [3]):
            again = model.generate(memory, 4, near=same, generator=seeded(1), **how)  # pyright: ignore
            assert torch.equal(again, near)
        assert torch.allclose(near, model.generate(alone, 4, generator=seeded(1), **how), atol=1e-5)
    assert not torch.allclose(near, model.generate(memory, 4, near=5, generator=seeded(1)))
    both = model.generate(Memory.stack([memory, alone]), 4, near=3, generator=seeded(1))
    assert both.shape == (2, 4, *images.shape[1:])
    with pytest.raises(UserError, match="0"):
        model.generate(memory, 4, near=0)


def test_training_writes_any_number_of_images_alike(model: KppBits):
    """As many as `unwritten` leaves; of a single image none, so that there is one to predict."""
    written = model._choose_written(7000, 8, seeded(0))
    counts = written.sum(dim=1).bincount(minlength=9)
    assert counts[0] == 0 and counts[8] == 0
    assert bool(((counts[1:8] - 1000).abs() < 200).all())
    assert torch.equal(written, written.cummin(dim=1).values.bool())  # a prefix
    assert not model._choose_written(5, 1, seeded(0)).any()


@torch.no_grad()
def test_in_training_no_image_is_predicted_from_itself(model: KppBits, images: Tensor):
    """Change image t: what is said of t does not move. An image of another fold that is predicted
    from t hears of it, and so does one that is not written."""
    episode = torch.cat([images, images.flip(-1)])[None]
    written = torch.arange(12)[None] < 9
    asks = torch.arange(12)[None] != 7
    features, nothing = model.encoder(episode), torch.zeros(1, 12, *model.writer.shape)

    def ask(features: Tensor) -> Tensor:
        every = torch.ones_like(written)
        return model._ask_in_folds(nothing, features, every, written, asks)[0]

    before = ask(features)
    for t in (1, 8, 10):
        other = features.clone()
        other[:, t] += 1
        moved = (ask(other) - before).flatten(1).abs().amax(dim=1) > 1e-4
        hears = [s < 9 and t < 9 and s % kpp_bits._FOLDS != t % kpp_bits._FOLDS for s in range(12)]
        hears[9:] = [t < 9] * 3
        assert moved.tolist() == [h and s != 7 for s, h in enumerate(hears)]
    assert not before[7].any() and bool(before[8].any())


@torch.no_grad()
def test_memories_of_the_same_blocks_are_read_together_as_apart(model: KppBits, images: Tensor):
    episodes = torch.stack([images, 1 - images])
    features, blocks = model.encoder(episodes), model.quick_blocks(model.encoder(episodes))
    whole = torch.rand(2, 6, generator=seeded(1)) < 0.5
    held = torch.rand(6, 6, generator=seeded(2)) < 0.6  # three memories of each episode
    together = model.ask_kin(blocks, features, whole, held)
    for row, memory in enumerate(held):
        apart = [part[row // 3, None] for part in (blocks, features, whole)]
        apart = model.ask_kin(*apart, memory[None])  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(together[row, None], apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


@pytest.mark.parametrize("role", ["known", "alone", "asks"])
def test_in_training_an_image_is_given_its_gist_or_nothing_or_its_kin(
    model: KppBits, images: Tensor, role: str, monkeypatch: pytest.MonkeyPatch
):
    given, read = [], model.readout.forward

    def watch(*traces: Tensor, **rest):
        given.append((*traces, rest.get("beside")))
        return read(*traces, **rest)

    monkeypatch.setattr(model.readout, "forward", watch)
    coded, nats = [], model.pixel_code.mean_nats
    monkeypatch.setattr(model.pixel_code, "mean_nats", lambda *x: (coded.append(x), nats(*x))[1])
    monkeypatch.setattr(kpp_bits, "_KNOWN", float(role == "known"))
    monkeypatch.setattr(kpp_bits, "_ALONE", float(role == "alone"))
    model(images.expand(5, -1, -1, -1, -1), seeded(0))
    (own, _, kin), (blocks, _) = given  # the bound's, the sketch's of those that may be written
    gist = own[:, : blocks.shape[1]]
    assert torch.equal(gist, blocks if role == "known" else torch.zeros_like(blocks))
    written = blocks.flatten(2).any(dim=-1)
    told = kin.flatten(2).any(dim=-1)[:, : written.shape[1]]
    alone = written.sum(dim=1) == 1  # a single written image has no other to be predicted from
    expected = {"known": ~written, "alone": torch.zeros_like(written)}
    assert torch.equal(told, expected.get(role, ~(written & alone[:, None])))
    gists, _, beside = coded[0]  # the pixel code's: a gist or kin, never both
    assert not bool((gists.any(dim=-1) & beside.flatten(2).any(dim=-1)).any())


@pytest.mark.parametrize("blurred", [False, True])
def test_in_training_gists_are_rounded_or_blurred(
    model: KppBits, images: Tensor, blurred: bool, monkeypatch: pytest.MonkeyPatch
):
    coded, nats = [], model.pixel_code.mean_nats
    monkeypatch.setattr(model.pixel_code, "mean_nats", lambda *x: (coded.append(x), nats(*x))[1])
    monkeypatch.setattr(kpp_bits, "_BLURRED", float(blurred))
    model(images.expand(5, -1, -1, -1, -1), seeded(0))
    assert torch.equal(coded[0][0], coded[0][0].round()) is not blurred


def test_in_training_a_shortened_gist_is_not_read_as_an_image(
    model: KppBits, images: Tensor, monkeypatch: pytest.MonkeyPatch
):
    """A block whose gist is cut stores no pixels."""
    seen, ask = [], model.ask_kin
    monkeypatch.setattr(model, "ask_kin", lambda *x: (seen.append(x[2]), ask(*x))[1])
    for short in (0.0, 1.0):
        monkeypatch.setattr(kpp_bits, "_SHORT", short)
        monkeypatch.setattr(kpp_bits, "_WHOLE", 1.0)
        model(images.expand(5, -1, -1, -1, -1), seeded(0))
    assert bool(seen[0].any()) and not bool(seen[1].any())


def test_places_start_as_waves_that_tell_them_apart():
    """Every place is most like itself, and more like its neighbours than like those beyond."""
    found = waves((5, 7), 128)
    alike = (found @ found.T).view(5, 7, 5, 7)
    for row, column in ((0, 0), (2, 3), (4, 6)):
        near = alike[row, column]
        assert int(near.argmax()) == 7 * row + column
        assert bool((near.flatten().topk(2).values.diff() < -1).all())
        away = (torch.arange(7) - column).abs()
        assert float(near[row, away == 1].min()) > float(near[row, away > 1].max())
