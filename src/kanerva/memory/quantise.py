"""Quantise memories: the map is rounded after it was written, with one scale for each episode."""

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.errors import UserError

BITS: dict[str, int] = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
Map = Float[Tensor, "*B Cm Hm Wm"]


def pack(map: Map, dtype: str) -> dict[str, Tensor]:
    """Make tensors to save: integers and their scale; int4 packs two numbers into a byte."""
    if dtype not in BITS:
        raise UserError(f"a memory is saved as one of {', '.join(BITS)}, got {dtype!r}")
    if dtype == "float32":
        return {"map": map.float()}
    if dtype == "bfloat16":
        return {"map": map.bfloat16()}
    largest = 2 ** (BITS[dtype] - 1) - 1  # 127 or 7: as many levels below zero as above
    scale = map.float().abs().amax(dim=(-3, -2, -1), keepdim=True).clamp(min=1e-30) / largest
    levels = (map.float() / scale).round().to(torch.int8)
    if dtype == "int8":
        return {"map": levels, "scale": scale}
    flat = (levels.flatten(-3) + 8).to(torch.uint8)
    if flat.shape[-1] % 2:
        flat = torch.nn.functional.pad(flat, (0, 1))
    pairs = flat[..., 0::2] | flat[..., 1::2] << 4
    return {"map": pairs, "scale": scale}


def unpack(tensors: dict[str, Tensor], dtype: str, shape: tuple[int, ...]) -> Map:
    """Invert `pack`, up to rounding, to float32."""
    levels = tensors["map"]
    if dtype in ("float32", "bfloat16"):
        return levels.float()
    if dtype == "int4":
        flat = torch.stack([levels & 15, levels >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
        levels = flat[..., : shape[-3] * shape[-2] * shape[-1]].reshape(shape)
    return levels.float() * tensors["scale"]


def quantise(map: Map, dtype: str) -> Map:
    """Round the map as saving it as `dtype` would."""
    return unpack(pack(map, dtype), dtype, tuple(map.shape))


def bits(floats: int, dtype: str) -> int:
    """Bits of one episode's map of `floats` numbers, including its scale."""
    return floats * BITS[dtype] + (32 if floats and dtype in ("int8", "int4") else 0)
