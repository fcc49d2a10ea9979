"""A lab whose models are trained for a few steps and validated on two episodes."""

from dataclasses import replace
from typing import Any

from kanerva.config import RunConfig
from kanerva.lab.harness import Lab


class TinyLab(Lab):
    """Validation would take longer than training: 128 episodes after two or three steps."""

    def config(self, model: str = "kpp", variant: str | None = None, **parts: Any) -> RunConfig:
        return replace(super().config(model, variant, **parts), validate_episodes=2)
