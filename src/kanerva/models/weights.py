"""A module that knows its weights: a name for them, worked out once, and where they may go."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kanerva.config import ModelConfig, to_dict
from kanerva.files import digest
from kanerva.inputs import as_device


class KnownWeights(nn.Module):
    """See above. `config` is part of the name: the same weights may be put to another use."""

    config: ModelConfig

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Tensor] | None = None
        self._name: tuple[list[int], str] | None = None

    def fingerprint(self) -> str:
        """Of weights and config: who reads a block must have those that wrote it."""
        versions = self.weight_versions()
        if self.training or self._name is None or self._name[0] != versions:
            about = {"config": json.dumps(to_dict(self.config), sort_keys=True)}
            self._name = (versions, digest(self.state_dict(), about))
        return self._name[1]

    def weight_versions(self) -> list[int]:
        """Numbers that are others as soon as weights are."""
        if self._tensors is None:  # walking all modules takes longer than reading one block
            self._tensors = [*self.parameters(), *self.buffers()]
        return [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]

    def train(self, mode: bool = True) -> Any:
        """Training may change weights in ways that leave no trace: a graph that is replayed."""
        self._tensors = self._name = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._tensors = self._name = None
        return super()._apply(fn, recurse)

    def to(self, *args: Any, **options: Any) -> Any:
        """As torch's; a device that is not there is refused in one line."""
        for given in (*args, options.get("device")):
            if isinstance(given, str | torch.device):
                as_device(given)
        return super().to(*args, **options)
