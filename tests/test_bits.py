"""Blocks that are bits: exact networks, prices, codes, files, and the bound they give."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kanerva import Memory
from kanerva.config import (
    BitsMemoryConfig,
    CodeConfig,
    GridConfig,
    KppBitsConfig,
    KppBitsEmptyConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppReadoutConfig,
    PixelCodeConfig,
)
from kanerva.errors import UserError
from kanerva.inputs import as_count
from kanerva.memory import coder, pixel_code, refine
from kanerva.memory.container import SIZE, Container
from kanerva.memory.detail import ALL, MISMATCH
from kanerva.memory.fixed_point import BIT, TOTAL, FixedLinear, activate, cost_table, is_exact
from kanerva.memory.gist import ALPHABET, LARGEST, GistPrior, quantise_gist
from kanerva.memory.kin import NEW, UNLIKE, key_costs
from kanerva.memory.pixel_code import PixelCode
from kanerva.models import kpp_bits
from kanerva.models.kpp_bits import KppBits
from kanerva.models.kpp_bits_empty import KppBitsEmpty

CONFIG = KppBitsConfig(
    image=(1, 10, 7),
    encoder=KppEncoderConfig(width=8, depth=1),
    memory=BitsMemoryConfig(channels=2, size=12, capacity=9),
    readout=KppReadoutConfig(size=4, channels=2, prior_width=8),
    decoder=KppDecoderConfig(base=8, depth=1),
    code=CodeConfig(groups=4, radius=2, width=12, depth=1, maps=8),
)


def shake(module: torch.nn.Module, by: float) -> None:
    """Away from where weights start, so that nothing is zero by chance of initialisation."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += by * torch.randn_like(parameter)


def shaken(config: KppBitsConfig = CONFIG, **parts: float) -> KppBits:
    """A model whose parts are moved so far from where they start."""
    model = KppBits(config).eval()
    for name, by in parts.items():
        shake(getattr(model, name), by)
    with torch.no_grad():
        model.writer.last.weight *= 4  # gists that differ
    return model


def twin_of(model: KppBits) -> KppBitsEmpty:
    """The model without a memory, with the weights of one that has the sizes of `CONFIG`."""
    memory = CONFIG.memory
    twin = KppBitsEmpty(
        KppBitsEmptyConfig(
            image=CONFIG.image,
            encoder=CONFIG.encoder,
            memory=GridConfig(channels=memory.channels, size=memory.size, capacity=memory.capacity),
            readout=CONFIG.readout,
            decoder=CONFIG.decoder,
            code=PixelCodeConfig(radius=2, width=12, depth=1, maps=8),
        )
    )
    weights = model.state_dict()
    twin.eval().load_state_dict({name: weights[name] for name in twin.state_dict()})
    return twin


@pytest.fixture
def model() -> KppBits:
    return shaken(pixel_code=0.2, prior=0.05)


@pytest.fixture
def images() -> Tensor:
    return (torch.rand(6, 1, 10, 7) < 0.3).float()


# Whole numbers


def test_sums_are_whole_and_the_same_in_any_order_and_precision():
    layer = FixedLinear(50, 20)
    shake(layer, 0.3)
    x = torch.randint(0, 256, (7, 50)).float()
    sums = layer(x)
    assert torch.equal(sums, sums.round())
    order = torch.randperm(50)
    weight, bias = layer.whole()
    assert torch.equal((x.double() @ weight.double().T + bias).float(), sums)
    one_by_one = bias + sum(x[:, i : i + 1] * weight[:, i] for i in order.tolist())
    assert torch.equal(one_by_one, sums)
    assert is_exact(50) and is_exact(432) and not is_exact(480)


def test_activations_are_eight_bits_and_pass_gradients_on():
    sums = torch.linspace(-3000, 30000, 400, requires_grad=True)
    found = activate(sums)
    assert torch.equal(found, found.round()) and found.min() == 0 and found.max() == 255
    found.sum().backward()
    inside = (sums > 0) & (sums < 64 * 255)
    assert sums.grad is not None
    assert torch.allclose(sums.grad[inside], torch.tensor(1.01 / 64))
    assert bool((sums.grad[~inside] > 0).all())  # none is lost for good


