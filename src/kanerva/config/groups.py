"""Groups of options that model configs are made of. Each default is set here, and only here.

Values are the paper's (App. E) unless marked `ours`. A group has exactly the options its models
use; a model with one more option has its own group.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from kanerva.errors import UserError
from kanerva.plain_files import shown

SIZE = 2**16  # upper limit of most options, so that no config takes hours or gigabytes to refuse
DEPTH = 256  # most layers
LENGTH = 2**40  # most steps of a run

# Checks that options share. Each failure is one line that names the option and its value.


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """A group of options. Numbers must be positive, or at least zero if listed in `may_be_zero`.
    Integers are at most SIZE, or their entry in `most`."""

    group: ClassVar[str]
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    most: ClassVar[dict[str, int]] = {}

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                check = require_not_negative if f.name in self.may_be_zero else require_positive
                check(self, f.name, most=self.most.get(f.name, SIZE))


def label(config: object, option: str) -> str:
    """An option as users type it: `memory.size`, or `batch` if it is in no group."""
    group = getattr(config, "group", "")
    return f"{group}.{option}" if group else option


def require_positive(config: object, *options: str, most: int = SIZE) -> None:
    for option in options:
        if not 0 < (value := getattr(config, option)) < math.inf:  # NaN fails too
            raise UserError(f"{label(config, option)} must be positive, got {shown(value)}")
        require_at_most(config, option, most)


def require_not_negative(config: object, option: str, most: int = SIZE) -> None:
    if not 0 <= (value := getattr(config, option)) < math.inf:
        raise UserError(f"{label(config, option)} must not be negative, got {shown(value)}")
    require_at_most(config, option, most)


def require_at_most(config: object, option: str, most: int) -> None:
    value = getattr(config, option)
    if isinstance(value, int) and value > most:
        raise UserError(f"{label(config, option)} must be at most {most}, got {shown(value)}")


# The paper's networks, which the baselines share


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(OptionGroup):
    """f_enc: a ResNet-18 (§3.3)."""

    group: ClassVar[str] = "encoder"
    width: int = 64
    """Channels of the first stage; the embedding has 8 * width numbers."""


@dataclass(frozen=True, kw_only=True)
class ShiftedResNetConfig(ResNetConfig):
    """A ResNet-18 with temporal shift: an image sees its neighbours in the episode."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("shift",)
    shift: float = 0.125
    """Fraction of channels shifted forward along the episode, and as many back; 0 disables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift > 0.5:
            raise UserError(f"encoder.shift must lie in [0, 0.5], got {self.shift}")


@dataclass(frozen=True, kw_only=True)
class UnshiftedResNetConfig(ShiftedResNetConfig):
    """A ResNet-18 with temporal shift off by default."""

    shift: float = 0.0
    """Fraction of channels shifted forward along the episode, and as many back; 0 disables."""


@dataclass(frozen=True, kw_only=True)
class KeyConfig(OptionGroup):
    """The network that infers keys."""

    group: ClassVar[str] = "keys"
    hidden: int = 512
    """Width of its hidden layers."""


@dataclass(frozen=True, kw_only=True)
class VectorReadoutConfig(OptionGroup):
    """Z as one vector: its posterior q(Z|X)."""

    group: ClassVar[str] = "readout"
    size: int = 64
    """L, the dimension of z. ours: the paper does not say."""
    hidden: int = 512
    """Width of hidden layers."""


@dataclass(frozen=True, kw_only=True)
class LinearReadoutConfig(VectorReadoutConfig):
    """Z as one vector, with a deep linear net as its posterior (App. E)."""

    spectral_norm: bool = True
    """Normalise each layer to spectral norm one, so that it amplifies nothing."""


@dataclass(frozen=True, kw_only=True)
class PaperReadoutConfig(LinearReadoutConfig):
    """Z as one vector, with a deep linear posterior and a convolutional prior p(Z|M-hat, Y)."""

    prior_width: int = 64
    """Channels of the prior's first convolution. ours"""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(OptionGroup):
    """p(X|Z): conv-transpose layers with EvoNorm-S0 between them."""

    group: ClassVar[str] = "decoder"
    most: ClassVar[dict[str, int]] = {"layers": 16}  # each doubles the side
    base: int = 256
    """Channels of the first layer, halved per layer. ours"""
    layers: int = 3
    """How many times the side is doubled. ours"""


