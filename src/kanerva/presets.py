"""What a run looks like on each data set: only what differs from a model's defaults.

The paper's models keep its memory (3x64x64, App. E), K = 2 (§4.3) and its optimiser. `kpp` has two
settings of its own, `store` and `generate`. A new data set needs no line here: its size and its
pixels decide.
"""

from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from kanerva.config import (
    DataConfig,
    KppDecoderConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    model_config,
)
from kanerva.data.registry import DATASETS
from kanerva.errors import UserError

PRESETS = tuple(DATASETS)
VARIANTS = ("store", "generate")
SMALL = "glyphs"  # sized for two CPU cores: a run takes about three minutes
OWN, SIZES = "images", ("small", "full")  # images of one's own, and how large a run
_OURS = OptimConfig(
    optimiser="adamw", lr=2e-3, weight_decay=1e-2, warmup_epochs=1.0, clip=10.0, ema=0.999
)

M = TypeVar("M", bound=ModelConfig)


def with_options(model: M, **groups: dict[str, Any]) -> M:
    """A config with some options of its groups replaced: those it has."""
    changed = {}
    for f in fields(model):
        group = getattr(model, f.name)
        if is_dataclass(group) and f.name in groups:
            known = {g.name for g in fields(group)}
            options = {k: v for k, v in groups[f.name].items() if k in known}
            changed[f.name] = replace(group, **options)  # pyright: ignore[reportArgumentType]
    return replace(model, **changed)


def reshaped(run: RunConfig, **groups: dict[str, Any]) -> RunConfig:
    """A run with such options of its model."""
    return replace(run, model=with_options(run.model, **groups))


def preset(
    name: str,
    model: str = "kpp",
    variant: str | None = None,
    image: tuple[int, int, int] | None = None,
    size: str | None = None,
) -> RunConfig:
    """The run that a data set, a model and one of its settings name, for images of the set's own
    size or of another. `size`: `full`, or `small`, for a CPU, where the images are your own."""
    if size not in (None, *SIZES):
        raise UserError(f"unknown size {size!r}; there are {', '.join(SIZES)}")
    if size == "small" and (name != OWN or model != "kpp"):
        raise UserError(f"size=small is for kpp on {OWN}, not for {model} on {name}")
    if name not in DATASETS:
        near = get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown preset {name!r}; {hint}there are {', '.join(PRESETS)}")
    config = model_config(model)
    if model != "kpp" and variant is not None:
        raise UserError(f"{model} has no variants, got {variant!r}")
    if variant not in (None, *VARIANTS):
        raise UserError(f"unknown variant {variant!r} of kpp; there are {', '.join(VARIANTS)}")
    info = DATASETS[name]
    run = RunConfig(
        model=config(
            image=image or info.image_shape,
            likelihood="logistic_mixture" if info.binarization == "none" else "bernoulli",
        ),
        preset=name,
        data=DataConfig(set=name, binarization=info.binarization),
    )
    if name == SMALL:
        run = replace(run, steps=2000, validate_every=400, validate_episodes=128)
    if model == "kpp":
        run = generate(run) if variant == "generate" else store(run)
        return for_a_cpu(run) if size == "small" else run
    if model == "kpp-bits":
        return bits(run)
    if model == "kpp-empty":  # the networks of `store` and as many steps, nothing written
        return ours(run)
    return printed(run)


def printed(run: RunConfig) -> RunConfig:
    """The paper's networks and schedule, for its model and for the rivals of Table 1."""
    if run.preset != SMALL:
        return run
    run = replace(run, optim=OptimConfig(warmup_epochs=1.0), episode_length=8)
    return reshaped(
        run,
        encoder={"width": 16},
        memory={"base": 64},
        keys={"hidden": 128},
        readout={"size": 32, "hidden": 128, "prior_width": 16},
        decoder={"base": 64},
    )


# kpp: two settings of one model


