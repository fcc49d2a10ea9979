"""One process or several: the Fabric for what `torchrun` started, and work for rank 0 alone."""

import atexit
import logging
import os
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor, distributed

from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.processor import VARIABLE, WITHOUT_AMX, admits_amx


def make_fabric(config: RunConfig, accelerator: str) -> Fabric:
    """One device, or one for each process of `torchrun --nproc_per_node N -m kanerva train ...`.

    A config's batch is the total over all processes. Each process has a full copy of the weights.
    """
    world = read_count("WORLD_SIZE", 1)
    here = read_count("LOCAL_WORLD_SIZE", world)
    if config.batch % world:
        raise UserError(
            f"batch={config.batch} does not divide among {world} processes: use a multiple"
        )
    if accelerator == "cuda" and here > torch.cuda.device_count():
        raise UserError(
            f"{here} processes need {here} CUDA devices, this machine has "
            f"{torch.cuda.device_count()}: use --nproc_per_node {torch.cuda.device_count()}"
        )
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # without its banner
    fabric = Fabric(
        accelerator=accelerator,
        devices=here,
        num_nodes=world // here,
        strategy="ddp" if world > 1 else "auto",
        precision=config.precision,
    )
    on_cpu = fabric.device.type == "cpu"
    if on_cpu and config.precision == "bf16-mixed" and admits_amx():
        raise UserError(
            f"bf16-mixed on a CPU: {VARIABLE}={os.environ.get(VARIABLE)} allows AMX, with which "
            f"some processors stop with 'Illegal instruction': unset it, or set {WITHOUT_AMX}"
        )
    fabric.launch()
    if world > 1:
        atexit.register(_leave_processes)
    return fabric


def _leave_processes() -> None:
    """End the threads of gloo before the interpreter ends. Fabric does so for NCCL only; left
    running, they may abort a process that has finished."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def read_count(variable: str, default: int) -> int:
    """Read a number of processes from an environment variable."""
    value = os.environ.get(variable, str(default))
    if not value.isdecimal() or not 0 < int(value[:9]) <= 10**6:
        raise UserError(
            f"{variable}={value} is not a number of processes: unset it, or use torchrun"
        )
    return int(value)


def average_over_processes(fabric: Fabric, tensor: Tensor) -> None:
    """Average a tensor over processes, in place. Fabric's `all_reduce` would first wait for the
    device."""
    if fabric.world_size > 1:
        torch.distributed.all_reduce(tensor)
        tensor.div_(fabric.world_size)


def on_rank_zero(fabric: Fabric, work: Callable[[], object]) -> None:
    """Do some work on rank 0 only. The other ranks wait, and raise if rank 0 failed.

    Without this they would hang where rank 0 gave up, then report lost connections.
    """
    problem: UserError | OSError | None = None
    if fabric.is_global_zero:
        try:
            work()
        except (UserError, OSError) as error:
            problem = error
    if fabric.world_size > 1:
        message = fabric.broadcast(None if problem is None else str(problem))
        problem = problem or (None if message is None else UserError(message))
    if problem is not None:
        raise problem
