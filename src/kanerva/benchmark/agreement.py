"""Whether the forms of a step compute the same: same seed, same episodes, step by step."""

from typing import Any

import torch
from lightning_fabric import Fabric

from kanerva.config import RunConfig
from kanerva.data import TrainingEpisodes
from kanerva.seeding import derive_seed
from kanerva.training.step import Form, Step, assemble


def agreement(
    config: RunConfig, forms: list[Form], fabric: Fabric, episodes: TrainingEpisodes, steps: int
) -> list[dict[str, Any]]:
    """For each form: how far its losses and its final weights lie from the first form's."""
    reference: tuple[list[float], torch.Tensor] | None = None
    rows: list[dict[str, Any]] = []
    for form in forms:
        torch._dynamo.reset()
        parts = assemble(config, fabric, form)
        start = _weights(parts.model)
        step = Step(fabric, parts, clip=config.optim.clip, form=form)
        parts.model.train()
        losses = []
        for number in range(steps):
            seed = derive_seed(config.seed, "step", number)
            rate = config.optim.lr * min(1.0, (number + 1) / 50)
            step(episodes.batch_at(number), seed=seed, lr=rate, decay=config.optim.ema)
            losses.append(step.look().nll)
        ended = _weights(parts.model)
        reference = reference or (losses, ended)
        apart = [abs(a - b) / abs(b) for a, b in zip(losses, reference[0], strict=True)]
        moved = (reference[1] - start).norm()
        rows.append(
            {
                "form": form,
                "precision": config.precision,
                "steps": steps,
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "loss_max_relative": max(apart),
                "loss_mean_relative": sum(apart) / len(apart),
                "weights_relative": float((ended - reference[1]).norm() / moved),
            }
        )
    return rows


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()])
