"""What a store finds: damage as it is named, and answers judged as they should be."""

import numpy as np
import pytest
import torch

from kanerva.lab.experiments import damage, store_search


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
    assert damage.auroc(np.array([0.1, 0.2]), np.array([0.2, 0.3])) == pytest.approx(0.875)


def test_nobody_finds_more_than_bayes_rule_with_the_images_themselves():
    noise = torch.Generator().manual_seed(0)
    held = torch.bernoulli(torch.full((50, 64), 0.5), generator=noise)
    cues = damage.folded(held.view(50, 1, 8, 8), 0.6, noise)
    best = [store_search.likeliest(held, cue, 0.6) == n for n, cue in enumerate(cues)]
    near = damage.nearest_visible(held, cues.flatten(1), torch.ones(64))
    assert sum(best) > sum(n == m for n, m in enumerate(near)) and sum(best) > 25
    seen = torch.arange(64) < 40
    hidden = damage.nearest_visible(held, held * seen, seen.float())
    assert hidden == list(range(50))
