"""One function per data set: what a run looks like, and the figure it is held to.

The paper's figures are from its Table 1; memory 3x64x64 and "500 or 1000 epochs" from App. E, K = 2
from §4.3. They are the target a preset is compared with; what we measure stands in records.

Each is the paper's model, `kpp-paper`; `store` and `generate` turn it into the two settings of
`kpp`, the default model.
"""

from dataclasses import replace
from typing import cast, get_args

from kanerva.config import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    KeyConfig,
    LikelihoodConfig,
    MemoryConfig,
    ModelName,
    OptimConfig,
    ReadoutConfig,
    RunConfig,
)
from kanerva.errors import UserError

MIXTURE = LikelihoodConfig(kind="logistic_mixture")


def glyphs() -> RunConfig:
    """Rendered characters, sized for two CPU cores: about three minutes. No published figure."""
    return RunConfig(
        preset="glyphs",
        data=DataConfig(set="glyphs"),
        encoder=EncoderConfig(width=16),
        memory=MemoryConfig(base=64),
        keys=KeyConfig(hidden=128),
        readout=ReadoutConfig(size=32, hidden=128, prior_width=16),
        decoder=DecoderConfig(base=64),
        optim=OptimConfig(warmup_epochs=1.0),
        episode_length=8,
        batch=8,
        steps=2000,
        validate_every=400,
        validate_episodes=128,
    )


def mnist() -> RunConfig:
    """Sampled MNIST. The paper: at most 41.58 nats/image."""
    return RunConfig(preset="mnist", data=DataConfig(set="mnist"))


def omniglot() -> RunConfig:
    """Sampled Omniglot, unseen alphabets. The paper: at most 66.24 nats/image."""
    return RunConfig(preset="omniglot", data=DataConfig(set="omniglot"))


def fashion_mnist() -> RunConfig:
    """Grey Fashion-MNIST, 8 bit. The paper: at most 3.40 bits/dim."""
    return RunConfig(
        preset="fashion_mnist",
        data=DataConfig(set="fashion_mnist", binarization="none"),
        likelihood=MIXTURE,
    )


def cifar10() -> RunConfig:
    """CIFAR-10, 8 bit colour. The paper: at most 3.28 bits/dim."""
    return RunConfig(
        preset="cifar10",
        data=DataConfig(set="cifar10", binarization="none"),
        image=(3, 32, 32),
        likelihood=MIXTURE,
    )


def mazes() -> RunConfig:
    """Frames along walks through mazes, 8 bit colour at 64x64. Not the paper's DMLab: no figure."""
    data = DataConfig(set="mazes", binarization="none")
    return replace(cifar10(), preset="mazes", data=data, image=(3, 64, 64))


def celeba() -> RunConfig:
    """CelebA at 64x64, whole pictures unless `--data.crop`. The paper shows it without a figure."""
    data = DataConfig(set="celeba", binarization="none")
    return replace(cifar10(), preset="celeba", data=data, image=(3, 64, 64))


def imagenet32() -> RunConfig:
    """Downsampled ImageNet, 8 bit colour at 32x32. The paper shows it without a figure."""
    data = DataConfig(set="imagenet32", binarization="none")
    return replace(cifar10(), preset="imagenet32", data=data)


def imagenet64() -> RunConfig:
    """Downsampled ImageNet, 8 bit colour at 64x64. The paper shows it without a figure."""
    data = DataConfig(set="imagenet64", binarization="none")
    return replace(celeba(), preset="imagenet64", data=data)


def images() -> RunConfig:
    """Any folder of images (`--data.folder`), 8 bit colour at 32x32 unless `--image` says else."""
    return replace(cifar10(), preset="images", data=DataConfig(set="images", binarization="none"))


_SMALL = (glyphs, mnist, omniglot, fashion_mnist, cifar10)
_LARGE = (mazes, celeba, imagenet32, imagenet64, images)
PRESETS = {f.__name__: f for f in (*_SMALL, *_LARGE)}


