"""The same weights in another memory: only the grid around the blocks changes."""

from dataclasses import replace

import pytest
import torch

from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.evaluation.resized import Elsewhere
from kanerva.models import Kpp, KppPaper, build
from kanerva.presets import preset


@pytest.fixture
def run() -> RunConfig:
    start = preset("glyphs")
    return replace(
        start,
        encoder=replace(start.encoder, width=8, depth=1),
        memory=replace(start.memory, size=12, capacity=9),  # blocks of 4x4
        decoder=replace(start.decoder, base=16, depth=1),
        episode_length=6,
    )


def test_blocks_and_images_stay_the_same(run: RunConfig):
    """Nine cells of a 12x12 memory, or 64 of a 32x32 one: the same blocks, read the same."""
    model = build(run.model_config()).eval()
    config, moved = Elsewhere(episode_length=50, capacity=64, size=32).moved(run, model)
    assert (config.episode_length, config.memory.capacity, config.memory.size) == (50, 64, 32)
    images = torch.bernoulli(torch.full((6, 1, 28, 28), 0.4))
    torch.testing.assert_close(moved.reconstruct(images), model.reconstruct(images))
    here, there = model.elbo(images, sample=False), moved.elbo(images, sample=False)
    torch.testing.assert_close(here.log_likelihood, there.log_likelihood)
    torch.testing.assert_close(there.key_kl, torch.full((6,), 64.0).log())
    many = torch.bernoulli(torch.full((50, 1, 28, 28), 0.4))
    assert isinstance(moved, Kpp) and len(moved.write(many)) == 50


def test_blocks_of_another_size_are_refused_by_name(run: RunConfig):
    model = build(run.model_config())
    with pytest.raises(
        UserError, match=r"takes blocks \(3, 8, 8\); these weights write \(3, 4, 4\)"
    ):
        Elsewhere(size=24).moved(run, model)


def test_what_is_not_given_stays(run: RunConfig):
    config, _ = Elsewhere(episode_length=3).moved(run, build(run.model_config()))
    assert config == replace(run, episode_length=3)


def test_the_printed_model_has_no_blocks_to_move():
    run = preset("glyphs", "kpp-paper")
    model = build(run.model_config())
    assert isinstance(model, KppPaper)
    with pytest.raises(UserError, match="kpp-paper cannot"):
        Elsewhere(size=32).moved(run, model)
