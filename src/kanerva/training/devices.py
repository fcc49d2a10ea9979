"""One process or many: what `torchrun` started, as a Fabric, and work that the first does alone."""

import logging
import os
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.processor import VARIABLE, WITHOUT_AMX, admits_amx


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
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its banner is not our words
    strategy: Strategy | str = "auto"
    if world > 1:
        strategy = "ddp"
        if config.strategy == "fsdp":
            strategy = ModelParallelStrategy(
                _shard, data_parallel_size=world, tensor_parallel_size=1
            )
    fabric = Fabric(
        accelerator=accelerator,
        devices=here,
        num_nodes=world // here,
        strategy=strategy,
        precision=config.precision,
    )
    on_cpu = fabric.device.type == "cpu"
    if on_cpu and config.precision == "bf16-mixed" and admits_amx():
        raise UserError(
            f"bf16-mixed on a CPU: {VARIABLE}={os.environ.get(VARIABLE)} admits AMX, with which "
            f"some processors stop with 'Illegal instruction': unset it, or set {WITHOUT_AMX}"
        )
    fabric.launch()
    return fabric


def average_over_processes(fabric: Fabric, tensor: Tensor) -> None:
    """The mean of equal shares, in place. Fabric's own would wait for the device first."""
    if fabric.world_size > 1:
        torch.distributed.all_reduce(tensor)
        tensor.div_(fabric.world_size)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spread a model's weights over the processes; a forward pass gathers them."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def in_shards(model: nn.Module) -> bool:
    """Whether each process holds a part of the weights only."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A tensor as one process would have it. All must ask for one that lies in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The inverse: this process's part of a whole tensor, where `like` lies in shards."""
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


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
