"""Render mazes with MuJoCo, path by path, in worker processes. Only these import the extra."""

import functools
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from kanerva.data.maze_walks import walk
from kanerva.data.picture_files import open_picture
from kanerva.errors import UserError
from kanerva.seeding import derive_seed

SIDE = 64
FRAMES = 120  # of a path: a multiple of 8, 10, 12, 20, 24, 30, 40 and 60, and more than 64

CELLS = 15  # a maze's side, with its outer walls
ROOMS, ROOM = 6, (3, 5)  # largest number of rooms, and range of their sides
STYLES, SKIES = 5, 3  # sets of textures in labmaze
HEIGHT, EYE, VIEW = 2.0, 1.0, 90.0  # heights of walls and camera (a cell is 2 wide); degrees
AMBIENT, DIFFUSE = 0.4, 0.6  # ambient light, and light from the camera

Frames = UInt8[np.ndarray, "n H W 3"]


# A path as bytes


def pack(frames: Frames) -> bytes:
    """Pack a path as one tall picture, frame below frame, in lossless WebP."""
    from PIL import Image

    buffer = io.BytesIO()
    strip = Image.fromarray(frames.reshape(-1, *frames.shape[2:]))
    strip.save(buffer, "WEBP", lossless=True, quality=50, method=4)  # more effort saves only 4 %
    return buffer.getvalue()


def unpack(packed: bytes) -> Frames:
    """The inverse of `pack`, without loss."""
    pixels = np.asarray(open_picture(packed, channels=3, formats=("WEBP",)))
    return pixels.reshape(-1, SIDE, *pixels.shape[1:])


# One path


def render_path(seed: int, split: str, number: int, frames: int = FRAMES) -> Frames:
    """Render one walk through one maze. Needs the extra, and `$MUJOCO_GL` set before its import."""
    import labmaze  # pyright: ignore[reportMissingImports]
    from dm_control import mjcf  # pyright: ignore[reportMissingImports]
    from dm_control.locomotion.arenas import (  # pyright: ignore[reportMissingImports]
        labmaze_textures,
        mazes,
    )
    from dm_control.mujoco import engine  # pyright: ignore[reportMissingImports]

    random = np.random.default_rng(derive_seed("mazes", seed, split, number))
    maze = labmaze.RandomMaze(
        height=CELLS,
        width=CELLS,
        max_rooms=ROOMS,
        room_min_size=ROOM[0],
        room_max_size=ROOM[1],
        spawns_per_room=0,
        objects_per_room=0,
        random_seed=int(random.integers(2**31)),
    )
    style, sky = random.integers(STYLES) + 1, random.integers(SKIES) + 1
    colours = labmaze_textures.WallTextures(style=f"style_{style:02}")
    arena = mazes.MazeWithTargets(
        maze,
        xy_scale=2.0,
        z_height=HEIGHT,
        skybox_texture=labmaze_textures.SkyBox(style=f"sky_{sky:02}"),
        wall_textures={"*": colours} | {chr(65 + room): colours for room in range(26)},
        floor_textures=labmaze_textures.FloorTextures(style=f"style_{style:02}"),
    )
    arena.text_maze_regenerated_hook = lambda: paint_rooms(maze.entity_layer, maze.variations_layer)
    with _numpy_seeded(int(random.integers(2**32))):  # the arena uses NumPy's global generator
        arena.regenerate()
    free = np.array([[token == " " for token in row] for row in maze.entity_layer])
    root: Any = arena.mjcf_model  # attributes come from a schema at run time
    _lighten_textures(root)
    light = root.visual.headlight
    light.ambient, light.diffuse, light.specular = [AMBIENT] * 3, [DIFFUSE] * 3, [0.0] * 3
    root.visual.quality.shadowsize = 0  # there are no shadows, and their buffer takes time
    window = getattr(root.visual, "global")
    window.offwidth, window.offheight = SIDE, SIDE
    eye = root.worldbody.add("camera", name="eye", fovy=VIEW).full_identifier
    physics: Any = mjcf.Physics.from_mjcf_model(root)
    try:
        camera = engine.Camera(physics, SIDE, SIDE, eye)
        which = physics.model.name2id(eye, "camera")
        rendered = np.empty((frames, SIDE, SIDE, 3), np.uint8)
        for frame, (row, column, heading) in enumerate(walk(free, random, frames)):
            ((x, y, _),) = arena.grid_to_world_positions([(row, column)])
            along, up = math.cos(heading), -math.sin(heading)  # y points up, rows down
            physics.data.cam_xpos[which] = x, y, EYE
            # columns: the camera's right, up and back vectors
            physics.data.cam_xmat[which] = up, 0, -along, -along, 0, -up, 0, 1, 0
            rendered[frame] = camera.render()
    finally:
        physics.free()
    return rendered


