"""First-person walks through mazes: DeepMind Lab's maze generator and textures, drawn by MuJoCo.

**Not DeepMind Lab itself**: its generator and pictures come with `labmaze` and dm_control's maze
arena puts them together, but engine, light, walls and walks are others, and there are no objects.
Figures on these frames never stand in a column of DeepMind Lab's without saying so. Frames of the
real one are read from a folder of arrays: `<data root>/mazes/*.npy`, or `load_frames`.

Every path is a function of (seed, split, number) alone: its own maze, colours and walk. Paths are
drawn by several processes and kept in one file, each as one long lossless picture. All `ours`.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from kanerva.data.array_files import damage_named, read_npy
from kanerva.data.image_set import ImageSet
from kanerva.data.images import split_of
from kanerva.data.maze_rendering import SIDE, Frames, render, unpack
from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors

RECIPE = 1  # raise it when a change of walks or rendering changes frames
SEED = 0
PATHS = {"train": 100, "validation": 10, "test": 20}  # each in a maze of its own
EXTRA = "install with pip install 'kanerva[mazes]'"


# The set


def load(split: str, place: Path) -> ImageSet:
    """One split: 12,000, 1,200 or 2,400 frames, each path in a maze of its own.

    Rendered into `place` on first use. Arrays of the real DeepMind Lab's frames that were put there
    by hand are taken instead.
    """
    if find_arrays(place):
        return load_frames(place, split)
    (rendered,) = fetch(place)
    return read_mazes(rendered, split)


def is_present(place: Path) -> bool:
    return find_mazes(place) is not None or bool(find_arrays(place))


def find_mazes(place: Path) -> Path | None:
    """The file of rendered frames, where there is one."""
    path = place / f"rendered-{RECIPE}.safetensors"
    return path if path.is_file() else None


def fetch(place: Path) -> list[Path]:
    """The file of rendered frames; rendered now if it is not there. Nothing is downloaded."""
    if find_arrays(place):
        raise UserError(f"{place} holds arrays (.npy), which are taken for mazes: move them away")
    found = find_mazes(place)
    if found is not None:
        return [found]
    if any(importlib.util.find_spec(name) is None for name in ("labmaze", "dm_control", "mujoco")):
        raise UserError(f"mazes are not in {place}, and rendering them needs more: {EXTRA}")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place}: cannot be made ({error.strerror})") from error
    path = place / f"rendered-{RECIPE}.safetensors"
    with _alone(place):
        if not path.is_file():  # another process may have been first
            write_mazes(path, render(SEED, PATHS), SEED)
    return [path]


def write_mazes(path: Path, packed: dict[str, list[bytes]], seed: int) -> None:
    """One sealed file, all of it or nothing; a process that is killed leaves a draft at most."""
    tensors = {}
    for split, paths in packed.items():
        tensors[split] = torch.frombuffer(bytearray(b"".join(paths)), dtype=torch.uint8)
        tensors[f"{split}_sizes"] = torch.tensor([len(one) for one in paths])
    about = {"what": "kanerva mazes", "recipe": str(RECIPE), "seed": str(seed)}
    write_tensors(path, tensors, about)


def read_mazes(path: Path, split: str) -> ImageSet:
    """One split of such a file, checked against its seal."""
    again = f"move {path} away and run `kanerva data fetch mazes`"
    try:
        tensors, about = read_tensors(path, sealed=lambda about: True)
    except UserError as error:
        raise UserError(f"{error}: {again}") from error
    if about.get("what") != "kanerva mazes" or split not in tensors:
        raise UserError(f"{path} holds no mazes for {split}: {again}")
    with damage_named(path, f"a file of mazes for {split}", f": {again}"):
        parts = tensors[split].split(tensors[f"{split}_sizes"].tolist())
        return as_set("mazes", split, [unpack(part.numpy().tobytes()) for part in parts])


def as_set(name: str, split: str, paths: list[np.ndarray]) -> ImageSet:
    """Paths one after another; a group is a path."""
    frames = np.concatenate(paths).transpose(0, 3, 1, 2)
    sizes = torch.tensor([len(path) for path in paths])
    groups = torch.arange(len(paths)).repeat_interleave(sizes)
    return ImageSet(name, split, torch.from_numpy(np.ascontiguousarray(frames)), groups=groups)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Processes that want the same file wait for the first; a kill lets go."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# Frames of the real DeepMind Lab


def load_frames(folder: Path, split: str) -> ImageSet:
    """Frames from a folder of arrays (.npy, bytes, N x 64 x 64 x 3 or N x 3 x 64 x 64).

    A file is a path, its frames in order. One below train/, validation/ or test/ is of that split;
    any other is dealt 80/10/10 by a hash of its name.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of arrays")
    named = find_arrays(folder)
    if not named:
        raise UserError(f"{folder}: holds no arrays (.npy)")
    kept = [path for name, path in named.items() if _split_of_array(name) == split]
    if not kept:
        raise UserError(
            f"{folder}: {len(named)} arrays leave none for {split}: add some, or deal them into "
            f"folders {', '.join(PATHS)}"
        )
    return as_set("dmlab", split, [read_frames(path) for path in kept])


def find_arrays(folder: Path) -> dict[str, Path]:
    """The arrays under a folder by their names in it, in order; none hidden."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.npy")}
    return {name: found[name] for name in sorted(found) if not f"/{name}".count("/.")}


def read_frames(path: Path) -> Frames:
    """The frames of one array, whichever way round its colours are."""
    with damage_named(path, "an array that can be read without pickle"):
        frames = read_npy(path)
    if frames.dtype == np.uint8 and len(frames.shape) == 4:
        if frames.shape[1:] == (3, SIDE, SIDE):
            frames = frames.transpose(0, 2, 3, 1)
        if frames.shape[1:] == (SIDE, SIDE, 3) and len(frames):
            return frames
    raise UserError(
        f"{path}: {frames.dtype} {frames.shape}, where frames are uint8 (N, {SIDE}, {SIDE}, 3) or "
        f"(N, 3, {SIDE}, {SIDE})"
    )


def _split_of_array(name: str) -> str:
    top, below, _ = name.partition("/")
    return top if below and top in PATHS else split_of(name)