def test_costs_are_logarithms_rounded():
    counts = torch.arange(1, TOTAL + 1)
    exact = BIT * (16 - counts.double().log2())
    assert float((cost_table()[1:] - exact).abs().max()) < 0.6
    assert cost_table()[TOTAL // 2] == BIT and cost_table()[1] == 16 * BIT


# Gists


def test_a_table_is_a_distribution_in_counts():
    prior = GistPrior(12, 4)
    shake(prior, 0.3)
    gists = torch.randint(-3, 4, (9, 12)).float()
    for group in range(4):
        tables = prior.tables(gists, group)
        assert tables.shape == (9, 3, ALPHABET)
        assert bool((tables.sum(dim=-1) == TOTAL).all()) and int(tables.min()) >= 1


def test_a_group_sees_only_the_groups_before_it():
    prior = GistPrior(12, 4)
    shake(prior, 0.3)
    gists = torch.randint(-3, 4, (5, 12)).float()
    other = gists.clone()
    other[:, 6:] += 1  # groups 2 and 3
    assert torch.equal(prior.tables(gists, 2), prior.tables(other, 2))
    assert not torch.equal(prior.tables(gists, 3), prior.tables(other, 3))


def test_the_price_in_training_is_the_price_in_the_code():
    prior = GistPrior(12, 4)
    shake(prior, 0.1)
    numbers = torch.randn(50, 12)
    nats = prior.nats(numbers, numbers)
    bits = prior.costs(quantise_gist(numbers)).double() / BIT
    assert torch.allclose(nats.double() / math.log(2), bits, atol=0.02)


def test_a_price_makes_numbers_that_tell_nothing_small():
    prior, scale = GistPrior(12, 4), torch.tensor(2.0, requires_grad=True)
    optimiser = torch.optim.Adam([scale, *prior.parameters()], 0.02)
    bits = []
    for _ in range(300):
        numbers = (scale * torch.randn(64, 12)).clamp(-7, 7)
        blurred = (numbers + torch.rand(64, 12) - 0.5).clamp(-7, 7)
        bits.append(
            float(prior.costs(quantise_gist(numbers.detach())).sum(dim=1).double().mean()) / BIT
        )
        optimiser.zero_grad()
        prior.nats(numbers, blurred).sum(dim=1).mean().backward()
        optimiser.step()
    assert bits[-1] < 1 < 20 < bits[0]


# Pixels


def test_pixel_probabilities_of_all_images_add_up_to_one():
    code = PixelCode(6, (3, 3), radius=2, width=8, maps=4, depth=1)
    shake(code, 0.5)
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=9))).view(-1, 3, 3)
    trace = torch.randint(-2, 3, (1, 6)).float()
    counts = code.table(trace.expand(len(every), -1), every)
    share = torch.where(every.flatten(1) > 0.5, counts, TOTAL - counts).double() / TOTAL
    assert share.prod(dim=1).sum().item() == pytest.approx(1, abs=1e-12)
    assert share.std() > 0.05


def test_an_untrained_block_changes_no_probability_but_training_can(images: Tensor):
    torch.manual_seed(0)
    code = KppBits(CONFIG).pixel_code
    blocks, pixels = torch.randn(6, code.lift.weight.shape[1]).round(), images[:, 0]
    nats = code.nats(blocks, pixels)
    assert torch.equal(nats, code.nats(torch.zeros_like(blocks), pixels))
    nats.sum().backward()
    assert code.known.weight.grad is not None and (code.known.weight.grad != 0).any()


def test_training_sees_the_probabilities_that_code(model: KppBits, images: Tensor):
    blocks = model.blocks(images[None], model.encoder(images[None])).flatten(2)[0]
    levels = model.pixel_code.levels(blocks, model.pixel_code.look(images[:, 0]))  # with gradients
    assert levels.requires_grad
    counts = model.pixel_code.table(blocks, images[:, 0])
    assert torch.equal(counts, (TOTAL * (levels.double() / 16).sigmoid()).round().long())


def test_pixel_after_pixel_is_all_at_once(model: KppBits, images: Tensor):
    blocks = model.blocks(images[None], model.encoder(images[None])).flatten(2)[0]
    seen: list[Tensor] = []

    def choose(i: int, counts: Tensor) -> Tensor:
        seen.append(counts)
        return images.flatten(1)[:, i]

    found = model.pixel_code.follow(blocks, choose)
    assert torch.equal(found, images[:, 0])
    assert torch.equal(torch.stack(seen, dim=1), model.pixel_code.table(blocks, images[:, 0]))


# Codes


@pytest.mark.parametrize("caps", ["all", "one", "many"])
def test_a_stream_gives_back_what_went_in(model: KppBits, caps: str):
    count = 300  # more than one chunk
    images = (torch.rand(1, count, 1, 10, 7) < 0.3).float()
    blocks = model.blocks(images, model.encoder(images))
    whole = model.code(images, blocks).apply(lambda part: part[0])
    limits = {"all": torch.full((count,), ALL), "one": torch.full((count,), 90)}
    detail = whole.within(limits.get(caps, torch.randint(3, 120, (count,))))
    gists = detail.apply(lambda part: part[None]).cut(blocks)[0].flatten(1)[:, :28]
    stream = model.codec.encode(gists, detail)
    found, again = model.codec.decode(stream, count)
    assert torch.equal(found, gists)
    for name in ("pixels", "pixel_costs", "gist_costs", "kept", "caps"):
        assert torch.equal(getattr(again, name), getattr(detail, name)), name
    claimed, distinct = float(detail.bits.sum()), len(detail.caps.unique())
    which = count * math.log2(distinct)  # which of the caps each block has
    assert abs(8 * len(stream) - claimed - which) <= 0.01 * claimed + 16 * distinct + 8


@pytest.mark.parametrize("caps", ["all", "many"])
def test_a_stream_of_its_own_gives_a_block_back_whatever_the_others(model: KppBits, caps: str):
    count = 40
    images = (torch.rand(1, count, 1, 10, 7) < 0.3).float()
    blocks = model.blocks(images, model.encoder(images))
    limits = torch.randint(0, 250, (count,)) if caps == "many" else torch.full((count,), ALL)
    if caps == "many":
        limits[:3] = torch.tensor([0, 1, ALL - 1])
    whole, counts = model.code_and_counts(images, blocks)
    detail = whole.within(limits[None])
    gists = detail.cut(blocks)[0].flatten(1)[:, :28]
    detail = detail.apply(lambda part: part[0])
    streams = model.codec.encode_each(gists, detail, counts[0])
    order = torch.randperm(count)[:30]
    found, again = model.codec.decode_each([streams[i] for i in order])
    assert torch.equal(found, gists[order])
    for name in ("pixels", "pixel_costs", "gist_costs", "kept", "caps"):
        assert torch.equal(getattr(again, name), getattr(detail, name)[order]), name
    head = math.log2(1 / 0.8) * torch.ones(count)
    if caps == "many":  # the size of a cap, its lower digits
        digits = torch.tensor([max(0, cap.bit_length() - 1) for cap in limits.tolist()])
        head = math.log2(17 / 0.2) + digits
    extra = torch.tensor([8 * len(stream) for stream in streams]) - detail.bits - head
    assert float(extra.max()) < 8.1 and float(extra.mean()) < 5
    nothing = detail.apply(lambda part: part[:0])
    assert model.codec.encode_each(gists[:0], nothing, counts[0, :0]) == []
    assert len(model.codec.decode_each([])[0]) == 0


