"""The same weights in another memory: only the grid around the blocks changes."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from kanerva.config import KppConfig, RunConfig
from kanerva.errors import UserError
from kanerva.evaluation.resized import ResizedMemory
from kanerva.models import build
from kanerva.presets import preset, with_options


@pytest.fixture
def run() -> RunConfig:
    start = preset("glyphs")
    model = with_options(
        start.model,
        encoder={"width": 8, "depth": 1},
        memory={"size": 12, "capacity": 9},  # blocks of 4x4
        decoder={"base": 16, "depth": 1},
    )
    return replace(start, model=model, episode_length=6)


def test_blocks_and_images_stay_the_same(run: RunConfig):
    """Nine cells of a 12x12 memory, or 64 of a 32x32 one: the same blocks, read the same."""
    model = build(run.model).eval()
    config, other = ResizedMemory(episode_length=50, capacity=64, size=32).apply(run, model)
    memory = cast(KppConfig, config.model).memory
    assert (config.episode_length, memory.capacity, memory.size) == (50, 64, 32)
    assert other.config == config.model
    images = torch.bernoulli(torch.full((6, 1, 28, 28), 0.4))
    torch.testing.assert_close(other.reconstruct(images), model.reconstruct(images))
    here, there = model.elbo(images, sample=False), other.elbo(images, sample=False)
    torch.testing.assert_close(here.log_likelihood, there.log_likelihood)
    torch.testing.assert_close(there.key_kl, torch.full((6,), 64.0).log())
    many = torch.bernoulli(torch.full((50, 1, 28, 28), 0.4))
    assert len(other.write(many)) == 50


def test_blocks_of_another_size_are_refused_by_name(run: RunConfig):
    model = build(run.model)
    with pytest.raises(
        UserError, match=r"takes blocks \(3, 8, 8\); these weights write \(3, 4, 4\)"
    ):
        ResizedMemory(size=24).apply(run, model)


def test_what_is_not_given_stays(run: RunConfig):
    config, _ = ResizedMemory(episode_length=3).apply(run, build(run.model))
    assert config == replace(run, episode_length=3)


def test_the_printed_model_has_no_blocks_to_resize():
    run = preset("glyphs", "kpp-paper")
    with pytest.raises(UserError, match="kpp-paper cannot"):
        ResizedMemory(size=32).apply(run, build(run.model))
