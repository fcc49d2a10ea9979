"""Blocks as bytes: codec 0 is int8 numbers after their scale, a float32."""

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


def decode(codec: int, data: bytes) -> Float[Tensor, " numbers"]:
    """The numbers of a block."""
    if codec != INT8 or len(data) < 4:
        raise UserError(f"a block of codec {codec} cannot be read: written by a newer kanerva?")
    levels = np.frombuffer(data, dtype=np.int8, offset=4).astype(np.float32)
    return torch.from_numpy(levels * np.frombuffer(data, dtype="<f4", count=1)[0])
