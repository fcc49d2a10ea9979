"""One process or many: what `torchrun` started, as a Fabric, and work that the first does alone."""

import os
from collections.abc import Callable

import torch
from lightning_fabric import Fabric

from kanerva.config import RunConfig
from kanerva.errors import UserError


def make_fabric(config: RunConfig, accelerator: str) -> Fabric:
    """One device, or one for each process of `torchrun --nproc_per_node N -m kanerva train ...`.

    The batch of a config is that of all processes together. Weights are kept whole in each (`ddp`)
    or in shards (`fsdp`).
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if config.batch % world:
        raise UserError(
            f"batch={config.batch} does not divide among {world} processes: use a multiple"
        )
    if accelerator == "cuda" and here > torch.cuda.device_count():
        raise UserError(
            f"{here} processes need {here} CUDA devices, this machine shows "
            f"{torch.cuda.device_count()}: use --nproc_per_node {torch.cuda.device_count()}"
        )
    fabric = Fabric(
        accelerator=accelerator,
        devices=here,
        num_nodes=world // here,
        strategy=config.strategy if world > 1 else "auto",
        precision=config.precision,
    )
    fabric.launch()
    return fabric


def first_alone(fabric: Fabric, work: Callable[[], object]) -> None:
    """Let the first process do something that only one may; the others wait, and learn of an error.

    Without this they would hang where the first gave up, and complain of lost connections.
    """
    problem: UserError | OSError | None = None
    if fabric.is_global_zero:
        try:
            work()
        except (UserError, OSError) as error:
            problem = error
    if fabric.world_size > 1:
        told = fabric.broadcast(None if problem is None else str(problem))
        problem = problem or (None if told is None else UserError(told))
    if problem is not None:
        raise problem
