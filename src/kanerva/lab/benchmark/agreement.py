"""Whether the eager, compiled and captured forms of a training step compute the same numbers.

All forms get the same seed and the same episodes. They are compared in two ways. In lockstep, each
step of a form starts from the first form's weights and optimiser state, so only the arithmetic of
one step differs. Left alone, each form trains separately from the same initial weights. Training
then amplifies small differences, even between two runs of one form.
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
    """The first steps of a training run in one form, with the losses and norms of each step."""

    def __init__(
        self, config: RunConfig, form: Form, fabric: Fabric, episodes: TrainingEpisodes
    ) -> None:
        self.config, self.episodes = config, episodes
        self.step = Step(fabric, assemble(config, fabric, form), clip=config.optim.clip, form=form)
        self.step.model.train()
        self.start = self.weights()
        self.losses: list[float] = []
        self.norms: list[float] = []  # gradient norms
        self.updates: list[float] = []  # lockstep: distance to the lead / length of its step

    def take(self) -> None:
        """Take the next step."""
        config, number = self.config, len(self.losses)
        self.step(
            self.episodes.batch_at(number),
            seed=derive_seed(config.seed, "step", number),
            lr=config.optim.lr * min(1.0, (number + 1) / 50),
            decay=config.optim.ema,
        )
        seen = self.step.look()
        self.losses.append(seen.nll)
        self.norms.append(seen.grad_norm)

    def tensors(self) -> list[Tensor]:
        """Weights, buffers and the optimiser's state, in an order all forms share."""
        state = self.step.optimizer.state
        kept = [value for p in self.step.parameters for value in state.get(p, {}).values()]
        return [*self.step.parameters, *self.step.buffers, *kept]

    def weights(self) -> Tensor:
        return _flat(self.step.parameters).cpu()

    def alone(self, steps: int, lead: list[list[Tensor]] | None = None) -> None:
        """Take steps on its own. If `lead` is given, append the state before each step to it."""
        for _ in range(steps):
            if lead is not None:
                lead.append([tensor.detach().clone() for tensor in self.tensors()])
            self.take()

    def follow(self, lead: list[list[Tensor]]) -> None:
        """Take each step from the lead's state; measure how far it ends from the lead's weights."""
        count = len(self.step.parameters)
        for here, there in zip(lead, [*lead[1:], None], strict=True):
            self.begin(here)
            self.take()
            if there is not None:
                before, after = (_flat(state[:count]) for state in (here, there))
                apart = (_flat(self.step.parameters) - after).norm() / (after - before).norm()
                self.updates.append(float(apart))

    @torch.no_grad()
    def begin(self, lead: list[Tensor]) -> None:
        """Copy the lead's state. Optimiser state that the lead does not have yet becomes zero."""
        for number, tensor in enumerate(self.tensors()):
            if number < len(lead):
                tensor.copy_(lead[number])
            else:
                tensor.zero_()


def agreement(
    config: RunConfig, forms: list[Form], fabric: Fabric, episodes: TrainingEpisodes, steps: int
) -> list[dict[str, Any]]:
    """Compare losses, gradients and weights of each form with the first form's, in lockstep and
    left alone. The first form is also compared with itself: that difference is device noise."""
    first = Walk(config, forms[0], fabric, episodes)
    lead: list[list[Tensor]] = []
    first.alone(steps, lead)
    rows: list[dict[str, Any]] = []
    for form in forms:
        torch._dynamo.reset()
        locked = Walk(config, form, fabric, episodes)
        locked.follow(lead)
        free = Walk(config, form, fabric, episodes)
        free.alone(steps)
        losses = _distances(free.losses, first.losses)
        moved = (first.weights() - first.start).norm()
        rows.append(
            {
                "form": form,
                "precision": config.precision,
                "steps": steps,
                "first_loss": free.losses[0],
                "last_loss": free.losses[-1],
                "lockstep_loss": max(_distances(locked.losses, first.losses)),
                "lockstep_gradient": max(_distances(locked.norms, first.norms)),
                "lockstep_update": sum(locked.updates) / max(len(locked.updates), 1),
                "alone_loss": max(losses),
                "alone_loss_mean": sum(losses) / len(losses),
                "alone_weights": float((free.weights() - first.weights()).norm() / moved),
            }
        )
    return rows


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def _distances(mine: list[float], theirs: list[float]) -> list[float]:
    """The relative difference at each step."""
    return [abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)]
