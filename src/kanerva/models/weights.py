"""A module with a fingerprint of its weights, which is computed once and cached."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kanerva.config import ModelConfig, to_dict
from kanerva.config.retired import with_retired
from kanerva.files import digest
from kanerva.inputs import as_device


class KnownWeights(nn.Module):
    """A module that caches the fingerprint of its weights and config. The config is included,
    because the same weights can be used in different ways."""

    config: ModelConfig

    def __init__(self) -> None:
        super().__init__()
        self._owners: list[dict[str, Any]] | None = None
        self._names: dict[str, tuple[list[int], str]] = {}

    def fingerprint(self) -> str:
        """A hash of weights and config: a block can be read only with those that wrote it."""
        return self._hash("weights and config")

    def block_fingerprint(self) -> str:
        """The same without the number of cells, which blocks do not depend on."""
        return self._hash("blocks", without=("capacity", "size"))

    def fresh_block_fingerprint(self) -> str:
        """The same, hashed again: weights may be changed through `.data` unnoticed."""
        self._forget()
        return self.block_fingerprint()

    def _hash(self, kind: str, without: tuple[str, ...] = ()) -> str:
        """Cached: it is asked for at every read."""
        versions = self.weight_versions()
        if self.training or self._names.get(kind, ([], ""))[0] != versions:
            config = with_retired(to_dict(self.config))
            for option in without:
                del config["memory"][option]
            about = {"config": json.dumps(config, sort_keys=True)}
            self._names[kind] = (versions, digest(self.state_dict(), about))
        return self._names[kind][1]

    def weight_versions(self) -> list[int]:
        """Addresses and version counters of all tensors, one of which changes if weights do."""
        if self._owners is None:  # cached: collecting them takes longer than reading one block
            self._owners = [
                tensors for part in self.modules() for tensors in (part._parameters, part._buffers)
            ]
        tensors = [t for owned in self._owners for t in owned.values() if t is not None]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return [*versions, *[tensor.data_ptr() for tensor in tensors]]

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Drop the cache: tensors of inference mode have no version counters."""
        self._forget()
        return super().load_state_dict(*args, **options)

    def train(self, mode: bool = True) -> Any:
        """Drop the cache: training may change weights without changing their version counters, as
        when a CUDA graph is replayed."""
        self._forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._forget()
        return super()._apply(fn, recurse)

    def _forget(self) -> None:
        self._owners = None
        self._names.clear()

    def to(self, *args: Any, **options: Any) -> Any:
        """As in torch, but a missing device gives an error of one line."""
        for value in (*args, options.get("device")):
            if isinstance(value, str | torch.device):
                as_device(value)
        return super().to(*args, **options)
