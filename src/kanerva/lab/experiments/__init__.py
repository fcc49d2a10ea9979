"""The paper's tables and figures, and experiments beyond it: one file and one command each.

An experiment's file defines `ABOUT`, its description; `run`, which measures; and `verdict`, which
judges the figures. Files that are not in NAMES are shared by several experiments.
"""

from importlib import import_module

from kanerva.errors import UserError, suggest
from kanerva.lab.harness import Experiment, Finding, Lab

NAMES = {  # experiment: file; first in the paper's order, then those beyond it
    "table1": "table1",
    "allocator": "allocator",
    "iterative": "iterative",
    "denoise": "denoise",
    "spatial-transformer": "spatial_transformer",
    "perturb": "perturb",
    "random-keys": "random_keys",
    "vae-vs-kpp": "vae_vs_kpp",
    "reconstructions": "reconstructions",
    "recall": "recall",
    "memory-useful": "memory_useful",
    "episode-length": "episode_length",
    "read-steps": "read_steps",
    "temporal-shift": "temporal_shift",
    "few-shot": "few_shot",
    "lossless": "lossless",
    "gist": "gist",
    "files": "files",
    "mixed-memories": "mixed_memories",
    "classify": "classify",
    "new-drawings": "new_drawings",
    "store-search": "store_search",
    "store-scale": "store_scale",
    "associative": "associative",
}

__all__ = ["NAMES", "Experiment", "Finding", "Lab", "experiment"]


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        hint = suggest(name, NAMES)
        raise UserError(f"unknown experiment {name!r}; {hint}there are {', '.join(NAMES)}")
    module = import_module(f"kanerva.lab.experiments.{NAMES[name]}")
    return Experiment(name=name, run=module.run, verdict=module.verdict, **vars(module.ABOUT))
