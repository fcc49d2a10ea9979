"""Configs: every default once, and a mistake is an error that names itself."""

import hashlib
import json
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

import kanerva
from kanerva.config import (
    MODEL_CONFIGS,
    AddressedMatrixConfig,
    DataConfig,
    DecoderConfig,
    GridConfig,
    KeyConfig,
    KppConfig,
    KppDecoderConfig,
    KppMemoryConfig,
    KppPaperConfig,
    KppReadoutConfig,
    MatrixConfig,
    ModelConfig,
    OptimConfig,
    PaperMemoryConfig,
    PaperReadoutConfig,
    RunConfig,
    ShiftedResNetConfig,
    SlotsConfig,
    VaeConfig,
    VectorReadoutConfig,
    flatten,
    model_from_dict,
    option_names,
    run_from_dict,
    to_dict,
)
from kanerva.errors import UserError
from kanerva.presets import preset


def test_a_config_survives_a_trip_through_json():
    model = KppPaperConfig(
        image=(3, 10, 7),
        likelihood="logistic_mixture",
        encoder=ShiftedResNetConfig(shift=0.25),
        memory=PaperMemoryConfig(reads=3),
    )
    data = DataConfig(set="images", binarization="none", folder="pictures")
    config = RunConfig(model=model, data=data, optim=OptimConfig(ema=0.5), steps=7)
    assert run_from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_every_models_config_survives_too(name: str):
    model = preset("glyphs" if name.startswith("kpp-bits") else "cifar10", name).model
    assert model_from_dict(json.loads(json.dumps(to_dict(model)))) == model


def test_to_dict_holds_plain_types_only(tiny: KppPaperConfig):
    assert to_dict(tiny)["image"] == [1, 8, 8]  # YAML has no tuples
    assert to_dict(tiny)["model"] == "kpp-paper" == to_dict(RunConfig(model=tiny))["model"]


def test_a_name_alone_gives_the_defaults():
    assert run_from_dict({"model": "kpp"}) == RunConfig()
    assert run_from_dict({"model": "kpp", "memory": {}}) == RunConfig()
    assert model_from_dict({"model": "vae"}) == VaeConfig()


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_every_option_has_a_name_and_every_group_its_own(name: str):
    config = MODEL_CONFIGS[name]()
    assert option_names(type(config)) == [k for k in flatten(to_dict(config)) if k != "model"]
    for field in fields(config):
        group = getattr(config, field.name)
        assert not is_dataclass(group) or group.group == field.name  # pyright: ignore


@pytest.mark.parametrize(
    "data, names",
    [
        ({"memorry": {"size": 3}}, ["memorry.size", "memory.size"]),  # the typo, and the nearest
        ({"memory": {"sise": 8}}, ["memory.sise", "memory.size"]),
        ({"zzz": 1}, ["unknown option zzz", "known: ", "memory", "optim"]),
        ({1: 2}, ["unknown option 1"]),
        ({"memory": {"size": {"side": 8}}}, ["memory.size.side"]),
        ({"encoder": {"shift": 0.1}}, ["kpp does not use encoder.shift", "no-memory, dkm-tsm do"]),
        ({"rows": {"address": 3}}, ["kpp does not use rows.address (km does)"]),
        ({"rows": 3}, ["kpp does not use rows (km, dkm, dkm-tsm, dnc do)"]),
        ({"epochs": 3}, ["unknown option epochs; use steps"]),
        ({"step": "eager"}, ["unknown option step; use execution"]),
        ({"encoder": {"width": "64"}}, ["encoder", "width", "'64'"]),
        ({"encoder": {"width": 64.0}}, ["width", "64.0"]),
        ({"encoder": {"width": True}}, ["width", "True"]),
        ({"memory": {"noise": "a"}}, ["noise", "'a'"]),
        ({"memory": {"noise": False}}, ["noise", "False"]),
        ({"memory": {"outline": 1}}, ["outline", "1"]),
        ({"encoder": None}, ["encoder", "None"]),
        ({"image": 28}, ["image", "28"]),
        ({"image": [1, 28]}, ["image", "[1, 28]"]),
        ({"image": [1, 28, 2.5]}, ["image", "2.5"]),
        ({"model": "gpt"}, ["model", "'gpt'", "kpp-paper"]),
        ({"model": ["kpp-paper"]}, ["model", "kpp-paper"]),
        ({"model": None}, ["model", "None"]),
        ({"likelihood": "gauss"}, ["likelihood", "'gauss'", "bernoulli", "logistic_mixture"]),
        ({"likelihood": {"kind": "bernoulli"}}, ["likelihood.kind; use likelihood"]),
        ({"data": {"set": "mnsit"}}, ["set", "mnsit", "omniglot"]),
        ({"data": {"folder": 3}}, ["folder", "3"]),
        ({"steps": "many"}, ["steps", "many"]),
        ({"precision": "16"}, ["precision", "'16'", "bf16-mixed"]),
        (["memory"], ["mapping", "memory"]),
    ],
)
def test_unknown_and_ill_typed_values_are_errors_that_name_them(data: object, names: list[str]):
    with pytest.raises(UserError) as error:
        run_from_dict({"model": "kpp"} | data if isinstance(data, dict) else data)
    assert all(name in str(error.value) for name in names), str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_says_where_the_config_came_from():
    with pytest.raises(UserError, match="^runs/a/config.json: unknown option memory.sise; did"):
        model_from_dict({"model": "kpp", "memory": {"sise": 8}}, where="runs/a/config.json")


