"""One training step: forward, backward, clip, update; skipped whole when numbers are not finite."""

from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from kanerva.models.base import ElboTerms
from kanerva.shapes import Episode


@dataclass(frozen=True)
class StepResult:
    """What a step saw, averaged over its images: nats."""

    nll: float
    recon: float
    kl_z: float
    kl_y: float
    grad_norm: float
    applied: bool  # False: loss or gradient was not finite and nothing was changed


def train_step(
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    episode: Episode,
    clip: float,
) -> StepResult:
    """Minimise the mean negative bound of one batch of episodes, and a model's auxiliary loss."""
    buffers: list[Tensor] = [b.clone() for b in model.buffers()]  # the forward pass moves them
    outputs: dict[str, Tensor] = model(episode)
    auxiliary = outputs.pop("auxiliary", None)
    terms = ElboTerms(**outputs)
    loss = terms.loss
    fabric.backward(loss if auxiliary is None else loss + auxiliary)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    applied = bool(torch.isfinite(loss) & torch.isfinite(grad_norm))
    if applied:
        optimizer.step()
    else:
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        nll=loss.item(),
        recon=-terms.log_likelihood.mean().item(),
        kl_z=terms.readout_kl.mean().item(),
        kl_y=terms.key_kl.mean().item(),
        grad_norm=float(grad_norm),
        applied=applied,
    )
