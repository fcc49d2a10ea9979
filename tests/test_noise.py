"""Cues do to pixels what their names say."""

import pytest
import torch

from kanerva.evaluation.noise import (
    CUES,
    lower_half_hidden,
    make_cue,
    observed,
    poisson,
    salt_pepper,
    speckle,
)
from kanerva.seeding import stream


def test_salt_and_pepper_hits_a_tenth_evenly_and_whole_pixels():
    images = torch.full((50, 3, 40, 40), 0.5)
    noisy = salt_pepper(images, stream("t"))
    hit = noisy != 0.5
    assert hit.float().mean().item() == pytest.approx(0.1, abs=0.005)
    assert noisy[hit].mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(noisy[:, 0], noisy[:, 1]) and set(noisy[hit].tolist()) == {0.0, 1.0}


def test_speckle_scales_with_brightness():
    dark, grey = torch.zeros(4, 1, 20, 20), torch.full((4, 1, 20, 20), 0.4)
    assert torch.equal(speckle(dark, stream("t")), dark)
    assert speckle(grey, stream("t")).std().item() == pytest.approx(0.12, abs=0.01)


def test_poisson_has_the_spread_of_counts():
    grey = torch.full((20, 1, 40, 40), 0.3)
    noisy = poisson(grey, stream("t"))
    assert noisy.mean().item() == pytest.approx(0.3, abs=0.01)
    assert noisy.var().item() == pytest.approx(0.03, abs=0.003)  # mean / peak


def test_the_lower_half_is_hidden():
    images = torch.ones(2, 1, 5, 4)
    hidden = lower_half_hidden(images, stream("t"))
    assert hidden[..., :2, :].min() == 1 and hidden[..., 2:, :].max() == 0


@pytest.mark.parametrize("name", list(CUES))
def test_cues_repeat_and_stay_on_the_range_of_pixels(name: str):
    images = torch.rand(2, 3, 1, 8, 8)
    cue = make_cue(name, images, stream("t"))
    assert cue.shape == images.shape and 0 <= cue.min() and cue.max() <= 1
    assert torch.equal(cue, make_cue(name, images, stream("t")))
    assert (name == "clean") == torch.equal(cue, images)


@pytest.mark.parametrize("name", sorted(CUES))
def test_what_a_cue_no_longer_shows_is_said(name: str):
    """Where a pixel is not observed, the cue does not depend on it; where it is hidden, say so."""
    images = torch.rand(2, 3, 1, 9, 6)
    seen = observed(name, images)
    if name != "lower_half_hidden":
        assert seen is None
        return
    assert seen is not None and seen.shape == (2, 3, 9, 6) and seen.sum() == 2 * 3 * 4 * 6
    hidden = torch.where(seen[:, :, None] == 0, 1 - images, images)
    a, b = (make_cue(name, x, torch.Generator().manual_seed(0)) for x in (images, hidden))
    assert torch.equal(a, b) and torch.equal(a * seen[:, :, None], images * seen[:, :, None])
