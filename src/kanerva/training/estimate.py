"""How long a run will take here, before it starts: a few images are trained on, and thrown away."""

import time

import torch

from kanerva.config import RunConfig
from kanerva.models import build

FEW = 8  # images of a trial: a step has more, and is no slower for each


def seconds_left(config: RunConfig, device: torch.device) -> float:
    """Of forward and backward passes over all images of a run; validation and saving come on top.
    No random number of the run is used up."""
    with torch.random.fork_rng(devices=[]):
        model = build(config.model).to(device).train()
        length = min(FEW, config.episode_length)
        images = torch.zeros(1, length, *config.model.image, device=device)
        times = []
        for _ in range(3):  # the first also warms up
            start = time.perf_counter()
            sum(term.float().mean() for term in model(images).values()).backward()  # pyright: ignore
            times.append(time.perf_counter() - start)
    return min(times) / length * config.steps * config.batch * config.episode_length


def spell_time(seconds: float) -> str:
    """Roughly, as one says it."""
    minutes = seconds / 60
    if minutes < 1.5:
        return "a minute"
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.0f} hours"