def test_a_checkpoint_holds_no_options_of_a_run():
    with pytest.raises(UserError, match="unknown option steps"):
        model_from_dict({"model": "kpp", "steps": 3})


def test_a_whole_number_passes_for_a_float_and_null_for_an_optional():
    config = run_from_dict({"model": "kpp", "optim": {"lr": 1}, "data": {"folder": None}})
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float)
    assert config.data.folder is None
    assert run_from_dict({"model": "kpp", "optim": {"lr": "1e-3"}}).optim.lr == 1e-3  # YAML's


@pytest.mark.parametrize(
    "cls, options, value",
    [
        (ShiftedResNetConfig, {"width": 0}, "0"),
        (ShiftedResNetConfig, {"shift": 0.6}, "0.6"),
        (ShiftedResNetConfig, {"shift": -0.1}, "-0.1"),
        (PaperMemoryConfig, {"reads": -1}, "-1"),
        (PaperMemoryConfig, {"block": 65}, "65"),
        (GridConfig, {"capacity": 37}, "use 36"),
        (GridConfig, {"capacity": 36, "size": 4}, "6 x 6"),
        (KppMemoryConfig, {"unwritten": 1.0}, "1.0"),
        (KeyConfig, {"hidden": 0}, "0"),
        (VectorReadoutConfig, {"size": 0}, "0"),
        (PaperReadoutConfig, {"prior_width": 0}, "0"),
        (KppReadoutConfig, {"size": 0, "channels": 0}, "both are 0"),
        (KppDecoderConfig, {"neighbours": -1}, "-1"),
        (DecoderConfig, {"layers": 0}, "0"),
        (MatrixConfig, {"noise": 0.0}, "0.0"),
        (AddressedMatrixConfig, {"address": 0}, "0"),
        (SlotsConfig, {"heads": 0}, "0"),
        (VaeConfig, {"image": (1, 0, 28)}, "(1, 0, 28)"),
        (VaeConfig, {"image": (2, 8, 8), "likelihood": "logistic_mixture"}, "2"),
        (KppDecoderConfig, {"near_width": 9}, "9"),
        (OptimConfig, {"lr": 0.0}, "0.0"),
        (OptimConfig, {"ema": 1.0}, "1.0"),
        (OptimConfig, {"weight_decay": -1.0}, "-1.0"),
        (OptimConfig, {"lr": float("nan")}, "nan"),
        (DataConfig, {"crop": 0}, "0"),
        (RunConfig, {"episode_length": 0}, "0"),
        (RunConfig, {"episode_length": 64}, "memory.capacity=36"),
        (RunConfig, {"steps": 0}, "0"),
        (RunConfig, {"validate_episodes": 0}, "0"),
    ],
)
def test_values_out_of_range_are_errors_that_give_the_value(cls: type, options: dict, value: str):
    with pytest.raises(UserError) as error:
        cls(**options)
    assert f"{value}" in str(error.value)


def test_the_edges_of_a_range_are_inside_it():
    assert ShiftedResNetConfig(shift=0.0).shift == 0 and ShiftedResNetConfig(shift=0.5).shift == 0.5
    assert PaperMemoryConfig(size=16, block=16).block == 16
    assert OptimConfig(ema=0.0, weight_decay=0.0, warmup_epochs=0.0).ema == 0


