"""The config of a training run: model, data, optimiser, length. Saved as the run's config.yaml."""

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
    """The images, and how grey pixels become binary; reported with every result."""

    group: ClassVar[str] = "data"
    may_be_zero: ClassVar[tuple[str, ...]] = ("kin",)
    most: ClassVar[dict[str, int]] = {"kin_labels": 2}
    set: str = "glyphs"
    """Name of the data set; `kanerva data list` shows them."""
    binarization: Binarization = "sample"
    """How grey pixels become binary: sample anew each epoch, static once; none keeps 8 bits."""
    augment: Augment = "none"
    """affine: rotate, scale, shear and shift half of the training images a little, anew each epoch;
    with data.kin, half of the labels. copies: do so to every image; kin are then copies of one
    image, and labels are not used."""
    kin: float = 0.0
    """Fraction of training episodes whose images share one label. The only use of labels."""
    kin_labels: int = 1
    """2: half of these episodes have images of two labels."""
    folder: str | None = None
    """images: the folder of image files."""
    crop: int | None = None
    """celeba: side of the central crop; the default is the whole picture."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.set not in DATASETS:
            raise UserError(f"unknown data set {self.set!r}; there are {', '.join(DATASETS)}")
        if self.kin > 1:
            raise UserError(f"data.kin is a fraction of episodes, at most 1, got {self.kin}")
        if self.kin_labels > 1 and (not self.kin or self.augment == "copies"):
            raise UserError("data.kin-labels=2 needs data.kin above 0, and labels")
        if self.augment == "copies" and not self.kin:
            raise UserError("data.augment=copies needs data.kin above 0: the fraction of episodes")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptionGroup):
    """The optimiser; by default the paper's: LARS around Adam, one-cycle cosine (App. E)."""

    group: ClassVar[str] = "optim"
    may_be_zero: ClassVar[tuple[str, ...]] = ("weight_decay", "warmup_epochs", "ema")
    optimiser: Literal["lars_adam", "adamw", "muon"] = "lars_adam"
    """The optimiser; the paper uses lars_adam. muon: AdamW, except that the updates of weight
    matrices are orthogonalised."""
    lr: float = 5e-3
    """Learning rate; for lars_adam relative to a weight matrix's norm. ours"""
    weight_decay: float = 1e-3
    """Weight decay; not on biases and norm affines."""
    warmup_epochs: float = 10.0
    """Epochs of linear warmup; at most a tenth of the run (ours)."""
    clip: float = 10.0
    """Largest gradient norm. ours"""
    ema: float = 0.0
    """Decay of the moving average of the weights; 0 disables. ours"""
    kl_weight: float | Literal["1/T"] = 1.0
    """Weight of both KL terms in training; unless it is 1, the objective is not a bound."""

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
    """The model, by name; its options are on the same level as the run's own."""
    preset: str = "glyphs"
    """The data set whose settings the run starts from."""
    variant: str | None = None
    """Variant of a preset: store for kpp, strong for the paper's models."""
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    episode_length: int = 32
    """T, images per episode. ours: the paper trains between 5 and 64 (§4.3)."""
    batch: int = 8
    """Episodes per step. ours"""
    steps: int = 100_000  # about 500 epochs of MNIST (App. E)
    """Training steps."""
    seed: int = 0
    """Seed of weights, episodes and noise."""
    precision: Precision = "32-true"
    """bf16-mixed: matrix products in bfloat16."""
    execution: Execution = "auto"
    """How a step is executed; auto: the fastest on this machine."""
    log_every: int = 20
    """Steps between rows of metrics.csv."""
    validate_every: int = 500
    """Steps between validations, sample grids and checkpoints."""
    validate_episodes: int = 32
    """Episodes of the validation split that are scored; the score decides which step is best."""

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
        """Hash the options that differ from the defaults, except those that do not define the
        training: seed, data folder, logging, and how the same arithmetic is executed."""
        content = {
            "model": self.model.name,
            "versions": [self.config_version, self.model.config_version],
            "options": changed_options(self),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def changed_options(config: RunConfig) -> dict[str, Any]:
    """The options that differ from the defaults of the run and its model, by flat name."""
    default = flatten(to_dict(RunConfig(model=type(config.model)())))
    current = flatten(to_dict(config))
    return {k: v for k, v in current.items() if v != default[k] and k not in NOT_HASHED}
