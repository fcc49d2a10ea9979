"""Configs: every default once, and a typo is an error that names itself."""

import json
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from kanerva.config import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    KeyConfig,
    LikelihoodConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ReadoutConfig,
    RunConfig,
    from_dict,
    to_dict,
)
from kanerva.errors import UserError
from kanerva.presets import preset


def test_a_config_survives_a_trip_through_json():
    config = RunConfig(
        image=(3, 10, 7),
        encoder=EncoderConfig(blocks=(1, 2, 1, 3), shift=0.25),
        memory=MemoryConfig(reads=3),
        likelihood=LikelihoodConfig(kind="logistic_mixture"),
        data=DataConfig(set="images", binarization="none", folder="pictures"),
        optim=OptimConfig(betas=(0.5, 0.9)),
        steps=7,
    )
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_a_model_config_survives_too(tiny: ModelConfig):
    assert from_dict(ModelConfig, to_dict(tiny)) == tiny


def test_to_dict_holds_plain_types_only(tiny: ModelConfig):
    assert to_dict(tiny)["image"] == [1, 8, 8]  # YAML has no tuples
    assert to_dict(tiny)["encoder"]["blocks"] == [1, 1, 1, 1]


def test_an_empty_mapping_gives_the_defaults():
    assert from_dict(RunConfig, {}) == RunConfig()
    assert from_dict(RunConfig, {"memory": {}}) == RunConfig()


@pytest.mark.parametrize(
    "data, names",
    [
        ({"memorry": {}}, ["memorry", "memory"]),  # the typo, and what is known
        ({"memory": {"sise": 8}}, ["sise", "memory", "size"]),
        ({"encoder": {"blocks": [2, 2, 2], "width": 8}}, ["blocks", "[2, 2, 2]"]),
        ({"encoder": {"blocks": [2, 2, 2, 2.5]}}, ["blocks", "2.5"]),
        ({"encoder": {"width": "64"}}, ["width", "'64'"]),
        ({"encoder": {"width": 64.0}}, ["width", "64.0"]),
        ({"encoder": {"width": True}}, ["width", "True"]),
        ({"encoder": {"shift": "a"}}, ["shift", "'a'"]),
        ({"encoder": {"shift": False}}, ["shift", "False"]),
        ({"encoder": None}, ["encoder", "None"]),
        ({"image": 28}, ["image", "28"]),
        ({"image": [1, 28]}, ["image", "[1, 28]"]),
        ({"model": "gpt"}, ["model", "'gpt'", "kpp-paper"]),
        ({"model": ["kpp-paper"]}, ["model", "kpp-paper"]),
        ({"likelihood": {"kind": "gauss"}}, ["kind", "'gauss'", "bernoulli", "logistic_mixture"]),
        ({"data": {"set": "mnsit"}}, ["set", "mnsit", "omniglot"]),
        ({"data": {"folder": 3}}, ["folder", "3"]),
        ({"steps": "many"}, ["steps", "many"]),
        ({"precision": "16"}, ["precision", "'16'", "bf16-mixed"]),
        (["memory"], ["mapping", "memory"]),
    ],
)
def test_unknown_and_ill_typed_values_are_errors_that_name_them(data: object, names: list[str]):
    with pytest.raises(UserError) as error:
        from_dict(RunConfig, data)
    assert all(name in str(error.value) for name in names), str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_says_where_the_config_came_from():
    with pytest.raises(UserError, match="runs/a/config.json: memory: unknown key 'sise'"):
        from_dict(ModelConfig, {"memory": {"sise": 8}}, where="runs/a/config.json")


def test_a_whole_number_passes_for_a_float_and_null_for_an_optional():
    config = from_dict(RunConfig, {"optim": {"lr": 1}, "steps": None, "data": {"folder": None}})
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float)
    assert config.steps is None and config.data.folder is None


