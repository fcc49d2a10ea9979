"""The paper's tables and figures, and what goes beyond it: one file each, made by one command."""

from importlib import import_module

from kanerva.errors import UserError
from kanerva.experiments.lab import Experiment, Finding, Lab

NAMES = {  # name of the experiment: its file; in the paper's order, then beyond
    "allocator": "allocator",
    "spatial-transformer": "spatial_transformer",
    "reconstructions": "reconstructions",
}

__all__ = ["NAMES", "Experiment", "Finding", "Lab", "experiment"]


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        raise UserError(f"unknown experiment {name!r}; there are {', '.join(NAMES)}")
    return import_module(f"kanerva.experiments.{NAMES[name]}").EXPERIMENT