def paint_rooms(walls: np.ndarray, rooms: np.ndarray) -> None:
    """Give walls that touch a room the room's letter, and so its colour."""
    for row, column in zip(*np.nonzero(walls == "*"), strict=True):
        near = rooms[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        letters = sorted(set(near.flatten().tolist()) - {"."})
        if letters:
            walls[row, column] = letters[0]


def _lighten_textures(root: Any) -> None:
    """Keep only the textures that a maze uses, at a quarter of their side. They are still finer
    than a frame shows, and load in a tenth of the time."""
    from dm_control import mjcf  # pyright: ignore[reportMissingImports]

    used = {material.texture.full_identifier for material in root.find_all("material")}
    for texture in root.find_all("texture"):
        if texture.type == "2d" and texture.full_identifier not in used:
            texture.remove()
            continue
        sides = ("right", "left", "up", "down", "front", "back") if texture.type != "2d" else ("",)
        for name in (f"file{side}" for side in sides):
            picture = getattr(texture, name).contents
            setattr(texture, name, mjcf.Asset(_quarter(picture), ".png"))


@functools.lru_cache(maxsize=128)  # there are 89
def _quarter(picture: bytes) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as whole:
        whole.convert("RGBA").convert("RGB").reduce(4).save(buffer, "PNG")
    return buffer.getvalue()


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


# Many paths


def render(
    seed: int, paths: dict[str, int], frames: int = FRAMES, workers: int | None = None
) -> dict[str, list[bytes]]:
    """Render packed paths, `paths[split]` of them for each split, independent of `workers`.

    Workers are stopped when this function ends, even by an error; if this process dies, they stop
    after their current path. They are plain subprocesses, because `multiprocessing` would re-run
    the caller's script.
    """
    from tqdm import tqdm

    orders = [(seed, split, n, frames) for split, count in paths.items() for n in range(count)]
    wanted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(workers or wanted or 1, len(orders))
    bar = tqdm(total=len(orders) * frames, desc="rendering mazes", unit="frame", disable=None)
    with bar, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = []
        try:
            for number in range(workers):
                started.append(_start_worker(folder, number, orders[number::workers]))
            while any(process.poll() is None for process in started):
                time.sleep(0.1)
                bar.update(len(list(folder.glob("*.webp"))) * frames - bar.n)
                _check(started, folder)
            _check(started, folder)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return {
            split: [(folder / f"{split}-{n}.webp").read_bytes() for n in range(count)]
            for split, count in paths.items()
        }


Order = tuple[int, str, int, int]  # seed, split, number, frames


def _start_worker(folder: Path, number: int, orders: list[Order]) -> subprocess.Popen[bytes]:
    """Start a process that renders its share of paths to files."""
    here = os.pathsep.join(path or os.getcwd() for path in sys.path)
    quiet = {"LP_NUM_THREADS": "0", "OMP_NUM_THREADS": "1"}  # one core per process
    script = "from kanerva.data.maze_rendering import work; work()"
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(os.getpid()), json.dumps(orders)],
            env=os.environ | quiet | {"PYTHONPATH": here} | opengl(),
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C goes only to this process
        )


def work() -> None:
    """The work of a worker process. It stops when its parent is gone."""
    folder, parent, orders = sys.argv[1:]
    for seed, split, number, frames in json.loads(orders):
        if os.getppid() != int(parent):
            return
        draft = Path(folder, f"{split}-{number}.draft")
        draft.write_bytes(pack(render_path(seed, split, number, frames)))
        draft.rename(draft.with_suffix(".webp"))


def _check(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Raise an error with the last output of a worker that failed."""
    for number, process in enumerate(started):
        if process.poll():
            output = (folder / f"{number}.log").read_text(errors="replace").strip()
            last = output.split("\n")[-1].strip()[:200] or f"ended with {process.returncode}"
            raise UserError(
                f"mazes cannot be rendered: {last} (MUJOCO_GL="
                f"{opengl()['MUJOCO_GL']}: it needs Debian's libosmesa6, or libegl1 for egl)"
            )


def opengl() -> dict[str, str]:
    """The OpenGL that renders without a screen: `$MUJOCO_GL` if set, else Mesa in software if
    installed (the same frames on any graphics card), else EGL."""
    return {
        "MUJOCO_GL": os.environ.get("MUJOCO_GL") or ("osmesa" if find_library("OSMesa") else "egl")
    }
