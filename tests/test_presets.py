"""Presets: one for each data set, model and setting; `kpp` is what one gets without asking."""

from dataclasses import replace

import pytest

from kanerva.cli.train import named
from kanerva.errors import UserError
from kanerva.models import Kpp, KppPaper, build
from kanerva.presets import PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_default_is_the_store(name: str):
    run = preset(name)
    assert (run.model, run.variant) == ("kpp", "store") and run == preset(name, "kpp", "store")
    assert run.memory.shape == (3, 64, 64) and run.memory.read == "hard"
    assert run.episode_length <= run.memory.capacity
    assert run.data.set == preset(name, "kpp-paper").data.set == name
    assert isinstance(build(run.model_config()), Kpp)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_generate_keeps_no_more_floats_than_store(name: str):
    run = preset(name, variant="generate")
    assert run.memory.placement == "transport" and run.memory.read == "soft"
    assert run.memory.channels * run.memory.size**2 <= 3 * 64 * 64
    assert isinstance(build(run.model_config()), Kpp)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("variant", ["store", "generate"])
def test_pixels_of_8_bits_see_their_neighbours_and_binary_ones_need_not(name: str, variant: str):
    run = preset(name, variant=variant)
    levels = run.likelihood.kind == "logistic_mixture"
    assert (run.decoder.neighbours > 0) == levels == (run.optim.clip > 10)
    assert not levels or run.readout.size == 0


def test_images_of_another_size_have_the_settings_of_that_size():
    small, large, wide = (preset("images", image=(3, *s)) for s in ((32, 32), (64, 64), (32, 64)))
    assert small == preset("images") and small.memory.outline
    for run in (large, wide):
        assert not run.memory.outline and run.batch == 2
    assert large == replace(preset("mazes"), preset="images", data=small.data)
    flags = ["--preset", "images", "--image", "[3, 64, 64]"]
    assert named("images", flags) == named("images", [], {"image": [3, 64, 64]}) == large
    for wrong in ("[3, 64", "64", "[3, 64]", "[3, 64, x]"):  # for the parser to refuse
        assert named("images", ["--image", wrong]) == small


def test_the_printed_model_is_as_printed():
    run = preset("mnist", "kpp-paper")
    assert run.variant is None and run.memory.reads == 2 and run.optim.optimiser == "lars_adam"
    assert isinstance(build(run.model_config()), KppPaper)


@pytest.mark.parametrize(
    "names, complaint",
    [
        (("mnsit",), "mnsit"),
        (("mnist", "gpt"), "gpt"),
        (("mnist", "kpp", "shop"), "shop"),
        (("mnist", "kpp-paper", "store"), "no variants"),
    ],
)
def test_a_typo_is_named(names: tuple[str, ...], complaint: str):
    with pytest.raises(UserError, match=complaint):
        preset(*names)
