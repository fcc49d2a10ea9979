"""Generative memory: write an episode of images into one small latent map, then read it back.

model = kanerva.load("glyphs")                  # or a run: "runs/glyphs-kpp-paper-s0"
memory = model.write(images)                    # (T, C, H, W) -> Memory
recalled = model.recall(memory, noisy, steps=10)
samples = model.generate(memory, 64)
terms = model.elbo(images)                      # nats per image, higher is better
"""

from kanerva.processor import avoid_amx

avoid_amx()  # before anything below imports torch

from kanerva.config import ModelConfig, RunConfig  # noqa: E402
from kanerva.errors import NumbersWentBad, UserError  # noqa: E402
from kanerva.memory.heap import Memory  # noqa: E402
from kanerva.models import ElboTerms, KppPaper, MemoryModel, build, load  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "ElboTerms",
    "KppPaper",
    "Memory",
    "MemoryModel",
    "ModelConfig",
    "NumbersWentBad",
    "RunConfig",
    "UserError",
    "build",
    "load",
]
