"""How long a run will take here, before it starts: some images are trained on, and thrown away."""

import time

import torch

from kanerva.config import RunConfig
from kanerva.models import build

ENOUGH = 1.0  # seconds of a trial: a step that takes longer is not tried whole


def seconds_left(config: RunConfig, device: torch.device) -> float:
    """Of forward and backward passes over all images of a run; validation and saving come on top.
    No random number of the run is used up."""
    whole = config.batch * config.episode_length
    with torch.random.fork_rng(devices=[]):
        model = build(config.model).to(device).train()

        def trial(count: int) -> float:
            length = min(count, config.episode_length)
            shape = (count // length, length, *config.model.image)
            start = time.perf_counter()
            terms = model(torch.rand(shape, device=device).round())
            torch.stack([term.float().mean() for term in terms.values()]).sum().backward()
            return (time.perf_counter() - start) / (count // length * length)

        count = min(4, whole)
        trial(count)  # warms up
        took = trial(count)
        while took * count < ENOUGH and count < whole:  # small trials take longer for each image
            count = min(2 * count, whole)
            took = trial(count)
        took = min(took, trial(count))
    return took * config.steps * whole


def spell_time(seconds: float) -> str:
    """Roughly, as one says it."""
    minutes = seconds / 60
    if minutes < 1.5:
        return "a minute"
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.0f} hours"
