"""Presets: one for each data set, model and setting; `kpp` is the default model."""

from dataclasses import replace

import pytest

from kanerva.cli.train import named_preset, peek
from kanerva.config import MODEL_CONFIGS, KppConfig, KppPaperConfig, RunConfig
from kanerva.data.registry import DATASETS
from kanerva.errors import UserError
from kanerva.models import build
from kanerva.models.kpp import Kpp
from kanerva.models.kpp_paper import KppPaper
from kanerva.presets import PRESETS, preset, with_options


def kpp(run: RunConfig) -> KppConfig:
    assert isinstance(run.model, KppConfig)
    return run.model


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_default_is_the_store(name: str):
    run = preset(name)
    assert (run.model.name, run.variant) == ("kpp", "store")
    assert run == preset(name, "kpp", "store")
    assert kpp(run).memory.shape == (3, 64, 64)
    assert run.episode_length <= kpp(run).memory.capacity
    assert run.data.set == preset(name, "kpp-paper").data.set == name
    assert isinstance(build(run.model), Kpp)


def test_a_retired_variant_is_refused_with_what_to_use_instead():
    with pytest.raises(UserError, match="generate was retired; kpp-bits makes new images"):
        preset("mnist", variant="generate")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_pixels_of_8_bits_see_their_neighbours_and_binary_ones_need_not(name: str):
    run = preset(name)
    levels = run.model.likelihood == "logistic_mixture"
    assert (kpp(run).decoder.neighbours > 0) == levels == (run.optim.clip > 10)
    assert not levels or kpp(run).readout.size == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("model", MODEL_CONFIGS)
def test_every_model_has_a_run_on_every_data_set(name: str, model: str):
    if model.startswith("kpp-bits") and DATASETS[name].binarization == "none":
        with pytest.raises(UserError, match="pixels that are 0 or 1"):
            preset(name, model)
        return
    run = preset(name, model)
    assert (run.model.name, run.preset, run.data.set) == (model, name, name)
    assert run.variant == ("store" if model == "kpp" else None)


def test_your_own_images_have_a_size_for_a_cpu():
    full, small = preset("images"), preset("images", size="small")
    assert preset("images", size="full") == full
    images = [run.steps * run.batch * run.episode_length for run in (full, small)]
    assert 20 * images[1] < images[0] and kpp(small).encoder.width < kpp(full).encoder.width
    on_cpu = peek(["--preset", "images", "--device", "cpu"])
    assert named_preset("images", on_cpu, {}) == small
    asked = peek(["--preset", "images", "--device", "cpu", "--size", "full"])
    assert named_preset("images", asked, {}) == full
    for name, model in (("mnist", "kpp"), ("images", "kpp-paper")):
        with pytest.raises(UserError, match="size=small"):
            preset(name, model, size="small")
    with pytest.raises(UserError, match="there are small, full"):
        preset("images", size="huge")


def test_images_of_another_size_have_the_settings_of_that_size():
    small, large, wide = (preset("images", image=(3, *s)) for s in ((32, 32), (64, 64), (32, 64)))
    assert small == preset("images") and kpp(small).memory.outline
    for run in (large, wide):
        assert not kpp(run).memory.outline and run.batch == 2
    assert large == replace(preset("mazes"), preset="images", data=small.data)
    full = ["--size", "full"]  # not what fits the device
    asked, nothing = peek(["--preset", "images", "--image", "[3, 64, 64]", *full]), peek(full)
    assert named_preset("images", asked, {}) == large
    assert named_preset("images", nothing, {"image": [3, 64, 64]}) == large
    for wrong in ("[3, 64", "64", "[3, 64]", "[3, 64, x]"):  # for the full parser to refuse
        assert named_preset("images", peek(["--image", wrong, *full]), {}) == small


def test_the_printed_model_is_as_printed():
    run = preset("mnist", "kpp-paper")
    assert isinstance(run.model, KppPaperConfig) and run.model.memory.reads == 2
    assert run.variant is None and run.optim.optimiser == "lars_adam"
    assert isinstance(build(run.model), KppPaper)


@pytest.mark.parametrize(
    "name", ["glyphs", "mnist", "omniglot", "fashion_mnist", "cifar10", "mazes"]
)
@pytest.mark.parametrize("model", ["kpp-paper", "vae", "dkm"])
def test_strong_is_the_printed_model_trained_as_kpp_is(name: str, model: str):
    run, printed, ours = preset(name, model, "strong"), preset(name, model), preset(name)
    assert run.model == with_options(printed.model, readout={"spectral_norm": False})
    assert (run.model == printed.model) == (model == "dkm") and run.variant == "strong"
    assert run.optim == ours.optim and run.episode_length == printed.episode_length
    images = [one.batch * one.episode_length for one in (run, ours)]
    assert images[0] == images[1] and run.steps >= ours.steps
    assert (run.data.augment == "affine") == (name == "omniglot")


@pytest.mark.parametrize(
    "names, complaint",
    [
        (("mnsit",), "mnsit"),
        (("mnist", "gpt"), "gpt"),
        (("mnist", "kpp", "shop"), "shop"),
        (("mnist", "kpp-paper", "store"), "there are strong"),
        (("mnist", "kpp-empty", "strong"), "there are none"),
    ],
)
def test_a_typo_is_named(names: tuple[str, ...], complaint: str):
    with pytest.raises(UserError, match=complaint):
        preset(*names)
