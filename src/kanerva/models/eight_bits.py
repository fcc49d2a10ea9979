"""Weights in 8 bits, as models ship: for each row of a weight, integers and a scale.

A file has the integers under the weight's name, and the scales under that name and `.scale`. In
layers that compute in integers (`memory/fixed_point.py`), weights have no scales and lose nothing;
their biases, and all vectors, are in half precision. Buffers are as they are: some are tables that
must be exact.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from kanerva.errors import UserError
from kanerva.files import require_tensor
from kanerva.memory.fixed_point import FixedLinear, as_bytes, from_bytes

_SCALE = ".scale"
_LARGEST = 127

Scales = Float[Tensor, " rows"]


def in_eight_bits(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors, rounded for shipping; refuse numbers that cannot be represented."""
    found = model.state_dict()
    fixed = {n: part for n, part in model.named_modules() if isinstance(part, FixedLinear)}
    exact = {f"{name}.weight" for name in fixed}
    halved = {f"{name}.bias" for name in fixed}
    found |= {f"{name}.weight": as_bytes(layer) for name, layer in fixed.items()}
    for name, value in model.named_parameters():
        if name in exact:
            continue
        rounded = kept = value.detach().half()
        if value.ndim > 1 and name not in halved:
            rounded, kept = _round(value.detach().float())
            found[name + _SCALE] = kept
        if not kept.isfinite().all():
            raise UserError(f"{name} has numbers out of half precision's range: not shipped")
        found[name] = rounded
    return found


def _round(weight: Float[Tensor, "rows ..."]) -> tuple[Int8[Tensor, "rows ..."], Scales]:
    """Integers and scales whose products are near these numbers."""
    rows = weight.flatten(1)
    scale = rows.abs().amax(dim=1) / _LARGEST
    whole = (rows / torch.where(scale > 0, scale, 1.0)[:, None]).round()
    return whole.to(torch.int8).view_as(weight), scale


def from_eight_bits(tensors: dict[str, Tensor], where: object) -> dict[str, Tensor]:
    """The tensors of a file, as floats. Files without integers are not changed."""
    found = {}
    for name, value in tensors.items():
        weight = name.removesuffix(_SCALE)
        if weight != name and weight in tensors and tensors[weight].dtype == torch.int8:
            continue  # belongs to the weight
        if value.dtype == torch.int8 and name + _SCALE in tensors:
            rows = value.shape[:1]
            scale = require_tensor(tensors, name + _SCALE, where, [torch.float32], rows)
            value = value * scale.view(-1, *[1] * (value.ndim - 1))
        elif value.dtype == torch.int8:
            value = from_bytes(value)
        found[name] = value
    return found
