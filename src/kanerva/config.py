"""Every default lives here once. Values are the paper's (App. E) unless marked `ours`.

`ModelConfig` is what a checkpoint's `config.json` holds; `RunConfig` adds data, optimiser and
schedule and is a run's `config.yaml`. Presets (`presets.py`) change only what differs.
"""

import hashlib
import json
import math
import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kanerva.errors import UserError


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:  # NaN fails too
            group = type(config).__name__.removesuffix("Config").lower()
            label = name if group in ("run", "model") else f"{group}.{name}"
            raise UserError(f"{label} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """f_enc: ResNet-18 with temporal shift (§3.3)."""

    width: int = 64  # channels of the first stage; the embedding has 8 * width numbers
    blocks: tuple[int, int, int, int] = (2, 2, 2, 2)
    shift: float = 0.125  # share of channels moved forward, and again as many back; 0 switches off
    depth: int = 2  # kpp, ours: residual blocks at each of its two resolutions

    def __post_init__(self) -> None:
        _positive(self, "width", "depth")
        if not 0 <= self.shift <= 0.5:
            raise UserError(f"EncoderConfig.shift must lie in [0, 0.5], got {self.shift}")
        if min(self.blocks) < 1:
            raise UserError(f"EncoderConfig.blocks must all be at least 1, got {self.blocks}")


def rows_and_columns(capacity: int) -> tuple[int, int]:
    """The squarest grid of exactly so many cells; one over twice as wide as high is refused."""

    def rows_of(count: int) -> int:
        return max(r for r in range(1, math.isqrt(count) + 1) if count % r == 0)

    def fits(count: int) -> bool:
        return count > 0 and count <= 2 * rows_of(count) ** 2

    rows = rows_of(capacity)
    if not fits(capacity):
        near = (n for d in range(1, capacity) for n in (capacity - d, capacity + d) if n > 0)
        raise UserError(
            f"memory.capacity={capacity} makes no grid of cells ({rows} x {capacity // rows}): "
            f"use {next(filter(fits, near))}"
        )
    return rows, capacity // rows


Placement = Literal["gaussian", "normalised", "cells", "transport"]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The latent memory M, how it is written and how it is read."""

    channels: int = 3
    size: int = 64  # Hm = Wm
    reads: int = 2  # K, chosen in §4.3
    block: int = 16  # h = w of one read. ours: the paper gives no block size
    base: int = 256  # kpp-paper: feature maps of the writer's first layer, halved per layer
    placement: Placement = "gaussian"  # where a sample's block lies; all but gaussian are kpp's
    read: Literal["soft", "hard"] = "soft"  # hard: a key reads the cell it lies in, whole
    capacity: int = 36  # kpp, ours: blocks there is room for; a grid of cells
    unwritten: float = 0.0  # kpp, ours: share of each training episode not written; 1: a VAE
    noise: float = 0.0  # kpp, ours: of blocks while training, as a share of their range [-1, 1]
    outline: bool = False  # kpp, ours: blocks start as an outline of their image; 8-bit pixels
    locality: float = 0.0  # kpp, ours: weight of the loss that alone trains transport's keys

    def __post_init__(self) -> None:
        _positive(self, "channels", "size", "reads", "block", "base", "capacity")
        if self.block > self.size and self.read == "soft":  # hard reads take whole cells
            raise UserError(f"memory.block={self.block} exceeds memory.size={self.size}")
        if not 0 <= self.unwritten <= 1:
            raise UserError(f"memory.unwritten must lie in [0, 1], got {self.unwritten}")
        for name in ("noise", "locality"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"memory.{name} must not be negative, got {getattr(self, name)}")
        if self.locality and self.placement != "transport":
            raise UserError(f"memory.locality needs placement=transport, not {self.placement}")
        if self.placement in ("cells", "transport"):
            rows_and_columns(self.capacity)
        elif self.read == "hard":
            raise UserError(f"memory.read=hard needs cells, not placement={self.placement}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cm, Hm, Wm."""
        return (self.channels, self.size, self.size)


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """q(Y|X): a deep linear dense net with spectral normalisation."""

    hidden: int = 512
    layers: int = 3

    def __post_init__(self) -> None:
        _positive(self, "hidden", "layers")


@dataclass(frozen=True, kw_only=True)
class ReadoutConfig:
    """Z: its posterior q(Z|X) and its learned prior p(Z|M-hat, Y)."""

    size: int = 64  # L. ours: the paper does not say. kpp: numbers of the global part, may be 0
    channels: int = 0  # kpp, ours: maps of the spatial part, a quarter of the image's side
    posterior: Literal["amortised", "residual"] = "amortised"  # residual: kpp's, ours
    hidden: int = 512
    layers: int = 3
    prior_width: int = 64  # ours: feature maps of the prior's first convolution

    def __post_init__(self) -> None:
        _positive(self, "hidden", "layers", "prior_width")
        for name in ("size", "channels"):
            if getattr(self, name) < 0:
                raise UserError(f"readout.{name} must not be negative, got {getattr(self, name)}")
        if self.size + self.channels == 0:
            raise UserError("a readout needs readout.size or readout.channels, both are 0")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """p(X|Z): conv-transpose layers with EvoNorm-S0 between them."""

    base: int = 256  # ours: feature maps of the first layer, halved per layer
    layers: int = 3  # ours: doublings of the side
    depth: int = 2  # kpp, ours: residual blocks at each of its two resolutions
    neighbours: int = 0  # kpp, ours: how far a pixel sees up, and to the sides there; 0: not
    near_width: int = 128  # ours: features of a pixel that sees its neighbours
    near_depth: int = 4  # ours: residual blocks of each such pixel
    sketch: float = 1.0  # ours: weight, in training, of the same pixels without their neighbours

    def __post_init__(self) -> None:
        _positive(self, "base", "layers", "depth", "near_width", "near_depth")
        for name in ("neighbours", "sketch"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"decoder.{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class LikelihoodConfig:
    """Bernoulli for binarized sets, a discretized mixture of logistics for 8-bit pixels (§4)."""

    kind: Literal["bernoulli", "logistic_mixture"] = "bernoulli"
    components: int = 10  # of the mixture. ours

    def __post_init__(self) -> None:
        _positive(self, "components")


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """The rivals' memories: a matrix of rows. Their authors' sizes for MNIST and Omniglot."""

    count: int = 32  # K: rows of the Kanerva machines, slots of dnc
    width: int = 100  # C: numbers in a row, and in a code that is written
    address: int = 32  # km, ours: numbers of y, from which an address is made
    noise: float = 1.0  # km, dkm, ours: sigma of a code about what is read; learned from here
    charge: bool = True  # km, dkm, ours: training pays for KL(M) too; else M holds more
    heads: int = 4  # dnc: reads for each image

    def __post_init__(self) -> None:
        _positive(self, "count", "width", "address", "noise", "heads")


ModelName = Literal[
    "kpp", "kpp-paper", "vae", "no-memory", "km", "dkm", "dkm-tsm", "vma", "dnc"
]  # fmt: skip
ROWED = ("km", "dkm", "dkm-tsm", "dnc")  # whose memory is a matrix of rows


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What it takes to build a model."""

    model: ModelName = "kpp-paper"
    image: tuple[int, int, int] = (1, 28, 28)  # C, H, W
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    rows: RowsConfig = field(default_factory=RowsConfig)
    likelihood: LikelihoodConfig = field(default_factory=LikelihoodConfig)

    def __post_init__(self) -> None:
        if min(self.image) < 1:
            raise UserError(f"image must be (channels, height, width), got {self.image}")
        if self.likelihood.kind == "logistic_mixture" and self.image[0] not in (1, 3):
            raise UserError(f"logistic_mixture needs 1 or 3 channels, got {self.image[0]}")
        memory, readout = self.memory, self.readout
        if self.model != "kpp":
            printed = {"memory.placement": "gaussian", "memory.read": "soft"}
            printed |= {"readout.posterior": "amortised", "readout.channels": 0}
            printed |= {"decoder.neighbours": 0, "memory.outline": False}
            for name, value in printed.items():
                group, option = name.split(".")
                if getattr(getattr(self, group), option) != value:
                    got = getattr(getattr(self, group), option)
                    raise UserError(
                        f"{self.model} is the model as printed, {name}={got} is for kpp"
                    )
            if readout.size == 0:
                raise UserError(
                    f"{self.model} reads a vector: readout.size must be positive, got 0"
                )
        if self.model not in ("kpp-paper", "dkm-tsm", "kpp") and self.encoder.shift != 0:
            raise UserError(
                f"{self.model} sees one image at a time: encoder.shift=0, not {self.encoder.shift}"
            )
        if memory.outline and self.likelihood.kind != "logistic_mixture":
            raise UserError("memory.outline is for 8-bit pixels: likelihood.kind=logistic_mixture")
        if self.model == "kpp" and memory.reads != 1:
            raise UserError(
                f"kpp writes one block for each sample: memory.reads=1, not {memory.reads}"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how grey pixels become bits: named beside every figure."""

    set: Literal[
        "glyphs", "mnist", "omniglot", "fashion_mnist", "cifar10", "mazes",
        "celeba", "imagenet32", "imagenet64", "images",
    ] = "glyphs"  # fmt: skip
    binarization: Literal["sample", "threshold", "dither", "none"] = "sample"
    folder: str | None = None  # for set = images: the folder of image files
    crop: int | None = None  # for set = celeba: side of the centred square taken; None: all of it

    def __post_init__(self) -> None:
        if self.crop is not None:
            _positive(self, "crop")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """LARS around Adam, one-cycle cosine (App. E)."""

    optimiser: Literal["lars_adam", "adamw"] = "lars_adam"
    lr: float = 5e-3  # ours, for lars_adam: relative to a weight matrix's norm
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's own
    weight_decay: float = 1e-3  # not on biases and norm affines
    warmup_epochs: float = 10.0  # linear; at most a tenth of the run (ours)
    clip: float = 10.0  # ours: gradient norm
    ema: float = 0.0  # ours: decay of an average of the weights; 0 switches off

    def __post_init__(self) -> None:
        _positive(self, "lr", "clip")
        if not 0 <= self.ema < 1:
            raise UserError(f"optim.ema must lie in [0, 1), got {self.ema}")
        for name in ("weight_decay", "warmup_epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"optim.{name} must not be negative, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas must lie in [0, 1), got {self.betas}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(ModelConfig):
    """A training run: the model, its data and how long."""

    preset: str = "glyphs"
    variant: str | None = None  # what a preset's settings are called: kpp's are store and generate
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    episode_length: int = 32  # T. ours: the paper trains between 5 and 64 (§4.3)
    batch: int = 8  # episodes of one step. ours
    steps: int | None = None  # length of the run; None: `epochs` decides
    epochs: int = 500
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    step: Literal["auto", "eager", "compiled", "captured"] = "auto"  # auto: the fastest that runs
    strategy: Literal["ddp", "fsdp"] = "ddp"  # of several processes: weights whole, or in shards
    log_every: int = 20  # steps between lines of metrics.csv
    validate_every: int = 500  # steps between validations, sample grids and checkpoints
    validate_episodes: int = 32  # of the validation split; the bound decides which step is best

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "episode_length", "batch", "epochs", "log_every", "validate_every")
        _positive(self, "validate_episodes")
        if self.steps is not None:
            _positive(self, "steps")
        if self.model == "kpp" and self.episode_length > self.memory.capacity:
            raise UserError(
                f"episode_length={self.episode_length} images do not fit into a memory of "
                f"memory.capacity={self.memory.capacity} blocks"
            )
        if self.episode_length * self.batch < 2:
            raise UserError("a step of one image is too few for batch statistics: raise batch")

    def model_config(self) -> ModelConfig:
        """The part that a checkpoint carries."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in fields(ModelConfig)})

    def config_hash(self) -> str:
        """Names what was trained, whatever the seed, the folder of data, the logging, and how the
        same arithmetic was run."""
        content = to_dict(self)
        for name in ("seed", "log_every", "preset", "variant", "step", "strategy"):
            del content[name]
        del content["data"]["folder"]
        if self.data.crop is None:
            del content["data"]["crop"]  # as it was before there was one
        if not self.decoder.neighbours:  # as it was before pixels could see any
            for name in ("neighbours", "near_width", "near_depth", "sketch"):
                del content["decoder"][name]
        if not self.memory.outline:
            del content["memory"]["outline"]  # as it was before there was one
        if self.model not in ROWED:
            del content["rows"]  # says nothing of this model
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


C = TypeVar("C")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON and YAML types: tuples become lists."""
    return json.loads(json.dumps(asdict(config)))


def from_dict(cls: type[C], data: Any, where: str = "config") -> C:
    """Build a config strictly: an unknown or ill-typed key is an error that names it."""
    if not isinstance(data, dict):
        raise UserError(f"{where} must be a mapping of options, got {data!r}")
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]  # pyright: ignore[reportArgumentType]
    for key in data:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}; known keys: {', '.join(known)}")
    return cls(**{k: _coerce(hints[k], value, f"{where}: {k}") for k, value in data.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type, or an error; ints pass as floats, lists as tuples."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _coerce(next(a for a in args if a is not type(None)), value, where)
    if is_dataclass(hint):
        return from_dict(hint, value, where)  # pyright: ignore[reportArgumentType]
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise UserError(f"{where} must be a list of {len(args)} values, got {value!r}")
        return tuple(_coerce(a, v, where) for a, v in zip(args, value, strict=True))
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string
        except ValueError:
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where} must be {hint.__name__}, got {value!r}")
    return value