def test_a_stream_ends_at_the_first_byte_that_tells_it_from_all_others():
    """Any shorter one decodes to something else; also where bytes wait for a carry."""
    thirds = coder.uniform(3)

    def decoded(stream: bytes, count: int) -> list[int] | None:
        try:
            return coder.new_decoder(coder.as_words(stream)).decode(thirds, count).tolist()
        except AssertionError:  # what no symbols are coded as
            return None

    cases = [torch.randint(0, 3, (n,)).tolist() for n in range(1, 60)]
    cases += [[1] * n for n in range(1, 60)]  # the middle third has one half in it, for ever
    cases += [[1] * 50 + end for end in ([0], [2], [2, 0, 1])]
    for symbols in cases:
        encoder = coder.new_encoder()
        encoder.encode(np.array(symbols, np.int32), thirds)
        stream = coder.shortest(encoder)
        assert decoded(stream, len(symbols)) == symbols
        assert 8 * len(stream) < len(symbols) * math.log2(3) + 8
        shorter = len(stream) - 1
        if shorter < 0:
            continue
        start = int.from_bytes(stream[:shorter], "big")
        near = [n for n in (start, start + 1) if n < 256**shorter]
        if shorter <= 1:
            near = range(256**shorter)  # all there are
        assert all(decoded(n.to_bytes(shorter, "big"), len(symbols)) != symbols for n in near)


def test_the_same_bits_whatever_the_threads_and_the_precision(tmp_path: Path):
    """Enough images of the usual size for several threads."""
    small = shaken(replace(CONFIG, image=(1, 28, 28)), pixel_code=0.2, prior=0.05)
    model, images = small.with_capacity(64), (torch.rand(64, 1, 28, 28) < 0.3).float()
    memory = model.write(images)
    streams = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        streams.append(memory.as_container().stream)
    torch.set_num_threads(1)
    assert streams[0] == streams[1]
    memory.save(tmp_path / "plain")
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.as_container().stream == streams[0]
        again = Memory.load(tmp_path / "plain", model)
        model.write(images).save(tmp_path / "mixed")
    assert torch.equal(model.get(again), images)
    assert torch.equal(model.get(Memory.load(tmp_path / "mixed", model)), images)


# Memories


def test_everything_stored_comes_back_exactly(model: KppBits, images: Tensor):
    memory = model.write(images)
    assert memory.detail is not None
    held = memory.detail.pixels[memory.cells]
    assert torch.equal(held.float(), images.flatten(1))
    assert torch.equal(model.get(memory), images)
    assert float((model.get(memory.shrink(bits=20)) - images).abs().max()) > 0.1
    assert float((model.recall(memory, images, steps=1)[-1] - images).abs().max()) < 1e-3
    terms = model.elbo(images)
    cost = math.log(6 + NEW) - math.log(1 - MISMATCH)
    assert torch.allclose(terms.nll_nats, torch.tensor(cost).double(), atol=1e-3)


def test_a_bound_is_what_is_not_stored(model: KppBits, images: Tensor):
    memory = model.write(images).shrink(90)
    assert memory.detail is not None
    assert bool((memory.bits > 0).all())
    terms = model.elbo(images, memory, handles=memory.handles)
    blocks = model.placement.grid.read(memory.map[None], memory.cells[None])
    counts = model.pixel_code.table(blocks.flatten(2)[0], images[:, 0])
    pixels = images.flatten(1)
    nats = -(torch.where(pixels > 0.5, counts, TOTAL - counts).double() / TOTAL).log()
    for t, stored in enumerate(memory.detail.stored[memory.cells].tolist()):
        rest, whole = float(nats[t, stored:].sum()), float(nats[t].sum())
        known = -math.log((1 - MISMATCH) * math.exp(-rest) + MISMATCH * math.exp(-whole))
        expected = known if stored else whole
        assert -float(terms.log_likelihood[t]) == pytest.approx(expected, abs=1e-9)


def test_stored_pixels_rule_other_images_out_but_for_the_share_that_is_charged(
    model: KppBits, images: Tensor
):
    memory = model.write(images[:1])
    own, other = model.elbo(images[[0, 1]], memory, handles=[0, 0]).log_likelihood
    nothing_matches = model._log_pixels(
        model.placement.grid.read(memory.map[None], memory.cells[None]), images[None, 1:2]
    ).sum()
    assert float(own) == pytest.approx(math.log(1 - MISMATCH), abs=1e-4)
    assert float(other) == pytest.approx(math.log(MISMATCH) + float(nothing_matches), abs=1e-9)


