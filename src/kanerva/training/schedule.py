"""The learning rate as a function of the step alone: nothing to save, and runs can be extended."""

import math


def warmup_steps(warmup_epochs: float, steps_per_epoch: int, total: int) -> int:
    """Ten epochs (App. E), but at most a tenth of the run."""
    return min(round(warmup_epochs * steps_per_epoch), total // 10)


def lr_factor(step: int, total: int, warmup: int) -> float:
    """One cycle: linear from nearly zero to one over `warmup` steps, then half a cosine to zero."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