# kpp, ours: two settings of one model


def store(run: RunConfig) -> RunConfig:
    """Cells and hard reads: recall, familiarity, capacity. The memory stays 3x64x64."""
    small = run.preset == "glyphs"
    strokes = run.preset == "omniglot"  # there a global part of z dies, and blocks take less noise
    made = replace(
        run,
        model="kpp",
        variant="store",
        encoder=EncoderConfig(width=16 if small else 64),
        memory=MemoryConfig(
            reads=1,
            placement="cells",
            read="hard",
            capacity=36,
            unwritten=0.125,
            noise=0.01 if strokes else 0.05,
        ),
        keys=KeyConfig(hidden=64 if small else 256),
        readout=ReadoutConfig(
            size=0 if strokes else 32,
            channels=16,
            posterior="residual",
            prior_width=16 if small else 64,
        ),
        decoder=DecoderConfig(base=32 if small else 128),
        optim=OptimConfig(
            optimiser="adamw", lr=2e-3, weight_decay=1e-2, warmup_epochs=1.0, clip=10.0, ema=0.999
        ),
        episode_length=32,
        batch=2 if small else 32,
        steps=2000 if small else 3000,
    )
    return in_levels(made) if run.likelihood == MIXTURE else made


def in_levels(run: RunConfig) -> RunConfig:
    """8-bit pixels: they see their neighbours. Blocks of small images start as outlines, with as
    much noise as int8 makes; at 64x64 boxes are large, and it did not help. A pixel is a sample
    here, so few images make a step, and many steps a run; gradients are as large as the nats."""
    channels, height, width = run.image
    grey, large = channels == 1, max(height, width) > 32
    return replace(
        run,
        memory=replace(
            run.memory, capacity=32, noise=0.003 if large else 0.0023, outline=not large
        ),
        readout=replace(run.readout, size=0),
        decoder=replace(
            run.decoder, neighbours=3, near_width=96 if large else 128 if grey else 192
        ),
        optim=replace(run.optim, clip=1e5),
        batch=2 if large else 4,
        steps=12_000 if large else 24_000,
        validate_every=1500 if large else 2000,
    )


def generate(run: RunConfig) -> RunConfig:
    """Learned places and soft reads: random keys, perturbation, walks. No more floats."""
    base = store(run)
    return replace(
        base,
        variant="generate",
        memory=replace(
            base.memory,
            channels=192,
            size=8,
            block=1,
            placement="transport",
            read="soft",
            capacity=64,
            unwritten=0.25,
            locality=10.0,
        ),
        readout=replace(base.readout, size=0 if run.likelihood == MIXTURE else 32, channels=8),
    )


# The systems of Table 1: the paper's networks and schedule, another memory


def rival(run: RunConfig, model: ModelName) -> RunConfig:
    """The paper's run with another model. Only `dkm-tsm` shares its encoder's temporal shift."""
    shift = run.encoder.shift if model == "dkm-tsm" else 0.0
    return replace(run, model=model, encoder=replace(run.encoder, shift=shift))


VARIANTS = {"store": store, "generate": generate}


def preset(
    name: str,
    model: str = "kpp",
    variant: str | None = None,
    image: tuple[int, int, int] | None = None,
) -> RunConfig:
    """The run that a data set, a model and one of its settings name, for images of its own size or
    of another."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    if model not in get_args(ModelName):
        raise UserError(f"unknown model {model!r}; there are {', '.join(get_args(ModelName))}")
    if model != "kpp" and variant is not None:
        raise UserError(f"{model} has no variants, got {variant!r}")
    start = PRESETS[name]()
    if image is not None:
        start = replace(start, image=image)
    if model == "kpp-paper":
        return start
    if model != "kpp":
        return rival(start, cast(ModelName, model))
    variant = variant or "store"
    if variant not in VARIANTS:
        raise UserError(f"unknown variant {variant!r} of kpp; there are {', '.join(VARIANTS)}")
    return VARIANTS[variant](start)