def test_shrinking_forgets_by_degrees_and_leaves_others_alone(model: KppBits, images: Tensor):
    memory = model.write(images)
    assert memory.detail is not None
    before = memory.bits
    less = memory.shrink(80, 1, 3)
    assert less.detail is not None
    assert bool((less.bits[[1, 3]] < before[[1, 3]]).all())
    assert torch.equal(less.bits[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
    untouched = less.cells[[0, 2, 4, 5]]
    assert torch.equal(less.detail.pixels[untouched], memory.detail.pixels[untouched])
    none = memory.shrink(0)
    assert float(none.bits.sum()) == 0
    assert float(none.map.abs().sum()) == 0  # nothing is left of them, not even in the map
    assert none.detail is not None and int(none.detail.pixels.sum()) == 0
    assert none.handles == memory.handles
    again = less.shrink(85)  # what is gone does not come back
    assert torch.equal(again.bits[[1, 3]], less.bits[[1, 3]])


def test_free_leaves_nothing_behind(model: KppBits, images: Tensor):
    memory = model.write(images)
    assert memory.detail is not None
    cell = memory.slot_of(2)
    memory = memory.free(2)
    assert memory.detail is not None
    for part in ("pixels", "pixel_costs", "gist_costs", "kept", "caps"):
        assert int(getattr(memory.detail, part)[cell].sum()) == 0
    memory = model.append(memory, images[2:3])
    assert memory.handles == [0, 1, 3, 4, 5, 6]
    held = memory.detail.pixels[memory.slot_of(6)] if memory.detail else None
    assert held is not None and torch.equal(held.float(), images[2].flatten())


def test_keys_are_a_distribution_over_what_is_held_and_new(model: KppBits):
    held, new = (
        key_costs(torch.tensor([0, 1, 6, 99]), torch.full((4, 1), is_held))[:, 0]
        for is_held in (True, False)
    )
    assert float(new[0]) == 0  # certain where nothing is held
    for row, count in ((1, 1), (2, 6), (3, 99)):
        assert count * math.exp(-held[row]) + math.exp(-new[row]) == pytest.approx(1)
        assert math.exp(held[row] - new[row]) == pytest.approx(max(count, NEW))


def test_an_empty_memory_tells_nothing(model: KppBits, images: Tensor):
    alone = model.elbo(images, model.empty())
    nothing = torch.zeros(1, 6, *model.writer.shape)
    expected = model._log_pixels(nothing, images[None]).sum(dim=-1)[0]
    assert torch.allclose(alone.log_likelihood, expected)
    assert torch.equal(alone.key_kl, torch.zeros(6).double())


def test_what_is_not_held_is_told_by_all_that_is_and_by_nothing_else(
    model: KppBits, images: Tensor
):
    shake(model.kin, 0.1)
    memory = model.write(images[:5])
    told = model._read_kin(Memory.stack([memory]))
    assert float(told.detach().abs().sum()) > 0
    freed = model.append(memory.free(0, 1, 2, 3, 4), images[:5].flip(0))  # other cells, other order
    again = model._read_kin(Memory.stack([freed]))
    assert torch.allclose(told, again, atol=1e-5)
    fewer = model._read_kin(Memory.stack([memory.free(4)]))
    assert not torch.allclose(told, fewer, atol=1e-3)
    left = model.left_out(images)
    alone = model.elbo(images[5:], model.write(images[:5]), handles=None)
    assert torch.allclose(left.log_likelihood[5:], alone.log_likelihood, atol=1e-6) or bool(
        alone.nll_nats < left.nll_nats[5:]  # or a block that is held happens to explain it better
    )
    assert float(left.key_kl[0]) == pytest.approx(math.log(5 / NEW + 1))


def test_new_images_read_whole_images_or_gists(model: KppBits, images: Tensor):
    shake(model.kin, 0.1)
    memory = model.write(images[:5])
    whole, gists = (model._read_kin(m.as_batch()) for m in (memory, memory.shrink(bits=60)))
    assert not torch.allclose(whole, gists, atol=1e-3)


def test_images_are_found_by_content_and_batches_agree(model: KppBits, images: Tensor):
    pair = torch.stack([images, images.flip(0)])
    memory = model.write(pair)
    terms = model.elbo(pair, memory, handles=torch.arange(6).expand(2, -1))
    single = model.elbo(pair[1], memory[1], handles=list(range(6)))
    assert torch.allclose(terms[1].nll_nats, single.nll_nats)
    by_content = model.elbo(pair, memory)
    assert bool((by_content.nll_nats >= terms.nll_nats - 1e-9).all())


@pytest.mark.parametrize("size", [0, 4])
def test_the_loss_of_a_step_is_the_sum_of_its_parts(
    images: Tensor, monkeypatch: pytest.MonkeyPatch, size: int
):
    """With the sketch of all images, of which those that are written count."""
    config = replace(CONFIG, readout=replace(CONFIG.readout, size=size))
    model, seen = KppBits(config).train(), {}
    shake(model.readout, 0.05)
    shake(model.kin, 0.1)
    nats, price = model.pixel_code.mean_nats, model.prior.nats

    def watch(name: str, function):
        def call(*given, **options):
            seen.setdefault(name, (given, options, function(*given, **options)))
            return seen[name][2] if seen[name][0] is given else function(*given, **options)

        return call

    monkeypatch.setattr(model.pixel_code, "mean_nats", watch("pixels", nats))
    monkeypatch.setattr(model.prior, "nats", watch("price", price))
    monkeypatch.setattr(kpp_bits, "_SPREAD", 1.0)
    beta = float(model.log_beta.exp())
    noise = torch.Generator().manual_seed(0)
    outputs = model(images.expand(5, -1, -1, -1, -1), noise)
    blocks = seen["pixels"][0][0].unflatten(-1, model.writer.shape)
    kept = blocks.flatten(2)[..., -model.config.code.groups :]  # flags of what is held
    written = kept.any(dim=-1)
    assert 5 <= int(written.sum()) < 30
    means = model.readout(blocks, sample=False).readout
    drawn = model.likelihood.log_prob(model.decoder(means), images.expand(5, -1, -1, -1, -1))
    total = (beta * seen["price"][2].unflatten(0, (5, 6)) * kept).sum(dim=-1)
    total = (total - kpp_bits._SKETCH * drawn * written).mean() + seen["pixels"][2]
    torch.testing.assert_close(outputs["auxiliary"], total)


def test_validation_charges_the_gist(
    model: KppBits, images: Tensor, monkeypatch: pytest.MonkeyPatch
):
    terms = model.validation_terms(images[None])
    monkeypatch.setattr(refine, "_TRIES", 0)  # validation does not refine
    memory = model.write(images)
    assert memory.detail is not None
    gist = memory.detail.gist_costs[memory.cells].sum(dim=-1).double() / BIT
    assert torch.allclose(terms.readout_kl[0] / math.log(2), gist, atol=0.05)


@pytest.mark.parametrize("is_new", [False, True])
def test_training_estimates_the_cost_of_pixels_from_half_of_the_rows(
    model: KppBits, images: Tensor, is_new: bool, monkeypatch: pytest.MonkeyPatch
):
    """Even rows of every second image, odd rows of the others; with both assignments, every row
    counts once. On a CPU a few images at a time; here two, so that some parts are smaller."""
    code, pixels = model.pixel_code, images[:, 0].view(2, 3, 10, 7)
    monkeypatch.setattr(pixel_code, "_TRAINED_AT_ONCE", 2)
    traces = model.quick_blocks(model.encoder(images.view(2, 3, 1, 10, 7))).flatten(2).detach()
    inputs = [traces.requires_grad_(), pixels]
    if is_new:
        inputs.append(torch.randn(2, 3, code.maps, *code.coarse, requires_grad=True))
    leaves = [x for x in inputs if x.requires_grad] + list(code.parameters())
    found = code.mean_nats(*inputs)
    flat = [x.flatten(0, 1) for x in inputs]
    even, odd = (code.nats(*flat, rows=slice(first, None, 2)) for first in (0, 1))
    first = torch.tensor([True, False, True, False, True, False])  # (0, 0), (0, 2), (1, 1)
    expected = 2 * torch.where(first, even, odd).sum() / 6
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(even + odd, code.nats(*flat))
    weight = torch.tensor(3.0)
    parts, whole = (torch.autograd.grad(weight * one, leaves) for one in (found, expected))
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-4, atol=1e-5)
    assert any(float(one.abs().max()) > 0 for one in parts[:1])
    with torch.no_grad():
        torch.testing.assert_close(code.mean_nats(*inputs), expected)
        one = [x[:1, :1] for x in inputs]  # a single image has no other half
        torch.testing.assert_close(code.mean_nats(*one), 2 * even[0].detach())


@torch.no_grad()
def test_some_pixels_have_the_logits_that_all_have(model: KppBits, images: Tensor):
    code, pixels = model.pixel_code, images[:, 0]
    traces = model.quick_blocks(model.encoder(images[None])).flatten(2)[0]
    looked = code.look(pixels)
    image, pixel = (torch.rand(looked.shape[:2]) < 0.3).nonzero().unbind(dim=1)
    some = code.levels_at(traces, looked[image, pixel], image, pixel)
    assert len(some) > 9 and torch.equal(some, code.levels(traces, looked)[image, pixel])


@pytest.mark.parametrize("sure", [0.005, 0.4])  # with 0.4, trials are wrong about many pixels
def test_refined_gists_take_fewer_bits_and_none_takes_more(
    model: KppBits, images: Tensor, sure: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(refine, "_SURE", sure)
    gists = model.blocks(images[None], model.encoder(images[None])).flatten(2)[0]
    gists = gists[:, : model.prior.numbers]
    flags = torch.ones(len(gists), model.prior.groups)
    spoiled = gists.clone()
    spoiled[:, :4] = (spoiled[:, :4] + 2).clamp(max=LARGEST)

    def bits(gists: Tensor) -> Tensor:
        pixels = model.pixel_code.nats(torch.cat([gists, flags], dim=1), images[:, 0])
        return model.prior.costs(gists).sum(dim=-1) / BIT + pixels.detach() / math.log(2)

    assert model.prior.costs(spoiled[:0]).shape == (0, model.prior.groups)  # nothing promises gain
    refined = refine.refine_gists(model.prior, model.pixel_code, spoiled, images[:, 0])
    assert bool((bits(refined) <= bits(spoiled) + 1e-3).all())
    assert float((bits(spoiled) - bits(refined)).mean()) > 0.1
    assert float(refined.abs().max()) <= LARGEST and torch.equal(refined, refined.round())


def test_gists_that_trials_only_make_worse_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """Trials that see few pixels are often wrong. All pixels decide."""
    model = shaken(pixel_code=1.0, prior=0.05)
    images = (torch.rand(60, 1, 10, 7) < 0.3).float()
    monkeypatch.setattr(refine, "_SURE", 0.9)
    gists = model._gists(model.encoder(images[None]))[0].detach()
    flags = torch.ones(len(gists), model.prior.groups)

    def bits(gists: Tensor) -> Tensor:
        pixels = model.pixel_code.nats(torch.cat([gists, flags], dim=1), images[:, 0])
        return model.prior.costs(gists).sum(dim=-1) / BIT + pixels.detach() / math.log(2)

    refined = refine.refine_gists(model.prior, model.pixel_code, gists, images[:, 0])
    assert bool((bits(refined) <= bits(gists) + 1e-3).all())


def test_a_gist_of_one_number_is_refined():
    prior, code = GistPrior(1, 1), PixelCode(2, (10, 7), radius=2, width=12, maps=8, depth=1)
    images = (torch.rand(3, 10, 7) < 0.3).float()
    refined = refine.refine_gists(prior, code, torch.zeros(3, 1), images)
    assert refined.shape == (3, 1) and torch.equal(refined, refined.round())


@pytest.mark.parametrize(("wanted", "rises"), [(1.0, True), (1e4, False)])
def test_a_price_rises_while_gists_take_more_bits_than_they_should(
    images: Tensor, wanted: float, rises: bool
):
    config = replace(CONFIG, code=replace(CONFIG.code, gist_bits=wanted))
    model = KppBits(config).train()
    before = float(model.log_beta)
    model(images[None])
    assert (float(model.log_beta) > before) is rises


def test_training_writes_few_images_or_many(model: KppBits):
    counts = model._choose_written(64, 8, torch.Generator().manual_seed(0)).sum(dim=1)
    assert int(counts.min()) == 1 and int(counts.max()) == 7


def test_the_twin_without_a_memory_scores_as_an_empty_memory_does(model: KppBits, images: Tensor):
    """The same weights, the same densities; its bound of independent pixels is that of z."""
    with pytest.raises(UserError, match="unwritten"):
        replace(CONFIG.memory, unwritten=1.0)  # has a model of its own
    empty, weights = twin_of(model), model.state_dict()
    only = set(weights) - set(empty.state_dict()) - {"decoder.from_kin.weight"}
    assert {name.split(".")[0] for name in only} == {"writer", "prior", "kin", "log_beta"}
    ours, theirs = empty.elbo(images), model.elbo(images, model.empty())
    assert torch.equal(ours.nll_nats, theirs.nll_nats)
    assert empty.memory_bits(6) == 0 and (ours.readout_kl == 0).all()
    with pytest.raises(UserError, match="no memory"):
        empty.elbo(images, model.empty())
    with torch.no_grad():
        sketch = empty.independent_terms(images, generator=torch.Generator().manual_seed(1))
        outputs = empty(images[None], torch.Generator().manual_seed(1))
        other_rows = empty(images.roll(3, dims=0)[None])["auxiliary"]  # of each of six images
    torch.testing.assert_close(sketch.log_likelihood, outputs["log_likelihood"][0])
    pixels = (outputs["auxiliary"] + other_rows) / 2
    torch.testing.assert_close(pixels, ours.nll_nats.mean().float())
    drawn = empty.generate(None, 5, sample_pixels=True)
    assert drawn.shape == (5, *CONFIG.image) and set(drawn.unique().tolist()) == {0.0, 1.0}


def test_an_image_unlike_all_that_is_held_costs_little_more_than_without_a_memory(
    model: KppBits, images: Tensor
):
    new = images.flip(-1)[None]
    alone = model.elbo(new, model.empty(1)).nll_nats
    beside = model._terms_new(model.write(images[None]).as_batch(), new).nll_nats
    assert bool((beside <= alone + math.log(6 / NEW + 1) - math.log(UNLIKE) + 1e-6).all())


# Files


def test_a_file_is_as_large_as_it_claims_and_gives_the_same_densities(
    model: KppBits, images: Tensor, tmp_path: Path
):
    memory = model.write(images).free(1).shrink(90)
    memory.save(tmp_path / "memory.bin")
    content = (tmp_path / "memory.bin").read_bytes()
    claim = float(memory.bits.sum())
    handles = len(memory.handles)  # a byte each
    assert abs(8 * (len(content) - SIZE - handles) - claim) <= 24  # a cap, and the last byte
    again = Memory.load(tmp_path / "memory.bin", model)
    assert again.handles == memory.handles and again.issued == memory.issued
    rest = images[[0, 2, 3, 4, 5]]
    before = model.elbo(rest, memory, handles=memory.handles)
    after = model.elbo(rest, again, handles=again.handles)
    assert torch.equal(before.nll_nats, after.nll_nats)
    assert torch.equal(again.bits, memory.bits)


def test_a_fresh_process_reads_the_same_densities(model: KppBits, images: Tensor, tmp_path: Path):
    model.save_pretrained(tmp_path / "model")
    memory = model.write(images).shrink(90)
    memory.save(tmp_path / "memory.bin")
    torch.save(images, tmp_path / "images.pt")
    terms = model.elbo(images, memory, handles=memory.handles)
    script = f"""
import torch, kanerva
from kanerva.models.kpp_bits import KppBits
model = KppBits.from_pretrained({str(tmp_path / "model")!r})
memory = kanerva.Memory.load({str(tmp_path / "memory.bin")!r}, model)
images = torch.load({str(tmp_path / "images.pt")!r})
found = model.elbo(images, memory, handles=memory.handles)
print([value.hex() for value in found.log_likelihood.tolist()])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([v.hex() for v in terms.log_likelihood.tolist()])


def test_damaged_files_are_refused(model: KppBits, images: Tensor, tmp_path: Path):
    path = tmp_path / "memory.bin"
    model.write(images).shrink(90).save(path)
    content = path.read_bytes()
    for at in {*range(0, len(content), 7), 0, SIZE - 1, len(content) - 1}:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(UserError):
            Memory.load(path, model)
    for size in (3, 60, SIZE, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UserError):
            Memory.load(path, model)


def test_bits_of_another_model_are_refused(model: KppBits, images: Tensor, tmp_path: Path):
    path = tmp_path / "memory.bin"
    model.write(images).save(path)
    other = KppBits(CONFIG).eval()
    with pytest.raises(UserError, match="another model"):
        Memory.load(path, other)
    with pytest.raises(UserError, match=r"Memory.load\(path, model\)"):
        Memory.load(path)


def test_a_file_opens_in_memories_of_any_capacity(model: KppBits, images: Tensor, tmp_path: Path):
    """Blocks do not depend on the number of cells; a memory gets as many as it needs."""
    large, path = model.with_capacity(25), tmp_path / "memory.bin"
    more = torch.cat([images, 1 - images])
    large.write(more).free(4).save(path)
    again = Memory.load(path, model)  # which has 9 cells
    assert again.capacity >= 11 and again.handles == [h for h in range(12) if h != 4]
    fitting = model.with_capacity(again.capacity)
    assert torch.equal(fitting.get(again), more[again.handles])
    model.write(images).save(path)
    again = Memory.load(path, large)
    assert again.capacity == 25 and torch.equal(large.get(again), images)


def test_a_memory_of_bits_is_carried_over_to_more_cells(model: KppBits, images: Tensor):
    memory, large = model.write(images[:4]).free(1), model.with_capacity(25)
    grown = large.append(memory, images[4:])
    assert grown.capacity == 25 and grown.handles == [0, 2, 3, 4, 5]
    assert torch.equal(large.get(grown), images[grown.handles])
    assert torch.equal(grown.bits[:3], memory.bits)
    assert len(large.append(model.empty(), images[:1])) == 1


def test_appended_blocks_are_those_that_are_written(model: KppBits, images: Tensor):
    """Also where some bits are dropped: one call encodes all images."""
    capped = model.within(60)
    written, appended = capped.write(images), capped.append(capped.write(images[:2]), images[2:])
    assert torch.equal(written.bits, appended.bits)
    torch.testing.assert_close(capped.get(written), capped.get(appended))


def test_familiarity_separates_what_was_written(model: KppBits, images: Tensor):
    """By the very probabilities that code: to write is to make an image's pixels certain."""
    memory, others = model.write(images), (torch.rand(6, 1, 10, 7) < 0.3).float()
    known, new = model.familiarity(memory, images), model.familiarity(memory, others)
    assert float(known.min()) > 0 > float(new.max())
    terms = model.elbo(images, memory)
    assert known.shape == (6,) and bool((known <= -model.elbo(images, model.empty()).elbo).all())
    assert float(terms.log_likelihood.min()) > -0.1
    assert bool((model.familiarity(model.empty(), images) == -torch.inf).all())


def test_a_container_of_nothing(model: KppBits, tmp_path: Path):
    model.empty().save(tmp_path / "memory.bin")
    again = Memory.load(tmp_path / "memory.bin", model)
    assert len(again) == 0 and again.issued == 0
    assert Container.unpack((tmp_path / "memory.bin").read_bytes(), "it").handles == []


# New images


def test_samples_are_of_what_a_new_image_is_told(model: KppBits, images: Tensor):
    shake(model.kin, 0.1)
    memory = model.write(images)
    noise = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1, 0)]
    first, again, other = (model.generate(memory, 3, generator=one) for one in noise[:3])
    assert first.shape == (3, 1, 10, 7)
    assert torch.equal(first, again) and not torch.equal(first, other)
    untold = model.generate(model.empty(), 3, generator=noise[3])
    assert not torch.allclose(first, untold, atol=1e-3)
    pixels = model.generate(Memory.stack([memory, memory]), 4, sample_pixels=True)
    assert pixels.shape == (2, 4, 1, 10, 7) and bool(((pixels == 0) | (pixels == 1)).all())


