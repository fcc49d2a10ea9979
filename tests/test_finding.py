"""`find`: what was written is found from a damaged piece, what was not is none of it."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import kanerva
from kanerva.config import (
    KppConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
)
from kanerva.errors import UserError
from kanerva.memory.evidence import Cue
from kanerva.models import finding
from kanerva.models.content import decode_held
from kanerva.models.finding import as_cues
from kanerva.models.kpp import Kpp
from kanerva.models.kpp_paper import KppPaper
from kanerva.models.loading import load
from test_kin import SMALL, every_image, make


@pytest.fixture(scope="module")
def digits() -> Kpp:
    model = load("glyphs-1").requires_grad_(False)
    assert isinstance(model, Kpp)
    return model


@pytest.fixture(scope="module")
def glyphs() -> torch.Tensor:
    from kanerva import data

    pixels = data.load("glyphs", "test").images[:40]
    return data.to_float(data.binarize(pixels, "threshold"), True)


def tiny_model(**changes) -> Kpp:
    config = KppConfig(
        image=(1, 8, 8),
        encoder=KppEncoderConfig(width=8, depth=1),
        memory=KppMemoryConfig(size=12, capacity=12, noise=0.0, unwritten=0.0),
        readout=KppReadoutConfig(size=4, channels=2, prior_width=8),
        decoder=KppDecoderConfig(base=16, depth=1),
        **changes,
    )
    return Kpp(config).eval().requires_grad_(False)


def test_half_an_image_finds_the_whole(digits: Kpp, glyphs: torch.Tensor):
    memory = digits.write(glyphs[:20]).free(3)
    seen = torch.zeros(glyphs.shape[-2:])
    seen[: len(seen) // 2] = 1
    told = digits.find(memory, glyphs[:20] * seen, observed=seen)
    untold = digits.find(memory, glyphs[:20] * seen)
    for n in range(20):
        if n == 3:
            assert told[n].none > 0.9
        else:
            assert told[n][0].id == untold[n][0].id == n
            assert told[n][0].probability > 0.9
            assert (told[n][0].image - glyphs[n]).abs().mean() < 0.02


def test_what_was_not_written_is_none_of_what_was(digits: Kpp, glyphs: torch.Tensor):
    hits = digits.find(digits.write(glyphs[:20]), glyphs)
    assert max(one.none for one in hits[:20]) < 0.01
    assert min(one.none for one in hits[20:]) > 0.9


def test_a_cue_of_which_nothing_is_visible_leaves_the_prior(digits: Kpp, glyphs: torch.Tensor):
    memory, nothing = digits.write(glyphs[:8]), torch.zeros(glyphs.shape[-2:])
    for shifts in (0, 1):
        hits = digits.find(memory, glyphs[3], observed=nothing, shifts=shifts, k=8, prior_none=0.2)
        assert hits.none == pytest.approx(0.2, abs=1e-4)
        assert hits.probabilities == pytest.approx([0.1] * 8, abs=1e-4)


def test_one_cue_is_as_one_of_many(digits: Kpp, glyphs: torch.Tensor):
    memory = digits.write(glyphs[:20])
    many, one = digits.find(memory, glyphs[5:7], k=2), digits.find(memory, glyphs[6], k=2)
    assert many[1].ids == one.ids
    assert many[1].probabilities == pytest.approx(one.probabilities)
    assert digits.find(digits.empty(), glyphs[0]).none == 1.0


def test_blocks_are_decoded_once(digits: Kpp, glyphs: torch.Tensor, monkeypatch):
    memory, calls = digits.write(glyphs[:5]), []
    decode = digits.decoder.forward
    monkeypatch.setattr(
        digits.decoder, "forward", lambda *args: calls.append(len(args[0][0])) or decode(*args)
    )
    digits.recall(memory, glyphs[:1], steps=4)
    assert calls == [5]
    digits.familiarity(memory, glyphs[:1])
    assert calls.count(5) == 1


def test_memories_made_from_one_another_decode_what_is_new(
    digits: Kpp, glyphs: torch.Tensor, monkeypatch
):
    memory, calls = digits.write(glyphs[:5]), []
    decode = digits.decoder.forward
    monkeypatch.setattr(
        digits.decoder, "forward", lambda *args: calls.append(len(args[0][0])) or decode(*args)
    )
    digits.get(memory)
    more = digits.append(memory, glyphs[5:7])
    less = more.free(1)
    for one, expected in ((more, [0, 1, 2, 3, 4, 5, 6]), (less, [0, 2, 3, 4, 5, 6])):
        anew = digits.likelihood.mean(decode(digits.read(one, handles=expected).mean))[0]
        torch.testing.assert_close(digits.get(one), anew, rtol=1e-4, atol=1e-5)
    assert calls == [5, 2]
    digits.get(digits.append(less.free(0), glyphs[:1]))  # a cell taken again, or another
    assert calls == [5, 2, 1]


def test_what_is_kept_follows_memory_and_weights():
    model = tiny_model()
    memory = model.write(torch.bernoulli(torch.full((3, 1, 8, 8), 0.4)))
    memory = replace(memory, writer=None)  # or other weights refuse it
    first = decode_held(model, memory)[1].clone()
    assert torch.equal(decode_held(model, memory)[1], first)
    for weight in model.decoder.parameters():
        weight.data.mul_(1.5)
        weight.add_(0.1)
    second = decode_held(model, memory)[1].clone()
    assert not torch.allclose(second, first)
    memory.map.mul_(2)
    assert not torch.allclose(decode_held(model, memory)[1], second)
    assert not torch.allclose(decode_held(tiny_model(), memory)[1], second)


@pytest.mark.parametrize("how", ["assign", "part", "new", "data", "vector"])
def test_weights_that_are_replaced_are_other_weights(how: str):
    model, other = tiny_model(), tiny_model()
    images = torch.bernoulli(torch.full((3, 1, 8, 8), 0.4))
    memory, before = model.write(images), model.fingerprint()
    if how == "assign":
        model.load_state_dict(other.state_dict(), assign=True)
    elif how == "part":
        model.decoder.load_state_dict(other.decoder.state_dict(), assign=True)
    elif how == "new":
        model.decoder.from_maps.weight = other.decoder.from_maps.weight
    elif how == "data":
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.data = new.data.clone()
    else:
        numbers = parameters_to_vector(other.parameters()).detach()
        vector_to_parameters(numbers, model.parameters())
    assert model.fingerprint() != before
    with pytest.raises(UserError, match="other weights"):
        model.get(memory)


def test_a_copy_that_shares_weights_notices_that_they_are_replaced():
    model, other = make(SMALL), make(SMALL)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    copied = model.within(40)
    memory, before = copied.write(every_image()[:2]), copied.fingerprint()
    model.load_state_dict(other.state_dict(), assign=True)
    assert copied.fingerprint() == model.fingerprint() != before
    with pytest.raises(UserError, match="other weights"):
        copied.get(memory)


def test_none_is_the_density_of_an_empty_cell(monkeypatch):
    """Both estimates tend to ln p(visible pixels | empty cell): here against plain Monte Carlo."""
    torch.manual_seed(3)
    model = tiny_model()
    seen = torch.zeros(8, 8, dtype=torch.bool)
    seen[:4] = True
    picture = torch.bernoulli(torch.full((1, 8, 8), 0.5))
    cue = Cue.of(picture, seen, "none", 0, True)
    empty = torch.zeros(1, 4000, *model.writer.shape)
    drawn = model.decoder(model.readout(empty).readout)
    each = model.likelihood.log_prob(
        drawn, picture.expand(1, 4000, 1, 8, 8), seen.float().expand(1, 4000, 8, 8)
    )
    truth = float(each.logsumexp(1) - math.log(4000))
    monkeypatch.setattr(finding, "ENCODED", 2000)
    assert finding.log_none(model, [cue], picture[None])[0] == pytest.approx(truth, abs=0.3)
    monkeypatch.setattr(finding, "GENERIC", 2)
    other = tiny_model()
    other.load_state_dict(model.state_dict())
    assert finding.log_none(other, [cue], picture[None])[0] == pytest.approx(truth, abs=0.3)


def test_eight_bit_models_find_too():
    model = tiny_model(likelihood="logistic_mixture")
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    memory = model.write(images)
    pictures = model.find(memory, images[0], k=4).images
    hits = model.find(memory, pictures[2], k=4)
    assert sum(hits.probabilities) + hits.none == pytest.approx(1.0)
    dark = (images[:1] > 127).to(torch.uint8)  # bytes that are 0 or 1 are nearly black
    alone, beside = (
        as_cues(model, cues, None, None, 0)[0] for cues in (dark, torch.cat([dark, images]))
    )
    assert torch.equal(alone.picture, beside.picture) and float(alone.picture.max()) < 0.01


def test_mistakes_are_named(digits: Kpp, glyphs: torch.Tensor):
    memory, cue = digits.write(glyphs[:3]), glyphs[0]
    with pytest.raises(UserError, match="a cue is"):
        digits.find(memory, cue[:, 1:])
    with pytest.raises(UserError, match="finite"):
        digits.find(memory, cue / 0)
    with pytest.raises(UserError, match="observed is"):
        digits.find(memory, cue, observed=torch.ones(3, 3))
    with pytest.raises(UserError, match="batch of memories"):
        digits.find(kanerva.Memory.stack([memory]), cue)


def test_a_memory_written_as_a_whole_cannot_be_searched(model: KppPaper):
    with pytest.raises(UserError, match="none can be picked out"):
        model.find(model.empty(), torch.zeros(1, 8, 8))