def test_a_config_cannot_change_after_its_checks():
    with pytest.raises(FrozenInstanceError):
        PaperMemoryConfig().size = 1  # pyright: ignore


def test_config_hash_ignores_what_does_not_change_the_training():
    run = RunConfig()
    same = [
        replace(run, seed=1),
        replace(run, preset="other"),
        replace(run, variant="store"),
        replace(run, log_every=1),
        replace(run, execution="eager"),
        replace(run, data=replace(run.data, folder="elsewhere")),
    ]
    assert {other.config_hash() for other in same} == {run.config_hash()}


def test_config_hash_notices_everything_else(tiny: KppPaperConfig):
    run = RunConfig(model=tiny)
    others = [
        replace(run, episode_length=16),
        replace(run, batch=4),
        replace(run, steps=10),
        replace(run, precision="bf16-mixed"),
        replace(run, model=replace(tiny, memory=replace(tiny.memory, reads=3))),
        replace(run, model=VaeConfig()),
        replace(run, model=KppConfig()),
        replace(run, optim=replace(run.optim, lr=1e-3)),
        replace(run, data=replace(run.data, binarization="threshold")),
    ]
    hashes = {other.config_hash() for other in [run, *others]}
    assert len(hashes) == len(others) + 1


def test_a_run_carries_its_model_whole(tiny: ModelConfig):
    run = RunConfig(model=tiny, episode_length=5, seed=3)
    assert run_from_dict(to_dict(run)).model == tiny == model_from_dict(to_dict(tiny))


def test_an_outline_is_of_8_bit_pixels_and_kpps_own():
    outline = KppMemoryConfig(outline=True)
    KppConfig(memory=outline, likelihood="logistic_mixture")
    with pytest.raises(UserError, match="8-bit"):
        KppConfig(memory=outline)
    with pytest.raises(UserError, match=r"kpp-paper does not use memory.outline \(kpp does\)"):
        model_from_dict({"model": "kpp-paper", "memory": {"outline": True}})


# What version 0.1 wrote


def version1(**changes: object) -> dict:
    """A checkpoint's config as version 0.1 wrote it: every group, whatever the model used."""
    memory = {
        "channels": 3, "size": 64, "reads": 2, "block": 16, "base": 256, "capacity": 36,
        "placement": "cells", "read": "hard", "unwritten": 0.125, "noise": 0.05, "locality": 0.0,
    }  # fmt: skip
    return {
        "model": "kpp-paper",
        "image": [1, 28, 28],
        "encoder": {"width": 64, "blocks": [2, 2, 2, 2], "shift": 0.125, "depth": 2},
        "memory": memory,
        "keys": {"hidden": 512, "layers": 3},
        "readout": {
            "size": 64, "hidden": 512, "layers": 3, "prior_width": 64, "channels": 16,
            "posterior": "residual",
        },
        "decoder": {"base": 256, "layers": 3, "neighbours": 0, "near_width": 128},
        "likelihood": {"kind": "bernoulli", "components": 10},
        "rows": {"count": 32, "width": 100},
    } | changes  # fmt: skip


def test_a_config_of_version_0_1_is_brought_up_to_date():
    assert model_from_dict(version1()) == KppPaperConfig()
    run = version1(step="eager", epochs=500, steps=9, strategy="ddp", optim={"betas": [0.9, 0.999]})
    assert run_from_dict(run) == RunConfig(model=KppPaperConfig(), steps=9, execution="eager")


def test_a_retired_value_of_version_0_1_is_refused():
    retired = version1(encoder={"width": 64, "blocks": [1, 1, 1, 1], "shift": 0.1})
    with pytest.raises(UserError, match="encoder.blocks=.* was retired after kanerva 0.1"):
        model_from_dict(retired)


# Of each model: its config_version, and a fingerprint of its defaults at that version. Whoever
# changes a default raises the version and writes the new fingerprint here: records name a config by
# what differs from the defaults, so defaults must not move under them. An option that is retired at
# its default changes the fingerprint alone.
DEFAULTS = {
    "kpp": (1, "957e7dbe7415"),
    "kpp-bits": (1, "4e461d4fee1a"),
    "kpp-empty": (1, "f058ae8b5127"),
    "kpp-bits-empty": (1, "db161d7628bf"),
    "kpp-paper": (1, "b683e94b7160"),
    "vae": (1, "74cf6e784711"),
    "no-memory": (1, "7b9021d009fa"),
    "km": (1, "28fdd2680cfa"),
    "dkm": (1, "c8d2787d8b4d"),
    "dkm-tsm": (1, "878177ca88f7"),
    "vma": (1, "756f507a5b4c"),
    "dnc": (1, "a2e233e042fa"),
    "run": (1, "7552e95788c9"),
}


