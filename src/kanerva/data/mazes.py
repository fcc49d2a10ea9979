"""First-person walks through mazes: DeepMind Lab's maze generator and textures, rendered by MuJoCo.

**Not DeepMind Lab itself**: the generator and textures come from `labmaze`, and dm_control's maze
arena combines them. But engine, light, walls and walks differ, and there are no objects. Results on
these frames must never be listed as DeepMind Lab's without saying so.

Every path is a function of (seed, split, number) alone: its own maze, colours and walk. Several
processes render the paths, which are kept in one file, each as one long lossless picture. All
`ours`.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from kanerva.data.array_files import damage_named
from kanerva.data.image_set import ImageSet
from kanerva.data.maze_rendering import render, unpack
from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors
from kanerva.locks import alone

RECIPE = 1  # raise this when a change of walks or rendering changes frames
SEED = 0
PATHS = {"train": 100, "validation": 10, "test": 20}  # each in its own maze
EXTRA = "install with pip install 'kanerva[mazes]'"


def load(split: str, place: Path) -> ImageSet:
    """Load one split: 12,000, 1,200 or 2,400 frames, each path in its own maze. The set is rendered
    to `place` on first use."""
    (rendered,) = fetch(place)
    return read_mazes(rendered, split)


def is_present(place: Path) -> bool:
    return rendered_file(place).is_file()


def rendered_file(place: Path) -> Path:
    return place / f"rendered-{RECIPE}.safetensors"


def fetch(place: Path) -> list[Path]:
    """Return the file of rendered frames; render it if it is missing. Nothing is downloaded."""
    path = rendered_file(place)
    if path.is_file():
        return [path]
    if any(importlib.util.find_spec(name) is None for name in ("labmaze", "dm_control", "mujoco")):
        raise UserError(f"mazes are not in {place}, and rendering them needs an extra: {EXTRA}")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place}: cannot be made ({error.strerror})") from error
    with alone(place):
        if not path.is_file():  # another process may have been first
            write_mazes(path, render(SEED, PATHS), SEED)
    return [path]


def write_mazes(path: Path, packed: dict[str, list[bytes]], seed: int) -> None:
    """Write one file with a digest, atomically. A process that is killed leaves at most a temporary
    file."""
    tensors = {}
    for split, paths in packed.items():
        tensors[split] = torch.frombuffer(bytearray(b"".join(paths)), dtype=torch.uint8)
        tensors[f"{split}_sizes"] = torch.tensor([len(strip) for strip in paths])
    about = {"what": "kanerva mazes", "recipe": str(RECIPE), "seed": str(seed)}
    write_tensors(path, tensors, about)


def read_mazes(path: Path, split: str) -> ImageSet:
    """Read one split of a file that `write_mazes` wrote, and check its digest."""
    remedy = f"move {path} away and run `kanerva data fetch mazes`"
    try:
        tensors, about = read_tensors(path, sealed=lambda about: True)
    except UserError as error:
        raise UserError(f"{error}: {remedy}") from error
    if about.get("what") != "kanerva mazes" or split not in tensors:
        raise UserError(f"{path} holds no mazes for {split}: {remedy}")
    with damage_named(path, f"a file of mazes for {split}", f": {remedy}"):
        parts = tensors[split].split(tensors[f"{split}_sizes"].tolist())
        paths = [unpack(part.numpy().tobytes()) for part in parts]
        frames = torch.from_numpy(np.concatenate(paths)).permute(0, 3, 1, 2).contiguous()
    sizes = torch.tensor([len(strip) for strip in paths])
    groups = torch.arange(len(paths)).repeat_interleave(sizes)  # a group is a path
    return ImageSet("mazes", split, frames, groups=groups)
