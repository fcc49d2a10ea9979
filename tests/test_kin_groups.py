"""Large memories: what is not stored is predicted from groups of blocks that are alike."""

import math

import pytest
import torch
from torch import Tensor

from kanerva import Memory
from kanerva.memory.kin import NEW, UNLIKE, most_alike
from kanerva.models import reads_kin
from kanerva.models.kpp_bits import KppBits
from test_kin import SMALL, check_independent_terms, every_image, gist_bits, make, seeded

HELD = [3, 77, 130, 200, 300, 511, 17]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> KppBits:
    """Groups have two blocks."""
    monkeypatch.setattr(reads_kin, "GROUP", 2)
    return make(SMALL)


@pytest.fixture
def memory(model: KppBits) -> Memory:
    """Six blocks, of which one stores only a part of its pixels and one only its gist."""
    memory = model.write(every_image()[HELD]).free(2)
    return memory.shrink(int(gist_bits(memory, 1)) + 5, 1).shrink(int(gist_bits(memory, 3)), 3)


def nearest(numbers: list[Tensor], index: int) -> int:
    """The index of the tensor that is nearest to one of them, itself excepted."""
    apart = [float((one - numbers[index]).norm()) for one in numbers]
    apart[index] = math.inf
    return min(range(len(numbers)), key=apart.__getitem__)


def read_slowly(model: KppBits, memory: Memory) -> list[Tensor]:
    """What is read from memories of two blocks: each block of a memory with that nearest to it,
    in order of cells."""
    handles = in_order(memory)
    alone = [model._read_kin(memory.as_batch(), handle) for handle in handles]
    found = []
    for i in range(len(handles)):
        pair = (handles[i], handles[nearest(alone, i)])
        few = memory.free(*[handle for handle in handles if handle not in pair])
        found.append(model._read_kin(few.as_batch()))
    return found


def resembled(model: KppBits, memory: Memory, images: Tensor) -> Tensor:
    """For each image, the two blocks (in order of cells) that alone say most nearly what a memory
    of the image says."""
    alone = [model._read_kin(memory.as_batch(), handle) for handle in in_order(memory)]
    of_images = [model._read_kin(model.write(image[None]).as_batch()) for image in images]
    apart = [[float((one - own).norm()) for one in alone] for own in of_images]
    return torch.tensor(apart).topk(2, largest=False).indices


def in_order(memory: Memory) -> list[int]:
    """Handles in order of cells, in which blocks are read."""
    return [int(one) for one in memory.require_slots() if one >= 0]


def log_like_slowly(model: KppBits, memory: Memory, images: Tensor) -> Tensor:
    """The mixture from memories of one and of two blocks."""
    each = [model.log_like(kin, images[None])[0] for kin in read_slowly(model, memory)]
    return torch.stack(each).logsumexp(dim=0) - math.log(len(each))