def fingerprint(options: dict) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def test_a_default_changes_with_its_version():
    found = {
        name: (cls.config_version, fingerprint(to_dict(cls())))
        for name, cls in MODEL_CONFIGS.items()
    }
    run = RunConfig()
    own = {k: v for k, v in to_dict(run).items() if k not in to_dict(run.model)}
    found |= {"run": (RunConfig.config_version, fingerprint(own))}
    assert found == DEFAULTS, "a new model needs a line in DEFAULTS; a new default, a new version"


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_every_model_is_built_from_its_default_config(name: str):
    with torch.device("meta"):  # shapes only
        model = kanerva.build(MODEL_CONFIGS[name]())
    assert model.config.name == name and sum(p.numel() for p in model.parameters()) > 1e6


def shipped_by_version1(**changed: dict) -> dict:
    """The config that kanerva 0.1 shipped with its glyphs, with some groups' options changed."""
    folder = Path(kanerva.__file__).parent / "pretrained" / "glyphs-1"
    data = json.loads((folder / "config.json").read_text())
    return data | {group: data[group] | options for group, options in changed.items()}


def test_what_a_model_ignored_in_version_1_is_dropped():
    plain = model_from_dict(shipped_by_version1())
    assert (
        model_from_dict(shipped_by_version1(rows={"heads": 9}, memory={"block": 7, "base": 3}))
        == plain
    )


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"likelihood": {"components": 3}}, "likelihood.components=3"),
        ({"memory": {"placement": "gaussian"}}, "memory.placement=gaussian"),
        ({"memory": {"read": "soft"}}, "memory.read=soft"),
        ({"memory": {"unwritten": 1}}, "memory.unwritten=1"),
        ({"readout": {"posterior": "amortised"}}, "readout.posterior=amortised"),
        ({"memory": {"placement": "transport", "read": "soft"}}, "memory.placement=transport"),
    ],
)
def test_what_had_an_effect_in_version_1_and_is_gone_is_refused(changed: dict, named: str):
    with pytest.raises(UserError, match="was retired after kanerva 0.1") as error:
        model_from_dict(shipped_by_version1(**changed))
    assert named in str(error.value)


# What version 0.2 wrote before some options were retired


def test_a_retired_option_is_dropped_if_it_says_what_the_code_does():
    old = to_dict(preset("mnist"))
    old["memory"] |= {"placement": "cells", "locality": 0.0}
    old["keys"] = {"hidden": 256}
    assert run_from_dict(old) == preset("mnist")
    assert run_from_dict(old).config_hash() == preset("mnist").config_hash()
    bits = to_dict(preset("mnist", "kpp-bits").model) | {"keys": {"hidden": 256}}
    assert model_from_dict(bits) == preset("mnist", "kpp-bits").model


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"memory": {"placement": "transport", "locality": 10}}, "memory.placement='transport'"),
        ({"memory": {"locality": 1.0}}, "memory.locality=1.0"),
        ({"keys": {"hidden": 9}}, "keys.hidden=9"),
    ],
)
def test_another_value_of_a_retired_option_is_refused(changed: dict, named: str):
    with pytest.raises(UserError, match="was retired with kpp's variant generate") as error:
        model_from_dict({"model": "kpp"} | changed, "old/config.json")
    assert str(error.value).startswith(f"old/config.json: {named} ")
    assert "\n" not in str(error.value)


def test_a_model_that_still_has_an_option_keeps_it():
    paper = model_from_dict({"model": "kpp-paper", "keys": {"hidden": 256}})
    assert isinstance(paper, KppPaperConfig) and paper.keys.hidden == 256


def test_vma_has_no_kl_terms_to_weigh():
    vma = preset("glyphs", "vma")
    with pytest.raises(UserError, match="optim.kl-weight must be 1"):
        replace(vma, optim=replace(vma.optim, kl_weight="1/T"))
    paper = preset("glyphs", "kpp-paper")
    assert replace(paper, optim=replace(paper.optim, kl_weight="1/T")).kl_weight == 1 / 8