@dataclass(frozen=True, kw_only=True)
class MapConfig(OptionGroup):
    """A memory of square feature maps."""

    group: ClassVar[str] = "memory"
    channels: int = 3
    """Cm."""
    size: int = 64
    """Hm = Wm."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cm, Hm, Wm."""
        return (self.channels, self.size, self.size)


@dataclass(frozen=True, kw_only=True)
class PaperMemoryConfig(MapConfig):
    """The latent memory M of the paper: written as a whole, read at K windows."""

    reads: int = 2
    """K, chosen in §4.3."""
    block: int = 16
    """h = w of one read. ours: the paper gives no block size."""
    base: int = 256
    """Channels of the writer's first layer, halved per layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block > self.size:
            raise UserError(f"memory.block={self.block} exceeds memory.size={self.size}")


# kpp's own


@dataclass(frozen=True, kw_only=True)
class KppEncoderConfig(OptionGroup):
    """Encodes each image separately, to feature maps of a quarter of its side. ours"""

    group: ClassVar[str] = "encoder"
    most: ClassVar[dict[str, int]] = {"depth": DEPTH}
    width: int = 64
    """Channels at half the side; twice as many at a quarter."""
    depth: int = 2
    """Residual blocks at each of the two resolutions."""


@dataclass(frozen=True, kw_only=True)
class KppReadoutConfig(OptionGroup):
    """Z with a global and a spatial part. ours"""

    group: ClassVar[str] = "readout"
    may_be_zero: ClassVar[tuple[str, ...]] = ("size", "channels")
    size: int = 32
    """Dimension of the global part; 0 leaves it out."""
    channels: int = 16
    """Channels of the spatial part, at a quarter of the image's side; 0 leaves it out."""
    prior_width: int = 64
    """Channels of the prior and posterior networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size + self.channels == 0:
            raise UserError("a readout needs readout.size or readout.channels, both are 0")


@dataclass(frozen=True, kw_only=True)
class KppDecoderConfig(OptionGroup):
    """Residual blocks at a quarter and at half the side. ours"""

    group: ClassVar[str] = "decoder"
    may_be_zero: ClassVar[tuple[str, ...]] = ("neighbours",)
    most: ClassVar[dict[str, int]] = {"depth": DEPTH, "neighbours": DEPTH}
    base: int = 128
    """Channels at a quarter of the side; half as many at half the side."""
    depth: int = 2
    """Residual blocks at each of the two resolutions."""
    neighbours: int = 0
    """Radius of the causal pixel context; 0 disables."""
    near_width: int = 128
    """Features per pixel in the pixel context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.neighbours and self.near_width != KppDecoderConfig.near_width:
            raise UserError(
                f"decoder.near-width={self.near_width} needs decoder.neighbours above 0"
            )


@dataclass(frozen=True, kw_only=True)
class GridConfig(MapConfig):
    """A memory divided into a grid of cells. ours"""

    capacity: int = 36
    """Number of cells, one for each block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, columns = rows_and_columns(self.capacity)
        if columns > self.size:
            raise UserError(
                f"memory.capacity={self.capacity} is a grid of {rows} x {columns} cells, too "
                f"fine for a memory of side {self.size}"
            )


@dataclass(frozen=True, kw_only=True)
class KppMemoryConfig(GridConfig):
    """A grid of cells with one block for each image. ours"""

    may_be_zero: ClassVar[tuple[str, ...]] = ("unwritten", "noise")
    unwritten: float = 0.125
    """Fraction of each training episode that is not written."""
    noise: float = 0.05
    """Standard deviation of the noise on blocks in training; blocks lie in [-1, 1]."""
    outline: bool = False
    """Initialise blocks as an outline of their image; for 8-bit pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unwritten >= 1:
            raise UserError(f"memory.unwritten must lie in [0, 1), got {self.unwritten}")


