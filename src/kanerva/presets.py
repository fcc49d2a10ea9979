"""One function per data set: what a run looks like, and the figure it is held to.

The paper's figures are from its Table 1; memory 3x64x64 and "500 or 1000 epochs" from App. E, K = 2
from §4.3. They are the target a preset is compared with; what we measure stands in records.
"""

from dataclasses import replace

from kanerva.config import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    KeyConfig,
    LikelihoodConfig,
    MemoryConfig,
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


def images() -> RunConfig:
    """Any folder of images (`--data.folder`), 8 bit colour at 32x32 unless `--image` says else."""
    return replace(cifar10(), preset="images", data=DataConfig(set="images", binarization="none"))


PRESETS = {f.__name__: f for f in (glyphs, mnist, omniglot, fashion_mnist, cifar10, images)}


def preset(name: str) -> RunConfig:
    """The run a preset names."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
