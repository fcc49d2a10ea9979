"""Data sets as bytes, and the episodes that models are trained and scored on."""

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
