"""A training run: the model, its data, its optimiser and how long. A run's config.yaml holds it."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kanerva.config.groups import LENGTH, OptionGroup, require_positive
from kanerva.config.models import KppConfig, ModelConfig, VmaConfig
from kanerva.config.plain import flatten, to_dict
from kanerva.data.registry import DATASETS, Augment, Binarization
from kanerva.errors import UserError
from kanerva.plain_files import require_name

Execution = Literal["auto", "eager", "compiled", "captured"]
Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True, kw_only=True)
class DataConfig(OptionGroup):
    """Which images, and how grey pixels become bits: named beside every figure."""

    group: ClassVar[str] = "data"
    may_be_zero: ClassVar[tuple[str, ...]] = ("kin",)
    set: str = "glyphs"
    """The data set's name: `kanerva data list`."""
    binarization: Binarization = "sample"
    """How grey pixels become bits: sample draws afresh each epoch, static once; none: 8-bit."""
    augment: Augment = "none"
    """affine: half of the training images, or of their labels where episodes have kin, are turned,
    scaled, sheared and moved a little, anew each epoch. copies: every image is, each in its own
    way, and kin are copies of one image: no labels are used."""
    kin: float = 0.0
    """Share of training episodes whose images have one label; no other use is made of labels."""
    folder: str | None = None
    """images: the folder of image files."""
    crop: int | None = None
    """celeba: side of the centred square that is taken; the whole picture unless given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.set not in DATASETS:
            raise UserError(f"unknown data set {self.set!r}; there are {', '.join(DATASETS)}")
        if self.kin > 1:
            raise UserError(f"data.kin is a share of episodes, at most 1, got {self.kin}")
        if self.augment == "copies" and not self.kin:
            raise UserError("data.augment=copies makes kin of one image: say how many, data.kin")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptionGroup):
    """The paper's: LARS around Adam, one-cycle cosine (App. E)."""

    group: ClassVar[str] = "optim"
    may_be_zero: ClassVar[tuple[str, ...]] = ("weight_decay", "warmup_epochs", "ema")
    optimiser: Literal["lars_adam", "adamw"] = "lars_adam"
    """lars_adam is the paper's."""
    lr: float = 5e-3
    """Learning rate; for lars_adam relative to a weight matrix's norm. ours"""
    weight_decay: float = 1e-3
    """Not on biases and norm affines."""
    warmup_epochs: float = 10.0
    """Linear; at most a tenth of the run (ours)."""
    clip: float = 10.0
    """Largest gradient norm. ours"""
    ema: float = 0.0
    """Decay of an average of the weights; 0 disables. ours"""
    kl_weight: float | Literal["1/T"] = 1.0
    """Weight of both KL terms in training; with any but 1 what is minimised is no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ema >= 1:
            raise UserError(f"optim.ema must lie in [0, 1), got {self.ema}")


NOT_HASHED = ("seed", "log_every", "preset", "variant", "execution", "data.folder")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    config_version: ClassVar[int] = 1
    model: ModelConfig = KppConfig()
    """The model, by name; its options stand beside the run's own."""
    preset: str = "glyphs"
    """The data set whose settings the run starts from."""
    variant: str | None = None
    """Which settings of a preset: store or generate of kpp, strong of the paper's models."""
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    episode_length: int = 32
    """T, images of an episode. ours: the paper trains between 5 and 64 (§4.3)."""
    batch: int = 8
    """Episodes of one step. ours"""
    steps: int = 100_000  # about 500 epochs of MNIST (App. E)
    """Length of the run."""
    seed: int = 0
    """Of weights, episodes and noise."""
    precision: Precision = "32-true"
    """bf16-mixed: products in bfloat16."""
    execution: Execution = "auto"
    """How a step is run; auto: the fastest that runs here."""
    log_every: int = 20
    """Steps between rows of metrics.csv."""
    validate_every: int = 500
    """Steps between validations, sample grids and checkpoints."""
    validate_episodes: int = 32
    """Episodes of the validation split; their bound decides which step is best."""

    def __post_init__(self) -> None:
        require_positive(self, "episode_length", "batch", "steps", "log_every", most=LENGTH)
        require_positive(self, "validate_every", "validate_episodes", most=LENGTH)
        require_name(self.preset, "preset")
        require_name(self.variant or "none", "variant")
        if isinstance(self.model, KppConfig) and self.episode_length > self.model.memory.capacity:
            raise UserError(
                f"episode_length={self.episode_length} images do not fit into a memory of "
                f"memory.capacity={self.model.memory.capacity} blocks"
            )
        if isinstance(self.model, VmaConfig) and self.kl_weight != 1:
            raise UserError("vma's objective has no separate KL terms: optim.kl-weight must be 1")
        if self.episode_length * self.batch < 2:
            raise UserError("a step of one image is too few for batch statistics: raise batch")

    @property
    def kl_weight(self) -> float:
        """Weight of both KL terms in training, as a number."""
        weight = self.optim.kl_weight
        return 1 / self.episode_length if weight == "1/T" else weight

    def config_hash(self) -> str:
        """Names what is trained: what differs from the defaults, whatever the seed, the folder of
        data, the logging, and how the same arithmetic is executed."""
        content = {
            "model": self.model.name,
            "versions": [self.config_version, self.model.config_version],
            "options": changed_options(self),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def changed_options(config: RunConfig) -> dict[str, Any]:
    """The options that differ from the defaults of the run and its model, by flat name."""
    default = flatten(to_dict(RunConfig(model=type(config.model)())))
    ours = flatten(to_dict(config))
    return {k: v for k, v in ours.items() if v != default[k] and k not in NOT_HASHED}
