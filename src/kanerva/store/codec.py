"""Blocks as bytes: codec 0 is int8 numbers after their scale, a float32."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.errors import UserError
from kanerva.memory.quantise import pack

INT8 = 0


def encode(block: Float[Tensor, "Cm h w"]) -> bytes:
    """One block in as many bytes as it has numbers, and four."""
    packed = pack(block.cpu(), "int8")
    scale = np.float32(packed["scale"].item()).astype("<f4").tobytes()
    return scale + packed["map"].numpy().tobytes()


def decode(codec: int, data: bytes, shape: Sequence[int]) -> Float[Tensor, "Cm h w"]:
    """A block of this shape."""
    if codec != INT8:
        raise UserError(f"a block of codec {codec} cannot be read: written by a newer kanerva?")
    if len(data) != 4 + math.prod(shape):
        raise UserError(f"a block has {len(data)} bytes, not {4 + math.prod(shape)}: damaged")
    levels = np.frombuffer(data, dtype=np.int8, offset=4).astype(np.float32)
    scale = np.frombuffer(data, dtype="<f4", count=1)[0]
    if not np.isfinite(scale * 128):
        raise UserError("a block holds numbers that are not finite")
    return torch.from_numpy(levels * scale).view(*shape)