def ours(run: RunConfig) -> RunConfig:
    """Networks, pixels and schedule of `kpp`, whatever its memory."""
    small = run.preset == SMALL
    if small:
        widths = {"encoder": {"width": 16}, "readout": {"prior_width": 16}, "decoder": {"base": 32}}
        run = reshaped(run, **widths)
    run = replace(run, optim=_OURS, batch=2 if small else 32, steps=2000 if small else 3000)
    if run.preset == "omniglot":  # strokes: a global part of z dies
        run = reshaped(run, readout={"size": 0})
    return in_levels(run) if run.model.likelihood == "logistic_mixture" else run


def in_levels(run: RunConfig) -> RunConfig:
    """8-bit pixels see their neighbours. A pixel is a sample here, so few images make a step, and
    many steps a run; gradients are as large as the nats."""
    channels, height, width = run.model.image
    grey, large = channels == 1, max(height, width) > 32
    near = {"neighbours": 3, "near_width": 96 if large else 128 if grey else 192}
    return replace(
        reshaped(run, memory={"capacity": 32}, readout={"size": 0}, decoder=near),
        optim=replace(run.optim, clip=1e5),
        batch=2 if large else 4,
        steps=12_000 if large else 24_000,
        validate_every=1500 if large else 2000,
    )


def store(run: RunConfig) -> RunConfig:
    """Cells, read whole: recall, familiarity, capacity. The memory stays 3x64x64."""
    run = replace(ours(run), variant="store")
    if run.preset == "omniglot":  # strokes take less noise
        return reshaped(run, memory={"noise": 0.01})
    if run.model.likelihood != "logistic_mixture":
        return run
    # Blocks of small images start as outlines, with as much noise as int8 makes; at 64x64 boxes
    # are large, and it did not help.
    large = max(run.model.image[1:]) > 32
    memory = {"noise": 0.003 if large else 0.0023, "outline": not large}
    return reshaped(run, memory=memory)


def for_a_cpu(run: RunConfig) -> RunConfig:
    """Minutes on two cores: narrow networks, pixels that do not see their neighbours, few steps
    whose average forgets sooner."""
    narrow = {
        "encoder": {"width": 16},
        "readout": {"prior_width": 16},
        "decoder": {"base": 32, "neighbours": 0, "near_width": KppDecoderConfig.near_width},
    }
    return replace(
        reshaped(run, **narrow),
        optim=replace(run.optim, ema=0.98),
        episode_length=8,
        batch=4,
        steps=400,  # of some hundred photographs more are learned by heart
        validate_every=100,
        validate_episodes=4,
    )


def generate(run: RunConfig) -> RunConfig:
    """Learned places, read between cells: random keys, perturbation. No more floats."""
    run = store(run)
    transport = {
        "channels": 192, "size": 8, "capacity": 64,
        "placement": "transport", "unwritten": 0.25, "locality": 10.0,
    }  # fmt: skip
    size = 0 if run.model.likelihood == "logistic_mixture" else 32
    keys = {"hidden": 64} if run.preset == SMALL else {}
    readout = {"size": size, "channels": 8}
    return reshaped(replace(run, variant="generate"), memory=transport, readout=readout, keys=keys)


def bits(run: RunConfig) -> RunConfig:
    """Blocks that are bits. The rate rises over some hundred steps: at once, it drives numbers to
    their ends, where they tell nothing."""
    run = ours(run)
    run = replace(run, optim=replace(run.optim, lr=1e-3, warmup_epochs=20.0))
    if run.preset == SMALL:
        return reshaped(run, code={"width": 48, "maps": 16, "depth": 1})
    # Three million parameters: the weights fit a package.
    run = reshaped(run, encoder={"width": 48}, readout={"size": 0}, decoder={"base": 72})
    run = replace(run, steps=6000)
    if run.preset != "omniglot":
        return replace(run, data=replace(run.data, kin=0.25)) if run.preset == "mnist" else run
    # A character has 20 drawings: episodes of 16, most of them of one character.
    data = replace(run.data, augment="affine", kin=0.6)
    run = reshaped(run, code={"gist_bits": 36.0}, memory={"unwritten": 0.25})
    return replace(run, episode_length=16, batch=64, steps=8000, data=data)
