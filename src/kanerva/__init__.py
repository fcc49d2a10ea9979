"""Generative memory: write an episode of images into one small latent map, then read it back.

model = kanerva.load("glyphs")                  # a Kpp; or a run: "runs/glyphs-kpp-store-s0"
images = kanerva.prepare(pictures, model)       # (T, C, H, W) on [0, 1], in model.pixels' format
memory = model.write(images)                    # a Memory: handles, free, save
recalled = model.recall(memory, noisy)[-1]      # pictures on [0, 1], found by content
hits = model.find(memory, noisy[0])             # handles, probabilities; hits.none: not in memory
samples = model.generate(memory, 64)
terms = model.elbo(images)                      # terms.nll_nats: nats per image, lower is better
kanerva.show(written=images, recalled=recalled)

help(kanerva.Kpp) lists every verb.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kanerva.processor import avoid_amx, wait_passively

avoid_amx()  # before torch is loaded
wait_passively()

if TYPE_CHECKING:
    from kanerva import data
    from kanerva.config import ModelConfig, RunConfig
    from kanerva.errors import NumbersWentBad, UserError
    from kanerva.memory.block_memory import BlockMemory
    from kanerva.memory.heap import Memory
    from kanerva.memory.search import Hits
    from kanerva.models import build
    from kanerva.models.base import MemoryModel
    from kanerva.models.kpp import Kpp
    from kanerva.models.loading import load
    from kanerva.models.pixels import PixelFormat, prepare
    from kanerva.models.retrieval import Recalled
    from kanerva.models.terms import ElboTerms
    from kanerva.pictures import show
    from kanerva.presets import preset
    from kanerva.store.store import Store

__version__ = "0.2.0.dev0"
_HOMES = {  # imported when first used: `import kanerva` alone loads no torch
    "BlockMemory": "kanerva.memory.block_memory",
    "ElboTerms": "kanerva.models.terms",
    "Hits": "kanerva.memory.search",
    "Kpp": "kanerva.models.kpp",
    "Memory": "kanerva.memory.heap",
    "MemoryModel": "kanerva.models.base",
    "ModelConfig": "kanerva.config",
    "NumbersWentBad": "kanerva.errors",
    "PixelFormat": "kanerva.models.pixels",
    "Recalled": "kanerva.models.retrieval",
    "RunConfig": "kanerva.config",
    "Store": "kanerva.store.store",
    "UserError": "kanerva.errors",
    "build": "kanerva.models",
    "load": "kanerva.models.loading",
    "prepare": "kanerva.models.pixels",
    "preset": "kanerva.presets",
    "show": "kanerva.pictures",
}
__all__ = [
    "BlockMemory",
    "ElboTerms",
    "Hits",
    "Kpp",
    "Memory",
    "MemoryModel",
    "ModelConfig",
    "NumbersWentBad",
    "PixelFormat",
    "Recalled",
    "RunConfig",
    "Store",
    "UserError",
    "build",
    "data",
    "load",
    "prepare",
    "preset",
    "show",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "data":
        return import_module("kanerva.data")
    raise AttributeError(f"module 'kanerva' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
