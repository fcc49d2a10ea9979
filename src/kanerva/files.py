"""Tensors in one safetensors file that tells if it was altered: memories, weights, optimisers."""

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kanerva.errors import UserError


def digest(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """SHA-256 of names, types, shapes and values, and of what is said about them."""
    total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """One file, synced and renamed into place: all of it or nothing."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(plain, temporary, metadata=about | {"sha256": digest(plain, about)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {_reason(error)}") from error


def write_whole(path: Path, content: bytes) -> None:
    """One file, synced and renamed into place: all of it or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {_reason(error)}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and what was said about them, checked against the digest where there is one."""
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        with path.open("rb"):
            pass  # safetensors reports a file it may not read as missing
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or unreadable: {_reason(error)}") from error
    seal = about.pop("sha256", None)
    if seal is not None and seal != digest(tensors, about):
        raise UserError(f"{path} was altered after it was saved")
    return tensors, about


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
