"""The settings of a run on each data set: only what differs from a model's defaults.

The paper's models keep its memory (3x64x64, App. E), K = 2 (§4.3) and its optimiser; their variant
`strong` is trained like `kpp` instead. Runs of `kpp` are labelled `store`, as their records are. A
new data set needs no entry here: its image size and pixel format determine the settings.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from kanerva.config import (
    MODEL_CONFIGS,
    DataConfig,
    KppDecoderConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    model_config,
)
from kanerva.data.registry import DATASETS
from kanerva.errors import UserError, suggest

PRESETS = tuple(DATASETS)
VARIANTS = {"kpp": ("store",)}
OURS = ("kpp", "kpp-empty", "kpp-bits", "kpp-bits-empty")
VARIANTS |= {name: ("strong",) for name in MODEL_CONFIGS if name not in OURS}
SMALL = "glyphs"  # sized for two CPU cores: a run takes about three minutes
OWN, SIZES = "images", ("small", "full")  # a user's own images, and the sizes of a run on them
_OURS = OptimConfig(
    optimiser="adamw", lr=2e-3, weight_decay=1e-2, warmup_epochs=1.0, clip=10.0, ema=0.999
)

M = TypeVar("M", bound=ModelConfig)


def with_options(model: M, **groups: dict[str, Any]) -> M:
    """Return a config with options of its groups replaced. Options it does not have are ignored."""
    changed = {}
    for f in fields(model):
        group = getattr(model, f.name)
        if is_dataclass(group) and f.name in groups:
            known = {g.name for g in fields(group)}
            options = {k: v for k, v in groups[f.name].items() if k in known}
            changed[f.name] = replace(group, **options)  # pyright: ignore[reportArgumentType]
    return replace(model, **changed)


def reshaped(run: RunConfig, **groups: dict[str, Any]) -> RunConfig:
    """Return a run with options of its model replaced, as in `with_options`."""
    return replace(run, model=with_options(run.model, **groups))


def preset(
    name: str,
    model: str = "kpp",
    variant: str | None = None,
    image: tuple[int, int, int] | None = None,
    size: str | None = None,
) -> RunConfig:
    """Return the run config for a data set, a model and one of the model's variants.

    `image` (C, H, W) overrides the data set's own image size. `size="small"` is a run for a CPU, on
    images of your own (`name="images"`); the default is `full`.
    """
    if size not in (None, *SIZES):
        raise UserError(f"unknown size {size!r}; there are {', '.join(SIZES)}")
    if size == "small" and (name != OWN or model != "kpp"):
        raise UserError(f"size=small is for kpp on {OWN}, not for {model} on {name}")
    if name not in DATASETS:
        hint = suggest(str(name), PRESETS)
        raise UserError(f"unknown preset {name!r}; {hint}there are {', '.join(PRESETS)}")
    config = model_config(model)
    if variant not in (None, *VARIANTS.get(model, ())):
        if (model, variant) == ("kpp", "generate"):
            raise UserError("kpp's variant generate was retired; kpp-bits makes new images")
        there = ", ".join(VARIANTS.get(model, ("none",)))
        raise UserError(f"unknown variant {variant!r} of {model}; there are {there}")
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
        return for_a_cpu(store(run)) if size == "small" else store(run)
    if model in ("kpp-bits", "kpp-bits-empty"):
        return bits(run)
    if model == "kpp-empty":  # the networks and steps of `store`, with nothing written
        return ours(run)
    return strong(run) if variant == "strong" else printed(run)


def printed(run: RunConfig) -> RunConfig:
    """The paper's networks and schedule, for its model and the baselines of Table 1."""
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


def strong(run: RunConfig) -> RunConfig:
    """The paper's networks, trained like `kpp`.

    Without spectral norm: it keeps z from carrying much information about an image. On Omniglot,
    affine augmentation keeps them from overfitting, so that validation is best at the end of the
    schedule.
    """
    run = scheduled(replace(printed(run), variant="strong"))
    run = reshaped(run, readout={"spectral_norm": False})
    if run.model.likelihood == "bernoulli" and run.preset != SMALL:
        run = replace(run, steps=6000)
    if run.preset != "omniglot":
        return run
    return replace(run, data=replace(run.data, augment="affine"))