def test_pixels_are_drawn_with_the_probabilities_that_score_them(model: KppBits, images: Tensor):
    shake(model.kin, 0.1)
    memory = Memory.stack([model.write(images)])
    drawn = model.generate(memory, 600, sample_pixels=True)
    kin = model.read_groups(model._readable(memory, 0), drawn[0, :1])
    assert kin.number == 6
    nothing, black = torch.zeros(1, 6, *model.writer.shape), torch.ones(1, 6, *images.shape[1:])
    by_group = model._log_pixels(nothing, black, model._split_kin(kin.maps)[0])[0, :, 0].exp()
    ink = float(drawn[0, :, 0, 0, 0].mean())
    assert ink == pytest.approx(float(by_group.mean()), abs=5 * math.sqrt(0.25 / 600))
    assert model._terms_new(memory, drawn[:, :70]).log_likelihood.isfinite().all()  # two parts


def test_a_sealed_file_whose_stream_is_another_is_refused(
    model: KppBits, images: Tensor, tmp_path: Path
):
    """Anyone can compute a digest: what is decoded is compared too, and nothing else happens."""
    path, sound = tmp_path / "memory.bin", model.write(images).shrink(90).as_container()
    noise = torch.Generator().manual_seed(0)
    for size in (0, 4, 3, 400, len(sound.stream)):
        stream = bytes(torch.randint(0, 256, (size,), generator=noise).tolist())
        path.write_bytes(replace(sound, stream=stream).pack())
        with pytest.raises(UserError, match=r"damaged|other blocks"):
            Memory.load(path, model)
    path.write_bytes(replace(sound, handles=[0, 1, 2, 3, 4, 99]).pack())
    with pytest.raises(UserError, match="handles"):
        Memory.load(path, model)


