"""Data sets by name: find them, load a split, download the files."""

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from kanerva.data.cache import cache_dir
from kanerva.data.download import check_published, download
from kanerva.data.image_set import ImageSet
from kanerva.data.registry import DATASETS, SPLITS, info
from kanerva.errors import UserError


def data_root(explicit: Path | None = None) -> Path:
    """The folder of the data sets: `explicit`, else `$KANERVA_DATA`, else the cache folder."""
    if explicit is not None:
        return Path(explicit).expanduser()
    chosen = os.environ.get("KANERVA_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir()


def load(
    name: str,
    split: str,
    root: Path | None = None,
    **options: Any,
) -> ImageSet:
    """Load one split of a set: train, validation or test.

    Some sets take options: folder, size and channels for `images`, crop for `celeba`. An option
    that is None counts as not given.
    """
    entry = info(name)
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    options = {option: value for option, value in options.items() if value is not None}
    for option, value in options.items():
        if option not in entry.options:
            raise _misplaced(f"{option}={value}", option, name)
    if entry.needs and entry.needs not in options:
        raise UserError(f"{name} needs the option {entry.needs}")
    place = data_root(root)
    module = _module(name)
    for folder in (place, place / name):  # cifar10 may be in either
        check_published(getattr(module, "FILES", ()), folder)
    image_set = module.load(split, place / name, **options)
    if image_set is None:
        fetching = f"run `kanerva data fetch {name}`"
        remedy = f"put {entry.by_hand} into {name}/" if entry.by_hand else fetching
        raise UserError(
            f"{name} not found in {place}: {remedy}, or point --data-root "
            f"or $KANERVA_DATA at a folder that holds {name}/"
        )
    return image_set


def is_present(name: str, root: Path | None = None) -> bool:
    """Whether `load` would find the set's test split. Always false for `images`, which depends on
    the folder."""
    return _module(name).is_present(data_root(root) / name)


def fetch(name: str, root: Path | None = None) -> list[Path]:
    """Download the files of a set to `<root>/<name>/`, except those already there and correct.

    `glyphs` and `mazes` are not downloaded but rendered: now, instead of on first use.
    """
    entry, module = info(name), _module(name)
    place = data_root(root) / name
    if hasattr(module, "fetch"):
        return module.fetch(place)
    if hasattr(module, "FILES"):
        return download(module.FILES, place)
    if entry.by_hand:
        raise UserError(f"{name} cannot be fetched: put {entry.by_hand} into {place}/")
    raise UserError(f"{name} cannot be fetched: it is {entry.description}")


def _module(name: str) -> ModuleType:
    """The module of a set; its interface is described in `registry`."""
    return import_module(info(name).module or f"kanerva.data.{name}")


def _misplaced(flag: str, option: str, name: str) -> UserError:
    takers = [entry.name for entry in DATASETS.values() if option in entry.options]
    if not takers:
        own = ", ".join(info(name).options) or "no options"
        return UserError(f"no data set takes {flag}: {name} takes {own}")
    sets = "set" if len(takers) == 1 else "sets"
    return UserError(f"{flag} is for the data {sets} {', '.join(takers)}, not for {name}")
