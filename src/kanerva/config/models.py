"""One config for each model: what it takes to build it, and what a checkpoint's config.json holds.

An option that a model does not use is not in its config, so giving it is an error. Whoever changes
a default raises `config_version`: the hash of a config covers what differs from the defaults.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kanerva.config.groups import (
    AddressedMatrixConfig,
    DecoderConfig,
    GridConfig,
    KeyConfig,
    KppDecoderConfig,
    KppEncoderConfig,
    KppMemoryConfig,
    KppReadoutConfig,
    MatrixConfig,
    PaperMemoryConfig,
    PaperReadoutConfig,
    ResNetConfig,
    ShiftedResNetConfig,
    SlotsConfig,
    VectorReadoutConfig,
)
from kanerva.errors import UserError
from kanerva.plain_files import shown

MOST_PIXELS = 2**24  # of an image: a config from elsewhere is to take no memory by its sizes
LikelihoodName = Literal["bernoulli", "logistic_mixture"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every model has."""

    name: ClassVar[str] = ""
    config_version: ClassVar[int] = 1
    image: tuple[int, int, int] = (1, 28, 28)
    """C, H, W."""
    likelihood: LikelihoodName = "bernoulli"
    """bernoulli: pixels that are 0 or 1. logistic_mixture: 8-bit pixels (§4)."""

    def __post_init__(self) -> None:
        if min(self.image) < 1 or math.prod(self.image) > MOST_PIXELS:
            raise UserError(f"image must be (channels, height, width), got {self.image}")
        if self.likelihood == "logistic_mixture" and self.image[0] not in (1, 3):
            raise UserError(f"logistic_mixture needs 1 or 3 channels, got {self.image[0]}")


@dataclass(frozen=True, kw_only=True)
class KppConfig(ModelConfig):
    """`kpp`: Kanerva++ with a real heap."""

    name: ClassVar[str] = "kpp"
    encoder: KppEncoderConfig = field(default_factory=KppEncoderConfig)
    memory: KppMemoryConfig = field(default_factory=KppMemoryConfig)
    keys: KeyConfig = field(default_factory=lambda: KeyConfig(hidden=256))
    readout: KppReadoutConfig = field(default_factory=KppReadoutConfig)
    decoder: KppDecoderConfig = field(default_factory=KppDecoderConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory.outline and self.likelihood != "logistic_mixture":
            raise UserError("memory.outline is for 8-bit pixels: likelihood=logistic_mixture")
        default = KppConfig.__dataclass_fields__["keys"].default_factory()  # pyright: ignore
        if self.memory.placement == "cells" and self.keys != default:
            raise UserError(
                f"keys.hidden={self.keys.hidden} is for memory.placement=transport, not cells"
            )
        require_context(self.decoder)


def require_context(decoder: KppDecoderConfig) -> None:
    """Without a pixel context its width would be ignored."""
    if not decoder.neighbours and decoder.near_width != KppDecoderConfig.near_width:
        raise UserError(f"decoder.near-width={decoder.near_width} needs decoder.neighbours above 0")


@dataclass(frozen=True, kw_only=True)
class KppEmptyConfig(ModelConfig):
    """`kpp-empty`: the networks of `kpp`, nothing ever written. The memory's options say how large
    the block is that its prior is given: zeros."""

    name: ClassVar[str] = "kpp-empty"
    encoder: KppEncoderConfig = field(default_factory=KppEncoderConfig)
    memory: GridConfig = field(default_factory=GridConfig)
    readout: KppReadoutConfig = field(default_factory=KppReadoutConfig)
    decoder: KppDecoderConfig = field(default_factory=KppDecoderConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_context(self.decoder)


@dataclass(frozen=True, kw_only=True)
class KppPaperConfig(ModelConfig):
    """`kpp-paper`: the model as printed (§3)."""

    name: ClassVar[str] = "kpp-paper"
    encoder: ShiftedResNetConfig = field(default_factory=ShiftedResNetConfig)
    memory: PaperMemoryConfig = field(default_factory=PaperMemoryConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    readout: PaperReadoutConfig = field(default_factory=PaperReadoutConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class VaeConfig(ModelConfig):
    """`vae`: no memory (App. C)."""

    name: ClassVar[str] = "vae"
    encoder: ResNetConfig = field(default_factory=ResNetConfig)
    readout: VectorReadoutConfig = field(default_factory=VectorReadoutConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class NoMemoryConfig(ModelConfig):
    """`no-memory`: the ablation of §4.2. Its prior has as many parameters as the memory of a
    `kpp-paper` with these options."""

    name: ClassVar[str] = "no-memory"
    encoder: ResNetConfig = field(default_factory=ResNetConfig)
    memory: PaperMemoryConfig = field(default_factory=PaperMemoryConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    readout: PaperReadoutConfig = field(default_factory=PaperReadoutConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class KmConfig(ModelConfig):
    """`km`: the Kanerva Machine."""

    name: ClassVar[str] = "km"
    encoder: ResNetConfig = field(default_factory=ResNetConfig)
    rows: AddressedMatrixConfig = field(default_factory=AddressedMatrixConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class DkmConfig(ModelConfig):
    """`dkm`: the Dynamic Kanerva Machine."""

    name: ClassVar[str] = "dkm"
    encoder: ResNetConfig = field(default_factory=ResNetConfig)
    rows: MatrixConfig = field(default_factory=MatrixConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class DkmTsmConfig(DkmConfig):
    """`dkm-tsm`: the same with the encoder of Kanerva++."""

    name: ClassVar[str] = "dkm-tsm"
    encoder: ShiftedResNetConfig = field(default_factory=ShiftedResNetConfig)


@dataclass(frozen=True, kw_only=True)
class VmaConfig(ModelConfig):
    """`vma`: Variational Memory Addressing."""

    name: ClassVar[str] = "vma"
    encoder: ResNetConfig = field(default_factory=ResNetConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    readout: VectorReadoutConfig = field(default_factory=VectorReadoutConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class DncConfig(ModelConfig):
    """`dnc`: the differentiable neural computer."""

    name: ClassVar[str] = "dnc"
    encoder: ResNetConfig = field(default_factory=ResNetConfig)
    rows: SlotsConfig = field(default_factory=SlotsConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    readout: VectorReadoutConfig = field(default_factory=VectorReadoutConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


MODEL_CONFIGS: dict[str, type[ModelConfig]] = {
    config.name: config
    for config in (
        KppConfig, KppEmptyConfig, KppPaperConfig, VaeConfig, NoMemoryConfig, KmConfig,
        DkmConfig, DkmTsmConfig, VmaConfig, DncConfig,
    )
}  # fmt: skip


def model_config(name: object) -> type[ModelConfig]:
    """The config class of a model."""
    if not isinstance(name, str) or name not in MODEL_CONFIGS:
        raise UserError(f"unknown model {shown(name)}; there are {', '.join(MODEL_CONFIGS)}")
    return MODEL_CONFIGS[name]