def test_bits_are_carried_over_to_more_cells(model: KppBits, images: Tensor):
    before = model.write(images).bits
    memory = model.write(images).shrink(40, 2).free(4)
    large = model.with_capacity(16)
    grown = large.append(memory, images[4:5])
    assert grown.capacity == 16 and grown.handles == [0, 1, 2, 3, 5, 6]
    assert grown.bits[:5].tolist() == memory.bits.tolist() and float(memory.bits[2]) < before[2]
    torch.testing.assert_close(large.get(grown, memory.handles), model.get(memory))


def test_other_memories_of_a_model_keep_its_cap(model: KppBits, images: Tensor):
    few = model.within(20)
    assert few.with_capacity(100).write(images).bits.tolist() == few.write(images).bits.tolist()
    assert model.with_capacity(100).cap == ALL


def test_counts_of_bits_are_whole_numbers(model: KppBits, images: Tensor):
    memory = model.write(images)
    for make in (model.within, memory.shrink):
        with pytest.raises(UserError, match="bits must be"):
            make(-5)
    for wrong in (56.5, "all"):
        with pytest.raises(UserError, match="bits must be"):
            as_count("bits", wrong, 0)
    few = memory.shrink(20, 0, 3).bits.tolist()
    for handles in ([0, 3], torch.tensor([3, 0])):
        assert memory.shrink(20, handles).bits.tolist() == few


