"""Tensors in one safetensors file with a digest of its content: memories, weights, optimisers."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kanerva.errors import UserError
from kanerva.plain_files import open_regular, reason, write_whole

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def digest(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """SHA-256 of names, types, shapes and values, and of the metadata `about`."""
    total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write one file atomically. Equal tensors give equal bytes."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        content = save(plain, metadata=about | {"sha256": digest(plain, about)})
    except SafetensorError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    write_whole(path, _in_order(content))


def _in_order(content: bytes) -> bytes:
    """Sort the header of a safetensors file; safetensors leaves its order to chance."""
    header = json.dumps(_header(content), sort_keys=True, separators=(",", ":"))
    padded = header + " " * (-len(header) % 8)
    start = 8 + int.from_bytes(content[:8], "little")
    return len(padded).to_bytes(8, "little") + padded.encode() + content[start:]


def _header(content: bytes) -> dict[str, Any]:
    """Parse the JSON header of a safetensors file. It follows its own length."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def read_tensors(
    path: Path, sealed: Callable[[dict[str, str]], bool] = lambda about: False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and their metadata, and check them against the digest.

    Files that kanerva did not write have no digest. `sealed` is given the metadata and returns
    whether this file must have one.
    """
    try:
        with open_regular(path) as file:  # opened once: the path may change hands a moment later
            content = file.read()
        tensors, about = load(content), _header(content).get("__metadata__", {})
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}") from error
    except Exception as error:  # safetensors and torch raise errors of many kinds
        raise UserError(f"{path} is damaged or unreadable: {reason(error)}") from error
    seal = about.pop("sha256", None)
    if seal is None and sealed(about):
        raise UserError(f"{path} lacks the digest it was saved with: it was altered")
    if seal is not None and seal != digest(tensors, about):
        raise UserError(f"{path} was altered after it was saved")
    return tensors, about


def require_tensor(
    tensors: dict[str, Tensor],
    name: str,
    where: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Return a file's tensor `name`; refuse another dtype or shape, and non-finite numbers."""
    if name not in tensors:
        raise UserError(f"{where}: {name} is missing")
    value = tensors[name]
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise UserError(f"{where}: {name} is {tuple(value.shape)}, not {tuple(shape)}")
    if value.dtype not in dtypes:
        raise UserError(f"{where}: {name} is {value.dtype}, not {dtypes[0]}")
    if value.is_floating_point() and not value.float().isfinite().all():
        raise UserError(f"{where}: {name} holds numbers that are not finite")
    return value
