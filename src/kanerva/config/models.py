"""One config for each model: what is needed to build it, and what a checkpoint's config.json holds.

An option that a model does not use is not in its config, so setting it is an error. A change of a
default must raise `config_version`: the hash of a config covers only what differs from the
defaults.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kanerva.config import groups
from kanerva.errors import UserError
from kanerva.plain_files import shown

MOST_PIXELS = 2**24  # per image, so that an untrusted config cannot exhaust the memory
LikelihoodName = Literal["bernoulli", "logistic_mixture"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options that every model has."""

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
            raise UserError(
                f"image is channels, height, width; logistic_mixture needs 1 or 3 channels, got "
                f"{self.image[0]}"
            )


@dataclass(frozen=True, kw_only=True)
class KppConfig(ModelConfig):
    """`kpp`: Kanerva++ with a memory that is a heap of blocks."""

    name: ClassVar[str] = "kpp"
    encoder: groups.KppEncoderConfig = groups.KppEncoderConfig()
    memory: groups.KppMemoryConfig = groups.KppMemoryConfig()
    readout: groups.KppReadoutConfig = groups.KppReadoutConfig()
    decoder: groups.KppDecoderConfig = groups.KppDecoderConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory.outline and self.likelihood != "logistic_mixture":
            raise UserError("memory.outline is for 8-bit pixels: likelihood=logistic_mixture")


def require_binary(config: ModelConfig) -> None:
    """Refuse pixels other than 0 or 1, channels, and single rows: the pixel code is for one binary
    plane, and trains on even rows and odd ones."""
    if config.likelihood != "bernoulli":
        raise UserError(f"{config.name} takes pixels that are 0 or 1: likelihood=bernoulli")
    if config.image[0] != 1:
        raise UserError(f"{config.name} takes images of one channel, got {config.image}")
    if config.image[1] < 2:
        raise UserError(f"{config.name} takes images of at least two rows, got {config.image}")