def test_bits_are_not_rounded(model: KppBits, images: Tensor, tmp_path: Path):
    memory = model.write(images)
    with pytest.raises(UserError, match="cannot be rounded to int8"):
        memory.quantise("int8")
    with pytest.raises(UserError, match="cannot be rounded to int4"):
        memory.save(tmp_path / "memory", dtype="int4")
    assert not list(tmp_path.iterdir())


def test_a_memory_is_not_saved_with_weights_that_did_not_write_it(
    model: KppBits, images: Tensor, tmp_path: Path
):
    memory = model.write(images)
    with torch.no_grad():
        model.pixel_code.place += 0.5
    with pytest.raises(UserError, match="weights .* have changed"):
        memory.save(tmp_path / "memory")
    memory = model.write(images)
    model.pixel_code.place.data += 0.5  # not counted by torch
    with pytest.raises(UserError, match="weights .* have changed"):
        memory.save(tmp_path / "memory")
    assert not list(tmp_path.iterdir())


def test_memories_of_different_kinds_are_not_stacked(model: KppBits, images: Tensor):
    memory = model.write(images)
    with pytest.raises(UserError, match="others do not"):
        Memory.stack([memory, replace(memory, detail=None)])


def test_images_are_written_in_inference_mode(model: KppBits, images: Tensor):
    expected = model.write(images, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        memory = model.write(images, generator=torch.Generator().manual_seed(0))
        assert torch.equal(memory.map, expected.map)
        assert torch.equal(model.get(memory), images)


def test_what_is_recalled_is_exact_where_pixels_are_stored(model: KppBits, images: Tensor):
    memory = model.write(images)
    assert torch.equal(model.recall(memory, images, steps=1)[0], images)


def test_an_image_of_more_bits_than_a_cap_can_say_is_refused(
    model: KppBits, images: Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kpp_bits, "ALL", 30)
    with pytest.raises(UserError, match="more than 30 bits"):
        replaced(model, 30).write(images)
    assert float(replaced(model, 29).write(images).bits.max()) < 60


def replaced(model: KppBits, cap: int) -> KppBits:
    other = model.within(None)
    other.cap = cap
    return other


def test_images_of_several_channels_are_refused():
    with pytest.raises(UserError, match="one channel"):
        replace(CONFIG, image=(3, 10, 7))


def test_images_of_one_row_are_refused():
    with pytest.raises(UserError, match="at least two rows"):
        replace(CONFIG, image=(1, 1, 7))


def test_a_joint_density_of_the_sketch_is_not_given(model: KppBits, images: Tensor):
    """It is not that of p, which `elbo` scores with the pixel code."""
    with pytest.raises(UserError, match="kpp-bits has no z in its density"):
        model.joint(images[None], model.empty(1).map, torch.zeros(1, 6, 2), torch.zeros(1, 6, 3))


@pytest.mark.parametrize(("length", "unwritten"), [(1, 0.25), (2, 0.9)])
def test_training_needs_images_to_write_and_others_to_predict(length: int, unwritten: float):
    model = shaken(replace(CONFIG, memory=replace(CONFIG.memory, unwritten=unwritten)))
    with pytest.raises(UserError, match=f"an episode of {length}, .* writes none"):
        model(torch.zeros(2, length, *CONFIG.image))
