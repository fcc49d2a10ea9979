"""The data of a run: one split of its set, and the episodes it is trained and scored on."""

from pathlib import Path
from typing import Any

import torch

from kanerva.config import RunConfig
from kanerva.data.episodes import FixedEpisodes, TrainingEpisodes
from kanerva.data.image_set import ImageSet
from kanerva.data.loading import load
from kanerva.data.registry import Binarization, info
from kanerva.errors import UserError


def load_split(config: RunConfig, split: str, root: Path | None) -> ImageSet:
    """Load one split of a run's data, and check it against the model's image size."""
    name, shape = config.data.set, config.model.image
    options: dict[str, Any] = {"crop": config.data.crop}
    if "size" in info(name).options:  # its images are resized to fit
        if config.data.folder is None:
            raise UserError(f"the {name} set needs --data.folder: a folder of image files")
        options["folder"], options["channels"] = Path(config.data.folder), shape[0]
        options["size"] = shape[1:]
    images = load(name, split, root, **options)
    if images.image_shape != shape:
        raise UserError(
            f"{name} images are {images.image_shape}, but the model is configured for image={shape}"
        )
    if config.data.binarization == "none" and config.model.likelihood == "bernoulli":
        raise UserError("a Bernoulli likelihood needs data.binarization other than none")
    return images


def training_episodes(
    config: RunConfig, images: ImageSet, device: torch.device, **share: int
) -> TrainingEpisodes:
    """The episodes a run is trained on. `share` is one process's rank and world_size."""
    return TrainingEpisodes(
        images,
        episode_length=config.episode_length,
        batch=config.batch,
        seed=config.seed,
        binarization=config.data.binarization,
        augment=config.data.augment,
        kin=config.data.kin,
        kin_labels=config.data.kin_labels,
        device=device,
        **share,
    )


def fixed_episodes(
    config: RunConfig,
    images: ImageSet,
    device: torch.device,
    binarization: Binarization | None = None,
) -> FixedEpisodes:
    """The episodes a run is scored on, with the run's T and, by default, its binarization."""
    return FixedEpisodes(
        images,
        episode_length=config.episode_length,
        binarization=binarization or config.data.binarization,
        device=device,
    )
