"""Estimate how long a run takes on this machine, from trial steps of a throwaway model."""

import time

import torch

from kanerva.config import RunConfig
from kanerva.models import build

ENOUGH = 1.0  # seconds; trials double in size until one takes this long


def seconds_left(config: RunConfig, device: torch.device) -> float:
    """Estimate the seconds of all forward and backward passes of a run; validation and saving come
    on top. Leaves the random state as it was."""
    images = config.batch * config.episode_length
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model = build(config.model).to(device).train()

        def trial(count: int) -> float:
            length = min(count, config.episode_length)
            shape = (count // length, length, *config.model.image)
            start = time.perf_counter()
            terms = model(torch.rand(shape, device=device).round())
            torch.stack([term.float().mean() for term in terms.values()]).sum().backward()
            return (time.perf_counter() - start) / (count // length * length)

        count = min(4, images)
        trial(count)  # warm-up
        took = trial(count)
        while took * count < ENOUGH and count < images:  # small trials take longer per image
            count = min(2 * count, images)
            took = trial(count)
        took = min(took, trial(count))
    return took * config.steps * images


def spell_time(seconds: float) -> str:
    """Spell a duration roughly: "a minute", "20 minutes", "3 hours"."""
    minutes = seconds / 60
    if minutes < 1.5:
        return "a minute"
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.0f} hours"
