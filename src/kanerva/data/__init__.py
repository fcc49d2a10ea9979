"""Data sets as bytes, and the episodes that models are trained and scored on.

Public names are imported on first use, so that importing `kanerva.data.registry` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kanerva.data.binarization import binarize, to_float
    from kanerva.data.cache import cache_dir
    from kanerva.data.episodes import EpisodeBatch, FixedEpisodes, TrainingEpisodes
    from kanerva.data.image_set import ImageSet
    from kanerva.data.images import load_folder, load_images
    from kanerva.data.loading import data_root, fetch, is_present, load
    from kanerva.data.registry import DATASETS, Binarization, DatasetInfo, info

__all__ = [
    "DATASETS",
    "Binarization",
    "DatasetInfo",
    "EpisodeBatch",
    "FixedEpisodes",
    "ImageSet",
    "TrainingEpisodes",
    "binarize",
    "cache_dir",
    "data_root",
    "fetch",
    "info",
    "is_present",
    "load",
    "load_folder",
    "load_images",
    "to_float",
]

# No module may have one of these names: importing it would hide the name.
_NAMES = {
    "binarization": ("binarize", "to_float"),
    "cache": ("cache_dir",),
    "episodes": ("EpisodeBatch", "FixedEpisodes", "TrainingEpisodes"),
    "image_set": ("ImageSet",),
    "images": ("load_folder", "load_images"),
    "loading": ("data_root", "fetch", "is_present", "load"),
    "registry": ("DATASETS", "Binarization", "DatasetInfo", "info"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # later lookups do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