@pytest.mark.parametrize(
    "cls, options, value",
    [
        (EncoderConfig, {"width": 0}, "0"),
        (EncoderConfig, {"shift": 0.6}, "0.6"),
        (EncoderConfig, {"shift": -0.1}, "-0.1"),
        (EncoderConfig, {"blocks": (2, 0, 2, 2)}, "(2, 0, 2, 2)"),
        (MemoryConfig, {"reads": -1}, "-1"),
        (MemoryConfig, {"block": 65}, "65"),
        (KeyConfig, {"layers": 0}, "0"),
        (ReadoutConfig, {"size": 0}, "0"),
        (DecoderConfig, {"layers": 0}, "0"),
        (LikelihoodConfig, {"components": 0}, "0"),
        (ModelConfig, {"image": (1, 0, 28)}, "(1, 0, 28)"),
        (
            ModelConfig,
            {"image": (2, 8, 8), "likelihood": LikelihoodConfig(kind="logistic_mixture")},
            "2",
        ),
        (OptimConfig, {"lr": 0.0}, "0.0"),
        (OptimConfig, {"ema": 1.0}, "1.0"),
        (OptimConfig, {"weight_decay": -1.0}, "-1.0"),
        (RunConfig, {"episode_length": 0}, "0"),
        (RunConfig, {"steps": 0}, "0"),
        (RunConfig, {"validate_episodes": 0}, "0"),
    ],
)
def test_values_out_of_range_are_errors_that_give_the_value(cls: type, options: dict, value: str):
    with pytest.raises(UserError) as error:
        cls(**options)
    assert f"{value}" in str(error.value)


def test_the_edges_of_a_range_are_inside_it():
    assert EncoderConfig(shift=0.0).shift == 0 and EncoderConfig(shift=0.5).shift == 0.5
    assert MemoryConfig(size=16, block=16).block == 16
    assert OptimConfig(ema=0.0, weight_decay=0.0, warmup_epochs=0.0).ema == 0


# Fails: `_positive` asks `value <= 0`, which is False for nan (config.py:18).
def test_a_learning_rate_that_is_no_number_is_an_error():
    with pytest.raises(UserError, match="nan"):
        OptimConfig(lr=float("nan"))


def test_a_config_cannot_change_after_its_checks():
    with pytest.raises(FrozenInstanceError):
        MemoryConfig().size = 1  # pyright: ignore


def test_config_hash_ignores_what_does_not_change_the_training():
    run = RunConfig()
    same = [
        replace(run, seed=1),
        replace(run, preset="other"),
        replace(run, log_every=1),
        replace(run, data=replace(run.data, folder="elsewhere")),
    ]
    assert {other.config_hash() for other in same} == {run.config_hash()}


def test_config_hash_notices_everything_else():
    run = RunConfig()
    others = [
        replace(run, episode_length=16),
        replace(run, batch=4),
        replace(run, steps=10),
        replace(run, precision="bf16-mixed"),
        replace(run, memory=replace(run.memory, reads=3)),
        replace(run, optim=replace(run.optim, lr=1e-3)),
        replace(run, data=replace(run.data, binarization="threshold")),
    ]
    hashes = {other.config_hash() for other in [run, *others]}
    assert len(hashes) == len(others) + 1


def test_a_checkpoint_carries_the_model_part_of_a_run(tiny: ModelConfig):
    parts = {f.name: getattr(tiny, f.name) for f in fields(ModelConfig)}
    run = RunConfig(**parts, episode_length=5, seed=3)
    assert run.model_config() == tiny
    assert type(run.model_config()) is ModelConfig


def test_an_outline_is_of_8_bit_pixels_and_kpps_own():
    outline = MemoryConfig(reads=1, outline=True)
    mixture = LikelihoodConfig(kind="logistic_mixture")
    ModelConfig(model="kpp", memory=outline, likelihood=mixture)
    with pytest.raises(UserError, match="8-bit"):
        ModelConfig(model="kpp", memory=outline)
    with pytest.raises(UserError, match="memory.outline=True is for kpp"):
        ModelConfig(memory=outline, likelihood=mixture)


def test_a_hash_without_an_outline_is_as_it_was_before_there_was_one():
    plain = preset("cifar10")
    outlined = replace(plain, memory=replace(plain.memory, outline=not plain.memory.outline))
    assert plain.config_hash() != outlined.config_hash()
    without = plain if not plain.memory.outline else outlined
    record = Path(__file__).parents[1] / "results/cifar10/kpp-try-near-s0.json"
    flags = {"neighbours": 3, "sketch": 1.0, "near_width": 192}
    tried = replace(
        without,
        memory=replace(without.memory, capacity=36, noise=0.05),
        readout=replace(without.readout, size=32),
        decoder=replace(without.decoder, **flags),
        **{"batch": 8, "steps": 3000, "validate_every": 1000, "precision": "bf16-mixed"},
    )
    assert tried.config_hash() == json.loads(record.read_text())["config_hash"]
