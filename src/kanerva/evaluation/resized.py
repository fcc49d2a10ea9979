"""The same weights with a memory of another size: how the bound changes with floats per image."""

from dataclasses import dataclass, replace

from kanerva.config import KppConfig, RunConfig
from kanerva.errors import UserError
from kanerva.models.base import MemoryModel


@dataclass(frozen=True)
class ResizedMemory:
    """Another memory size for the same weights. Blocks keep their size, so any grid of such cells
    works. Options that are None stay as in the run."""

    episode_length: int | None = None
    capacity: int | None = None
    size: int | None = None

    def apply(self, config: RunConfig, model: MemoryModel) -> tuple[RunConfig, MemoryModel]:
        """Return the run's config and model with this memory."""
        if not isinstance(config.model, KppConfig):
            raise UserError(f"{config.model.name} cannot be scored with a memory of another size")
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
