"""Check what users pass before it is used, so that a mistake is one line, not a torch error."""

from operator import index
from pathlib import Path

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kanerva.errors import UserError
from kanerva.plain_files import shown


def as_count(name: str, value: object, least: int = 1) -> int:
    """A whole number."""
    try:
        number = index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UserError(f"{name} must be a whole number, got {shown(value)}") from None
    if number < least:
        raise UserError(f"{name} must be at least {least}, got {number}")
    return number


def as_chance(name: str, value: object) -> float:
    """A probability."""
    try:
        chance = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        chance = -1.0
    if not 0 <= chance <= 1:  # NaN fails too
        raise UserError(f"{name} must be a number on [0, 1], got {shown(value)}")
    return chance


def as_handles(value: object) -> Int[Tensor, "*n"]:
    """Handles as a tensor: a number, a list, a range, an array or a tensor of whole numbers."""
    try:
        handles = torch.as_tensor(value)
        if handles.numel() == 0:
            return handles.long()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        handles = None
    if handles is None or handles.dtype == torch.bool or handles.is_floating_point():
        raise UserError(
            f"handles are whole numbers, such as those of memory.handles; {shown(value)} is not "
            "held"
        )
    return handles.long()


def as_device(name: object) -> torch.device:
    """A device that this machine has."""
    try:
        device = torch.device(name)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, TypeError):
        raise UserError(f"device must be cpu, cuda or cuda:NUMBER, got {shown(name)}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device}: this machine has no such CUDA device; use cpu")
    if device.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, NotImplementedError, ImportError, AssertionError):
            raise UserError(f"device {device}: there is none here; use cpu") from None
    return device


def as_path(value: object) -> Path:
    """The path of a file or folder."""
    try:
        return Path(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UserError(f"expected the path of a file, got {shown(value)}") from None


def as_mask(value: object) -> Float[Tensor, "..."]:
    """Which pixels are visible: 1 or true there, else 0."""
    try:
        mask = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        mask = None
    if mask is None or mask.is_complex() or not bool(mask.isfinite().all()):
        raise UserError(f"observed must be 1 or 0 for each pixel, got {shown(value)}")
    return mask.float()


def require_tensor_images(value: object, what: str = "images") -> Shaped[Tensor, "..."]:
    """Refuse anything but a tensor; the message points to `prepare`, which makes one."""
    if not isinstance(value, Tensor):
        raise UserError(
            f"{what} must be a tensor, got {type(value).__name__}: kanerva.prepare({what}, model) "
            "converts arrays, lists and Pillow's images"
        )
    return value