@dataclass(frozen=True, kw_only=True)
class BitsMemoryConfig(GridConfig):
    """A grid of cells with one block of integers for each image. ours"""

    channels: int = 6
    """Cm."""
    size: int = 24
    """Hm = Wm."""
    unwritten: float = 0.125
    """Fraction of each training episode that is not written."""
    noise: ClassVar[float] = 0.0
    outline: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unwritten >= 1:
            raise UserError(f"memory.unwritten must lie in [0, 1), got {self.unwritten}")


@dataclass(frozen=True, kw_only=True)
class PixelCodeConfig(OptionGroup):
    """The pixel code: codes each pixel given those before it. ours"""

    group: ClassVar[str] = "code"
    radius: int = 7
    """Radius of the causal context of each pixel."""
    width: int = 128
    """Width of its layers."""
    depth: int = 2
    """Layers after the first."""
    maps: int = 48
    """Channels through which it sees the gist; at most 48, so that sums stay exact."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, most in (("maps", 48), ("width", 448)):  # with more, sums could pass 2^24
            if getattr(self, option) > most:
                raise UserError(
                    f"code.{option} must be at most {most}, got {getattr(self, option)}"
                )


@dataclass(frozen=True, kw_only=True)
class CodeConfig(PixelCodeConfig):
    """Blocks as bits: a gist whose bits are paid for, and a code of the pixels given it. ours"""

    groups: int = 48
    """Parts of a gist, the most informative first; a shortened gist loses its last parts."""
    gist_bits: float = 48.0
    """Average bits of a whole gist; training adapts the price per bit to reach it."""


def rows_and_columns(capacity: int) -> tuple[int, int]:
    """The squarest grid of exactly `capacity` cells; refused if over twice as wide as high."""

    def rows_of(count: int) -> int:
        return max(r for r in range(1, math.isqrt(count) + 1) if count % r == 0)

    def fits(count: int) -> bool:
        return count > 0 and count <= 2 * rows_of(count) ** 2

    rows = rows_of(capacity)
    if not fits(capacity):
        closest = (n for d in range(1, capacity) for n in (capacity - d, capacity + d) if n > 0)
        raise UserError(
            f"memory.capacity={capacity} makes no grid of cells ({rows} x {capacity // rows}): "
            f"use {next(filter(fits, closest))}"
        )
    return rows, capacity // rows


# The baselines' memories: a matrix of rows, with their authors' sizes for MNIST and Omniglot.


@dataclass(frozen=True, kw_only=True)
class RowsConfig(OptionGroup):
    """A memory of rows."""

    group: ClassVar[str] = "rows"
    count: int = 32
    """Rows."""
    width: int = 100
    """Floats in a row."""


@dataclass(frozen=True, kw_only=True)
class MatrixConfig(RowsConfig):
    """A random matrix, as in the Kanerva machines."""

    noise: float = 1.0
    """Initial sigma of a code around what is read; learned. ours"""
    charge: bool = True
    """Include KL(M) in the training objective; without it M holds more. ours"""


@dataclass(frozen=True, kw_only=True)
class AddressedMatrixConfig(MatrixConfig):
    """A random matrix, addressed by a learned key."""

    address: int = 32
    """Dimension of y, from which the address is computed. ours"""


@dataclass(frozen=True, kw_only=True)
class SlotsConfig(RowsConfig):
    """The slots of a differentiable neural computer."""

    heads: int = 4
    """Reads for each image."""