@dataclass(frozen=True, kw_only=True)
class KppBitsConfig(KppConfig):
    """`kpp-bits`: `kpp` with blocks stored as bits."""

    name: ClassVar[str] = "kpp-bits"
    memory: groups.BitsMemoryConfig = groups.BitsMemoryConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    code: groups.CodeConfig = groups.CodeConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        memory, parts = self.memory, self.code.groups
        rows, columns = groups.rows_and_columns(memory.capacity)
        numbers = memory.channels * (memory.size // rows) * (memory.size // columns)
        if numbers % parts or numbers == parts:
            raise UserError(f"a block of {numbers} numbers does not divide into {parts} groups")
        require_binary(self)


@dataclass(frozen=True, kw_only=True)
class KppEmptyConfig(ModelConfig):
    """`kpp-empty`: the networks of `kpp`, with nothing ever written. The prior reads a block of
    zeros, whose size the memory's options set."""

    name: ClassVar[str] = "kpp-empty"
    encoder: groups.KppEncoderConfig = groups.KppEncoderConfig()
    memory: groups.GridConfig = groups.GridConfig()
    readout: groups.KppReadoutConfig = groups.KppReadoutConfig()
    decoder: groups.KppDecoderConfig = groups.KppDecoderConfig()


@dataclass(frozen=True, kw_only=True)
class KppBitsEmptyConfig(KppEmptyConfig):
    """`kpp-bits-empty`: the networks of `kpp-bits`, with nothing ever written."""

    name: ClassVar[str] = "kpp-bits-empty"
    memory: groups.GridConfig = groups.GridConfig(channels=6, size=24)
    code: groups.PixelCodeConfig = groups.PixelCodeConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_binary(self)


@dataclass(frozen=True, kw_only=True)
class KppPaperConfig(ModelConfig):
    """`kpp-paper`: the model of the paper (§3)."""

    name: ClassVar[str] = "kpp-paper"
    encoder: groups.ShiftedResNetConfig = groups.ShiftedResNetConfig()
    memory: groups.PaperMemoryConfig = groups.PaperMemoryConfig()
    keys: groups.KeyConfig = groups.KeyConfig()
    readout: groups.PaperReadoutConfig = groups.PaperReadoutConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


@dataclass(frozen=True, kw_only=True)
class VaeConfig(ModelConfig):
    """`vae`: no memory (App. C)."""

    name: ClassVar[str] = "vae"
    encoder: groups.ResNetConfig = groups.ResNetConfig()
    readout: groups.LinearReadoutConfig = groups.LinearReadoutConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


@dataclass(frozen=True, kw_only=True)
class NoMemoryConfig(ModelConfig):
    """`no-memory`: the ablation of §4.2. Its prior has as many parameters as the memory of a
    `kpp-paper` with these options."""

    name: ClassVar[str] = "no-memory"
    encoder: groups.UnshiftedResNetConfig = groups.UnshiftedResNetConfig()
    memory: groups.PaperMemoryConfig = groups.PaperMemoryConfig()
    keys: groups.KeyConfig = groups.KeyConfig()
    readout: groups.PaperReadoutConfig = groups.PaperReadoutConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


@dataclass(frozen=True, kw_only=True)
class KmConfig(ModelConfig):
    """`km`: the Kanerva Machine."""

    name: ClassVar[str] = "km"
    encoder: groups.ResNetConfig = groups.ResNetConfig()
    rows: groups.AddressedMatrixConfig = groups.AddressedMatrixConfig()
    keys: groups.KeyConfig = groups.KeyConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


@dataclass(frozen=True, kw_only=True)
class DkmConfig(ModelConfig):
    """`dkm`: the Dynamic Kanerva Machine."""

    name: ClassVar[str] = "dkm"
    encoder: groups.ResNetConfig = groups.ResNetConfig()
    rows: groups.MatrixConfig = groups.MatrixConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


@dataclass(frozen=True, kw_only=True)
class DkmTsmConfig(DkmConfig):
    """`dkm-tsm`: the Dynamic Kanerva Machine with the encoder of Kanerva++."""

    name: ClassVar[str] = "dkm-tsm"
    encoder: groups.ShiftedResNetConfig = groups.ShiftedResNetConfig()


@dataclass(frozen=True, kw_only=True)
class VmaConfig(ModelConfig):
    """`vma`: Variational Memory Addressing."""

    name: ClassVar[str] = "vma"
    encoder: groups.ResNetConfig = groups.ResNetConfig()
    keys: groups.KeyConfig = groups.KeyConfig()
    readout: groups.VectorReadoutConfig = groups.VectorReadoutConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


@dataclass(frozen=True, kw_only=True)
class DncConfig(ModelConfig):
    """`dnc`: the differentiable neural computer."""

    name: ClassVar[str] = "dnc"
    encoder: groups.ResNetConfig = groups.ResNetConfig()
    rows: groups.SlotsConfig = groups.SlotsConfig()
    keys: groups.KeyConfig = groups.KeyConfig()
    readout: groups.LinearReadoutConfig = groups.LinearReadoutConfig()
    decoder: groups.DecoderConfig = groups.DecoderConfig()


MODEL_CONFIGS: dict[str, type[ModelConfig]] = {
    config.name: config
    for config in (
        KppConfig, KppBitsConfig, KppEmptyConfig, KppBitsEmptyConfig, KppPaperConfig,
        VaeConfig, NoMemoryConfig, KmConfig, DkmConfig, DkmTsmConfig, VmaConfig, DncConfig,
    )
}  # fmt: skip


def model_config(name: object) -> type[ModelConfig]:
    """The config class of a model."""
    if not isinstance(name, str) or name not in MODEL_CONFIGS:
        raise UserError(f"unknown model {shown(name)}; there are {', '.join(MODEL_CONFIGS)}")
    return MODEL_CONFIGS[name]
