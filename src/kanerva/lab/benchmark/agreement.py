"""Whether the forms of a step compute the same: same seed, same episodes, step by step.

Two questions. In lockstep, every form takes each step from the weights that the first form had:
what is left is the arithmetic of one step. Left alone, each goes its own way from one start: small
differences grow as training amplifies them, between two runs of one form as between two forms.
"""

from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from kanerva.config import RunConfig
from kanerva.data import TrainingEpisodes
from kanerva.seeding import derive_seed
from kanerva.training.step import Form, Step, assemble


class Walk:
    """One form of a step, walked along a run's first steps."""

    def __init__(
        self, config: RunConfig, form: Form, fabric: Fabric, episodes: TrainingEpisodes
    ) -> None:
        self.config, self.episodes = config, episodes
        self.step = Step(fabric, assemble(config, fabric, form), clip=config.optim.clip, form=form)
        self.step.model.train()

    def take(self, number: int) -> tuple[float, float]:
        """Step `number`: its loss, and the norm of its gradient."""
        config = self.config
        self.step(
            self.episodes.batch_at(number),
            seed=derive_seed(config.seed, "step", number),
            lr=config.optim.lr * min(1.0, (number + 1) / 50),
            decay=config.optim.ema,
        )
        seen = self.step.look()
        return seen.nll, seen.grad_norm

    def tensors(self) -> list[Tensor]:
        """Weights, buffers and the optimiser's state, in an order all forms share."""
        state = self.step.optimizer.state
        kept = [value for p in self.step.parameters for value in state.get(p, {}).values()]
        return [*self.step.parameters, *self.step.buffers, *kept]

    def weights(self) -> Tensor:
        return _flat(self.step.parameters).cpu()


def agreement(
    config: RunConfig, forms: list[Form], fabric: Fabric, episodes: TrainingEpisodes, steps: int
) -> list[dict[str, Any]]:
    """For each form: how far its losses and gradients lie from the first form's, in lockstep and
    left alone. The first is walked twice: what it differs from itself is the device's own noise."""
    lead: list[list[Tensor]] = []
    reference = _alone(Walk(config, forms[0], fabric, episodes), steps, lead)
    rows: list[dict[str, Any]] = []
    for form in forms:
        torch._dynamo.reset()
        locked = _in_step(Walk(config, form, fabric, episodes), steps, lead)
        free = _alone(Walk(config, form, fabric, episodes), steps)
        moved = (reference.ended - reference.start).norm()
        rows.append(
            {
                "form": form,
                "precision": config.precision,
                "steps": steps,
                "first_loss": free.losses[0],
                "last_loss": free.losses[-1],
                "lockstep_loss": _furthest(locked.losses, reference.losses),
                "lockstep_gradient": _furthest(locked.norms, reference.norms),
                "lockstep_update": sum(locked.updates) / max(len(locked.updates), 1),
                "alone_loss": _furthest(free.losses, reference.losses),
                "alone_loss_mean": _mean(free.losses, reference.losses),
                "alone_weights": float((free.ended - reference.ended).norm() / moved),
            }
        )
    return rows


class Path:
    """What a walk saw."""

    def __init__(self, start: Tensor) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.updates: list[float] = []  # in lockstep: distance as a share of the lead's step
        self.start = self.ended = start


def _alone(walk: Walk, steps: int, lead: list[list[Tensor]] | None = None) -> Path:
    """Step after step; `lead` keeps what each began with, for others to begin with."""
    path = Path(walk.weights())
    for number in range(steps):
        if lead is not None:
            lead.append([tensor.detach().clone() for tensor in walk.tensors()])
        loss, norm = walk.take(number)
        path.losses.append(loss)
        path.norms.append(norm)
    path.ended = walk.weights()
    return path


@torch.no_grad()
def _begin(walk: Walk, lead: list[Tensor]) -> None:
    """Put a walk where another was. What an optimiser does not have yet, it has as zero."""
    mine = walk.tensors()
    for number, tensor in enumerate(mine):
        if number < len(lead):
            tensor.copy_(lead[number])
        else:
            tensor.zero_()


def _in_step(walk: Walk, steps: int, lead: list[list[Tensor]]) -> Path:
    """Each step from where the lead began it; and how far from the lead's weights it then ends."""
    path = Path(walk.weights())
    count = len(walk.step.parameters)
    for number in range(steps):
        _begin(walk, lead[number])
        loss, norm = walk.take(number)
        path.losses.append(loss)
        path.norms.append(norm)
        if number + 1 < steps:
            before, after = (_flat(lead[number + n][:count]) for n in (0, 1))
            apart = (_flat(walk.step.parameters) - after).norm() / (after - before).norm()
            path.updates.append(float(apart))
    return path


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def _furthest(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def _mean(mine: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)) / len(mine)
