"""The same weights in a memory of another size: how a bound changes with floats for each image."""

from dataclasses import dataclass, replace

from kanerva.config import KppConfig, RunConfig
from kanerva.errors import UserError
from kanerva.models.base import MemoryModel


@dataclass(frozen=True)
class ResizedMemory:
    """Another memory for the same weights: blocks stay as they are, so any grid of such cells will
    do. What is None stays as the run has it."""

    episode_length: int | None = None
    capacity: int | None = None
    size: int | None = None

    def apply(self, config: RunConfig, model: MemoryModel) -> tuple[RunConfig, MemoryModel]:
        """The run's config and model with that memory."""
        if not isinstance(config.model, KppConfig):
            raise UserError(f"{config.model.name} cannot be scored in a memory of another size")
        memory = config.model.memory
        memory = replace(
            memory, capacity=self.capacity or memory.capacity, size=self.size or memory.size
        )
        changed = replace(
            config,
            model=replace(config.model, memory=memory),
            episode_length=self.episode_length or config.episode_length,
        )
        return changed, model.resized(changed.model)
