"""What a store finds: damage as it is named, and answers judged as they should be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kanerva.errors import UserError
from kanerva.lab.experiments import (
    Lab,
    associative,
    damage,
    deformed,
    experiment,
    store_scale,
    store_search,
)
from kanerva.store.store import Store


def test_damage_is_what_its_name_says():
    noise = torch.Generator().manual_seed(0)
    images = torch.bernoulli(torch.full((200, 1, 8, 8), 0.5), generator=noise)
    assert damage.salt_pepper(images, 0.5, noise).ne(images).float().mean() == pytest.approx(
        0.25, abs=0.03
    )
    spread = damage.gaussian(images, 0.7, noise) - images
    assert float(spread.std()) == pytest.approx(0.7, abs=0.03)
    shown = damage.folded(images, 1.0, noise)
    assert float(shown.min()) >= 0 and float(shown.max()) == 1
    assert float((shown[images == 1] == 1).float().mean()) == pytest.approx(0.523, abs=0.03)
    moved = damage.moved(images, 2, -1)
    assert torch.equal(moved[..., 2:, :-1], images[..., :-2, 1:])
    assert float(moved[..., :2, :].abs().sum() + moved[..., -1].abs().sum()) == 0
    assert damage.box((8, 10), (0, 0.5), (0.5, 1)).sum() == 20


def test_probabilities_are_judged_by_how_often_they_are_right():
    chance = np.random.default_rng(1)
    said = chance.random(20_000)
    calibrated = damage.reliability(said, chance.random(20_000) < said)
    assert damage.calibration_error(calibrated) < 0.02
    assert damage.error_by_chance(said) < 0.02
    assert damage.error_by_chance(said[:100]) > 0.05  # few answers cannot show it
    boastful = damage.reliability(np.full(100, 0.9), np.arange(100) < 40)
    assert boastful == [{"count": 100, "said": pytest.approx(0.9), "right": 0.4}]
    assert damage.calibration_error(boastful) == pytest.approx(0.5)


def test_nobody_finds_more_than_bayes_rule_with_the_images_themselves():
    noise = torch.Generator().manual_seed(0)
    held = torch.bernoulli(torch.full((50, 64), 0.5), generator=noise)
    cues = damage.folded(held.view(50, 1, 8, 8), 0.6, noise)
    best = [store_search.likeliest(held, cue, 0.6) == n for n, cue in enumerate(cues)]
    near = damage.nearest_visible(held, cues.flatten(1), torch.ones(64))
    assert sum(best) > int((near == torch.arange(50)).sum()) and sum(best) > 25


def test_the_nearest_on_visible_pixels_has_the_least_squared_error_on_them():
    """One mask for all cues, one for each, and one cue alone in numpy."""
    noise = torch.Generator().manual_seed(0)
    held, cues = torch.rand(30, 64, generator=noise), torch.rand(9, 64, generator=noise)
    masks = (torch.rand(9, 64, generator=noise) < 0.3).float()
    for seen in (masks[0], masks):
        error = ((cues[:, None] - held).square() * seen.expand(9, 64)[:, None]).sum(dim=2)
        found = damage.nearest_visible(held, cues * seen, seen)
        assert torch.equal(found, error.argmin(dim=1))
    for cue, seen, row in zip(cues.numpy(), masks.numpy(), found.tolist(), strict=True):
        assert damage.nearest_alone(held.numpy(), cue, seen) == row


@pytest.mark.parametrize("protocol", associative.PROTOCOLS, ids=lambda p: p.name)
def test_a_protocol_damages_and_judges(protocol: associative.Protocol):
    noise = torch.Generator().manual_seed(0)
    images = torch.rand(30, 3, 8, 8, generator=noise)
    cues, seen = protocol.damage(images, noise)
    assert cues.shape == images.shape and not torch.equal(cues, images)
    if seen is not None:
        mask = seen.expand(30, 8, 8)[:, None].expand_as(cues) > 0
        assert torch.equal(cues[mask], images[mask]) and cues[~mask].unique().numel() == 1
        assert 0.2 < float(mask.float().mean()) < 0.6
    assert protocol.correct(images, images) == 1.0
    assert protocol.correct(images + 1, images) == 0.0


def test_rules_find_what_is_held():
    noise = torch.Generator().manual_seed(0)
    held = torch.bernoulli(torch.full((20, 256), 0.5), generator=noise)
    for rule in (associative.by_euclid, associative.by_manhattan):
        assert rule(held, held).tolist() == list(range(20))
    memory = associative.SparseDistributedMemory(held[:3])
    assert torch.equal(memory.read(held[:3]), held[:3])
    flipped = torch.where(torch.rand(3, 256, generator=noise) < 0.1, 1 - held[:3], held[:3])
    assert (memory.read(flipped) != held[:3]).float().mean() < 0.02


def test_deformed_images_are_alike_yet_none_is_another():
    noise = torch.Generator().manual_seed(0)
    originals = (255 * torch.rand(7, 1, 7, 7, generator=noise).repeat_interleave(4, 2)).byte()
    originals = originals.repeat_interleave(4, 3)
    images = deformed.deformed_chunk(originals, 3)
    assert torch.equal(images, deformed.deformed_chunk(originals, 3))
    assert len(images.flatten(1).unique(dim=0)) == len(images) == deformed.CHUNK
    first = torch.arange(3 * deformed.CHUNK, 4 * deformed.CHUNK) % 7
    means = torch.stack([images[first == n].mean(dim=0) for n in range(7)]).flatten(1)
    near = torch.cdist(means, originals.float().flatten(1) / 255).argmin(dim=1)
    assert near.tolist() == list(range(7))


def test_an_exact_search_finds_what_the_store_does(tmp_path):
    with Store(tmp_path / "held.kanerva", model="glyphs") as store:
        noise = torch.Generator().manual_seed(0)
        images = torch.bernoulli(torch.full((30, 1, 28, 28), 0.3), generator=noise)
        ids = store.add(images)
        found, times = store_scale.exact_search(store, images[:5])
        assert found == ids[:5] and times["wall_s"] > 0
        assert store_scale.count_alike(store) == 0
        store.add(images[:1])
        assert store_scale.count_alike(store) == 1


def test_store_scale_may_hold_few_images_and_says_if_times_are_lost(tmp_path: Path):
    def lab(steps: int) -> Lab:
        return Lab(quick=True, runs=tmp_path, steps=steps)

    figures = experiment("store-scale").run(lab(7)).figures
    assert figures["held"] == figures["cues"] == 7
    figures = experiment("store-scale").run(lab(3)).figures  # the store of the first run
    assert figures["held"] == 7 and figures["cues"] == 3
    times = tmp_path / "store-scale-glyphs.json"
    times.unlink()
    with pytest.raises(UserError, match="store-scale-glyphs.json .* is missing: delete the store"):
        experiment("store-scale").run(lab(7))