@torch.no_grad()
def test_a_new_image_is_a_mixture_over_groups_which_adds_up_to_one(
    model: KppBits, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    every = every_image()
    like = log_like_slowly(model, memory, every)
    alone = model.log_alone(every[None])[0]
    expected = torch.logaddexp(like + math.log(1 - UNLIKE), alone + math.log(UNLIKE))
    terms = model._terms_new(memory.as_batch(), every[None])
    torch.testing.assert_close(terms.log_likelihood[0], expected, atol=1e-6, rtol=0)
    assert float(expected.logsumexp(dim=0).exp()) == pytest.approx(1, abs=1e-9)
    assert float((like - alone).abs().max()) > 0.1  # the groups do say something
    assert torch.allclose(terms.key_kl, torch.tensor(math.log(6 / NEW + 1)).double())
    monkeypatch.setattr(reads_kin, "TRIED", 2)  # two of six terms
    few = every[::37]
    fewer = model._terms_new(memory.as_batch(), few[None]).log_likelihood[0]
    each = torch.stack([model.log_like(kin, few[None])[0] for kin in read_slowly(model, memory)])
    some = resembled(model, memory, few)
    assert len(some.unique(dim=0)) > 3
    like = each.T.gather(1, some).logsumexp(dim=1) - math.log(6)
    expected = torch.logaddexp(like + math.log(1 - UNLIKE), alone[::37] + math.log(UNLIKE))
    torch.testing.assert_close(fewer, expected, atol=1e-6, rtol=0)
    assert bool((fewer <= terms.log_likelihood[0, ::37] + 1e-9).all())


@torch.no_grad()
def test_with_independent_pixels_the_group_is_a_part_of_the_key(
    model: KppBits, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    new = NEW / (NEW + 6)  # the memory holds six blocks
    cases: list[tuple[Tensor | None, float]] = [(None, new * UNLIKE)]
    cases += [(kin, new * (1 - UNLIKE) / 6) for kin in read_slowly(model, memory)]
    images = every_image()[[5, 100, 341]]
    check_independent_terms(model, memory, images, cases)
    monkeypatch.setattr(reads_kin, "TRIED", 2)  # the others are left out, but shares stay
    some = resembled(model, memory, images[:1])[0]
    few = [cases[0], *[cases[1 + int(at)] for at in some]]
    check_independent_terms(model, memory, images[[0, 0]], few)


@torch.no_grad()
def test_large_and_small_memories_of_a_batch_are_scored_as_alone(model: KppBits, memory: Memory):
    images = every_image()[[5, 100, 341]]
    small = memory.free(0, 1, 3, 4)
    both = model._terms_new(Memory.stack([memory, small]), images.expand(2, -1, -1, -1, -1))
    for row, one in enumerate((memory, small)):
        found = model._terms_new(one.as_batch(), images[None])
        torch.testing.assert_close(both.nll_nats[row], found.nll_nats[0], atol=1e-6, rtol=0)
    three = [memory.free(*in_order(memory)), small, memory.free(0)]  # with 0, 2 and 5 blocks
    noise, alone = seeded(0), seeded(0)
    terms = model.independent_terms(
        images.expand(3, -1, -1, -1, -1), Memory.stack(three), generator=noise
    )
    for row, one in enumerate(three):  # one memory after the other, with the same noise
        found = model.independent_terms(images, one, generator=alone)
        torch.testing.assert_close(terms.nll_nats[row], found.nll_nats, atol=1e-5, rtol=0)
    read = model._read_kin(small.as_batch())[:, None]
    together = model.terms_beside(reads_kin.Kin(read, 1, torch.tensor([2])), images[None])
    assert torch.equal(both.nll_nats[1], together.nll_nats[0])  # a small memory is read as one


@torch.no_grad()
def test_scoring_new_images_keeps_nothing_for_gradients(model: KppBits, memory: Memory):
    """A graph would grow with images times groups: gigabytes, in a large memory."""
    images, kept = every_image()[:4], []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model._terms_new(memory.as_batch(), images[None])
        model.independent_terms(images, memory)
    assert not kept


def test_an_image_that_is_left_out_is_scored_by_the_groups_of_the_others(model: KppBits):
    images = every_image()[HELD]
    left = model.left_out(images)
    shorter = model._terms_new(model.write(images[:-1]).as_batch(), images[None, -1:])
    torch.testing.assert_close(left.nll_nats[-1:], shorter.nll_nats[0], atol=1e-5, rtol=0)
    again = model.left_out(torch.stack([images, images.flip(0)]))
    torch.testing.assert_close(again.nll_nats[0], left.nll_nats, atol=1e-5, rtol=0)


@torch.no_grad()
def test_new_images_of_a_large_memory_are_each_like_one_group(model: KppBits, memory: Memory):
    groups = [kin[0] for kin in read_slowly(model, memory)]
    other = model.write(every_image()[[1, 50, 99, 203, 411]])
    batch = Memory.stack([memory, memory.free(*in_order(memory)[1:]), other])
    found = model._expect(batch, 300, None, seeded(0))
    of_other = [kin[0] for kin in read_slowly(model, other)]
    for row, all_groups in ((found[0], groups), (found[2], of_other)):
        apart = torch.cdist(row.flatten(1), torch.stack(all_groups).flatten(1))
        assert float(apart.amin(dim=1).max()) < 0.05
        same = (apart < 0.05).double()  # a group may come twice
        chosen = (same / same.sum(dim=1, keepdim=True)).sum(dim=0) / 300
        assert float((chosen - 1 / len(all_groups)).abs().max()) < 5 * math.sqrt(0.25 / 300)
    only = model._read_kin(memory.as_batch(), in_order(memory)[0])
    assert torch.allclose(found[1], only.expand(300, -1, -1, -1), atol=1e-5)
    for how in ({}, {"sample_pixels": True}):
        new = model.generate(memory, 5, generator=seeded(1), **how)
        assert new.shape == (5, 1, 3, 3)
        assert torch.equal(new, model.generate(memory, 5, generator=seeded(1), **how))


def test_the_most_alike_are_the_nearest_and_a_block_is_in_its_own_group():
    expected = torch.tensor([0.0, 10.0, 0.1, 10.3, 5.0]).view(-1, 1, 1, 1)
    every = torch.arange(5)
    assert most_alike(expected, 2, every).tolist() == [[0, 2], [1, 3], [2, 0], [3, 1], [4, 2]]
    assert most_alike(expected, 2, every[[3, 0]]).tolist() == [[3, 1], [0, 2]]
    same = torch.zeros(4, 1, 1, 1)  # equal blocks: each is still in its own group
    assert most_alike(same, 2, every[:4])[:, 0].tolist() == [0, 1, 2, 3]
    assert most_alike(same, 9, every[:4]).shape == (4, 4)
