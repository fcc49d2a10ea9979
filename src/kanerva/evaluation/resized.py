"""The same weights in a memory of another size: how a bound changes with floats for each image."""

from dataclasses import dataclass, replace

from kanerva.config import RunConfig
from kanerva.errors import UserError
from kanerva.models import Kpp, build
from kanerva.models.base import MemoryModel


@dataclass(frozen=True)
class Elsewhere:
    """The same weights in another memory: blocks stay as they are, so any grid of such cells will
    do. What is None stays as the run has it."""

    episode_length: int | None = None
    capacity: int | None = None
    size: int | None = None

    def moved(self, config: RunConfig, model: MemoryModel) -> tuple[RunConfig, MemoryModel]:
        """The run's config and model in that memory."""
        if not isinstance(model, Kpp):
            raise UserError(f"{config.model} cannot be scored in a memory of another size")
        memory = config.memory
        changed = replace(
            config,
            episode_length=self.episode_length or config.episode_length,
            memory=replace(
                memory,
                capacity=self.capacity or memory.capacity,
                size=self.size or memory.size,
            ),
        )
        other = build(changed.model_config())
        assert isinstance(other, Kpp)
        if other.writer.shape != model.writer.shape:
            raise UserError(
                f"a memory of side {changed.memory.size} with {changed.memory.capacity} cells "
                f"takes blocks {other.writer.shape}; these weights write {model.writer.shape}"
            )
        other.load_state_dict(model.state_dict())
        return changed, other.to(model.device).eval()
