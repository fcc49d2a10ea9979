"""Where a number came from: commit, versions, device."""

import os
import platform
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def commit() -> str:
    """`$KANERVA_COMMIT`, else the commit of the checkout this package lies in, else `unknown`."""
    if given := os.environ.get("KANERVA_COMMIT"):
        return given
    here = Path(__file__).resolve().parent
    if not (here.parents[1] / ".git").exists():
        return "unknown"
    try:
        head = subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "."],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that computed a number."""
    try:
        kanerva = version("kanerva")
    except PackageNotFoundError:  # run from a source tree that is not installed
        kanerva = "source"
    return {"kanerva": kanerva, "torch": torch.__version__, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """The accelerator's name, or `cpu` with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{device.type}, {count} thread{'' if count == 1 else 's'}"


PLACES = ("--results", "--data-root", "--out", "--runs", "--name")  # machine-specific paths


def command(words: list[str]) -> str:
    """The command line as typed, without paths specific to the machine it ran on."""
    left, skip = [], False
    for word in words:
        flag = word.split("=")[0].replace("_", "-")
        if not skip and flag not in PLACES:
            left.append(word)
        skip = flag in PLACES and "=" not in word
    return shlex.join(["kanerva", *left])