# kpp and its relatives


def ours(run: RunConfig) -> RunConfig:
    """The networks, pixel context and schedule of `kpp`."""
    if run.preset == SMALL:
        widths = {"encoder": {"width": 16}, "readout": {"prior_width": 16}, "decoder": {"base": 32}}
        run = reshaped(run, **widths)
    if run.preset == "omniglot":  # the global part of z collapses to the prior on strokes
        run = reshaped(run, readout={"size": 0})
    if run.model.likelihood == "logistic_mixture":  # 8-bit pixels get a pixel context
        near_width = 96 if is_large(run) else 128 if run.model.image[0] == 1 else 192
        near = {"neighbours": 3, "near_width": near_width}
        run = reshaped(run, memory={"capacity": 32}, readout={"size": 0}, decoder=near)
    return scheduled(run)


def is_large(run: RunConfig) -> bool:
    """Whether images are larger than CIFAR-10's."""
    return max(run.model.image[1:]) > 32


def scheduled(run: RunConfig) -> RunConfig:
    """The optimiser, steps and batch of `kpp`.

    With a pixel context every 8-bit pixel is a training sample, so a step takes few images and a
    run many steps. Gradients grow with the nats, hence the large clip.
    """
    small, length = run.preset == SMALL, run.episode_length
    if run.model.likelihood == "bernoulli":
        images, steps = (64, 2000) if small else (1024, 3000)
        return replace(run, optim=_OURS, batch=images // length, steps=steps)
    large = is_large(run)
    return replace(
        run,
        optim=replace(_OURS, clip=1e5),
        batch=(64 if large else 128) // length,
        steps=12_000 if large else 24_000,
        validate_every=1500 if large else 2000,
    )


def store(run: RunConfig) -> RunConfig:
    """Blocks of floats, one for each image. The memory stays 3x64x64."""
    run = replace(ours(run), variant="store")
    if run.preset == "omniglot":  # strokes tolerate less noise
        return reshaped(run, memory={"noise": 0.01})
    if run.model.likelihood != "logistic_mixture":
        return run
    # Blocks of small images are initialised as outlines, with as much noise as int8 rounding makes.
    # At 64x64 the boxes are large, and outlines did not help.
    large = is_large(run)
    memory = {"noise": 0.003 if large else 0.0023, "outline": not large}
    return reshaped(run, memory=memory)


def for_a_cpu(run: RunConfig) -> RunConfig:
    """Shrink a run to minutes on two cores: narrow networks, no pixel context, few steps, and a
    shorter weight average."""
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
        steps=400,  # more would overfit a few hundred photographs
        validate_every=100,
        validate_episodes=4,
    )


def bits(run: RunConfig) -> RunConfig:
    """Blocks of bits. A long warmup: at the full learning rate the numbers saturate at once, and
    then carry no information."""
    run = ours(run)
    run = replace(run, optim=replace(run.optim, lr=1e-3, warmup_epochs=20.0))
    if run.preset == SMALL:  # a character has at most 12 pictures
        run = replace(run, optim=replace(run.optim, optimiser="muon", lr=4e-3))
        run = replace(run, episode_length=12, batch=5, data=replace(run.data, kin=0.5))
        code = {"width": 48, "maps": 16, "depth": 1}
        return reshaped(run, code=code, memory={"unwritten": 0.25})
    # About three million parameters, so that the weights fit into a Python package.
    run = replace(reshaped(run, readout={"size": 0}, decoder={"base": 64}), steps=6000)
    if run.preset == "mnist":
        return replace(run, data=replace(run.data, kin=0.6, kin_labels=2))
    if run.preset != "omniglot":
        return run
    # A character has 20 drawings, some of them for validation: 16 or more are left of most. Most
    # episodes are of one character.
    data = replace(run.data, augment="affine", kin=0.85)
    run = reshaped(run, code={"gist_bits": 28.0})
    return replace(run, episode_length=16, batch=64, steps=8000, data=data)
