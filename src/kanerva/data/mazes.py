"""First-person walks through mazes: DeepMind Lab's maze generator and textures, drawn by MuJoCo.

**Not DeepMind Lab itself**: its generator and pictures come with `labmaze` and dm_control's maze
arena puts them together, but engine, light, walls and walks are others, and there are no objects.
Figures on these frames never stand in a column of DeepMind Lab's without saying so. Frames of the
real one are read from a folder of arrays: `<data root>/mazes/*.npy`, or `load_frames`.

Every path is a function of (seed, split, number) alone: its own maze, colours and walk. Paths are
drawn by several processes and kept in one file, each as one long lossless picture. All `ours`.
"""

import functools
import importlib.util
import io
import math
import os
import queue
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8

from kanerva.data.image_set import ImageSet
from kanerva.data.images import split_of
from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors
from kanerva.seeding import derive_seed

RECIPE = 1  # raise it when a change below changes frames
SEED = 0
SIDE = 64
FRAMES = 120  # of a path: whole episodes of 8, 10, 12, 20, 24, 30, 40, 60, and room for 64
PATHS = {"train": 100, "validation": 10, "test": 20}  # each in a maze of its own
EXTRA = "install with pip install 'kanerva[mazes]'"

CELLS = 15  # a maze's side; outer walls included
ROOMS, ROOM = 6, (3, 5)  # the most rooms of a maze, and their sides
STYLES, SKIES = 5, 3  # sets of textures that labmaze has
HEIGHT, EYE, VIEW = 2.0, 1.0, 90.0  # of walls and eye, in a world of two to a cell; degrees
AMBIENT, DIFFUSE = 0.4, 0.6  # light from everywhere, and from the eye

STEP, TURN = 0.25, math.radians(20)  # the most in a frame: cells walked, angle turned
AHEAD, ROUND = 0.5, 0.6  # cells: how far ahead one looks; over how much a corner is rounded
SWAY, SWAY_FRAMES = math.radians(10), 24  # the head turns a little to and fro
FINE = 50  # points of a way to a cell

Frames = UInt8[np.ndarray, "n H W 3"]
Free = Bool[np.ndarray, "rows columns"]  # a maze: where there is no wall
Points = Float[np.ndarray, "n 2"]  # row and column, in cells
Poses = Float[np.ndarray, "n 3"]  # the same and the heading: 0 looks along a row, pi / 2 down
Cell = tuple[int, int]


# The set


def load_mazes(split: str, place: Path) -> ImageSet:
    """One split: 12,000, 1,200 or 2,400 frames, each path in a maze of its own.

    Rendered into `place` on first use. Arrays of the real DeepMind Lab's frames that were put there
    by hand are taken instead.
    """
    if find_arrays(place):
        return load_frames(place, split)
    return read_mazes(fetch_mazes(place), split)


def find_mazes(place: Path) -> Path | None:
    """The file of rendered frames, where there is one."""
    path = place / f"rendered-{RECIPE}.safetensors"
    return path if path.is_file() else None


def fetch_mazes(place: Path) -> Path:
    """The file of rendered frames; rendered now if it is not there. Nothing is downloaded."""
    if find_arrays(place):
        raise UserError(f"{place} holds arrays (.npy), which are taken for mazes: move them away")
    found = find_mazes(place)
    if found is not None:
        return found
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
    return path


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
        tensors, about = read_tensors(path)
    except UserError as error:
        raise UserError(f"{error}: {again}") from error
    if about.get("what") != "kanerva mazes" or split not in tensors:
        raise UserError(f"{path} holds no mazes for {split}: {again}")
    parts = tensors[split].split(tensors[f"{split}_sizes"].tolist())
    return as_set("mazes", split, [unpack(part.numpy().tobytes()) for part in parts])


def as_set(name: str, split: str, paths: list[np.ndarray]) -> ImageSet:
    """Paths one after another; a group is a path."""
    frames = np.concatenate(paths).transpose(0, 3, 1, 2)
    sizes = torch.tensor([len(path) for path in paths])
    groups = torch.arange(len(paths)).repeat_interleave(sizes)
    return ImageSet(name, split, torch.from_numpy(np.ascontiguousarray(frames)), groups=groups)


def pack(frames: Frames) -> bytes:
    """A path as one tall picture, frame below frame, in lossless WebP."""
    from PIL import Image

    buffer = io.BytesIO()
    strip = Image.fromarray(frames.reshape(-1, *frames.shape[2:]))
    strip.save(buffer, "WEBP", lossless=True, quality=50, method=4)  # more effort gains 4 %
    return buffer.getvalue()


def unpack(packed: bytes) -> Frames:
    """The very frames that were packed."""
    from PIL import Image

    with Image.open(io.BytesIO(packed), formats=("WEBP",)) as strip:
        pixels = np.asarray(strip.convert("RGB"))
    return pixels.reshape(-1, SIDE, *pixels.shape[1:])


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
    try:
        frames = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not an array that can be read without pickle") from error
    if isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and len(frames.shape) == 4:
        if frames.shape[1:] == (3, SIDE, SIDE):
            frames = frames.transpose(0, 2, 3, 1)
        if frames.shape[1:] == (SIDE, SIDE, 3) and len(frames):
            return frames
    found = f"{frames.dtype} {frames.shape}" if isinstance(frames, np.ndarray) else "an archive"
    raise UserError(
        f"{path}: {found}, where frames are uint8 (N, {SIDE}, {SIDE}, 3) or (N, 3, {SIDE}, {SIDE})"
    )


def _split_of_array(name: str) -> str:
    top, below, _ = name.partition("/")
    return top if below and top in PATHS else split_of(name)


# A walk


def walk(free: Free, random: np.random.Generator, frames: int) -> Poses:
    """Where one stands and looks in each frame: from goal to goal by shortest ways, corners
    rounded, never faster than a step and a turn a frame. What lies behind is turned to first."""
    cells = [(row, column) for row, column in np.argwhere(free).tolist()]
    here = cells[random.integers(len(cells))]
    phase = random.uniform()
    heading: float | None = None
    poses: list[tuple[float, float, float]] = []
    while len(poses) < frames:
        goal = cells[random.integers(len(cells))]
        if abs(goal[0] - here[0]) + abs(goal[1] - here[1]) < 4:
            continue  # not worth the turn
        points = smooth_way(shortest_way(free, here, goal))
        here = goal
        at, last, ahead = 0.0, len(points) - 1, round(AHEAD * FINE)
        while at < last and len(poses) < frames:
            stand = points[round(at)]
            back = min(round(at), last - ahead)
            down, along = points[back + ahead] - points[back]
            aim = math.atan2(down, along)
            heading = aim if heading is None else heading
            off = math.remainder(aim - heading, 2 * math.pi)
            heading += max(-TURN, min(TURN, off))
            sway = SWAY * math.sin(2 * math.pi * (len(poses) / SWAY_FRAMES + phase))
            poses.append((stand[0], stand[1], heading + sway))
            at += STEP * FINE * max(0.0, math.cos(max(0.0, abs(off) - TURN)))
    return np.array(poses)


def shortest_way(free: Free, start: Cell, goal: Cell) -> list[Cell]:
    """The cells from one to the other, both included; only cells that share a side adjoin."""
    came, ahead = {start: start}, deque([start])
    while goal not in came:
        row, column = here = ahead.popleft()
        for cell in ((row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)):
            if free[cell] and cell not in came:
                came[cell] = here
                ahead.append(cell)
    way = [goal]
    while way[-1] != start:
        way.append(came[way[-1]])
    return way[::-1]


def smooth_way(cells: list[Cell]) -> Points:
    """A way from cell to cell, finely cut, each point the mean of those around it; ends stay."""
    count = (len(cells) - 1) * FINE + 1
    at = np.arange(count) / FINE
    rows, columns = zip(*cells, strict=True)
    points = np.stack([np.interp(at, np.arange(len(cells)), side) for side in (rows, columns)], 1)
    half = round(ROUND * FINE / 2)
    padded = np.pad(points, ((half, half), (0, 0)), "reflect", reflect_type="odd")
    window = np.ones(2 * half + 1) / (2 * half + 1)
    return np.stack([np.convolve(side, window, "valid") for side in padded.T], 1)


# Rendering


def render_path(seed: int, split: str, number: int, frames: int = FRAMES) -> Frames:
    """One walk through one maze. Needs the extra, and `$MUJOCO_GL` before anything imports it."""
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
    with _numpy_seeded(int(random.integers(2**32))):  # the arena draws from NumPy's global state
        arena.regenerate()
    free = np.array([[token == " " for token in row] for row in maze.entity_layer])
    root: Any = arena.mjcf_model  # its attributes are made from a schema
    _lighten_textures(root)
    light = root.visual.headlight
    light.ambient, light.diffuse, light.specular = [AMBIENT] * 3, [DIFFUSE] * 3, [0.0] * 3
    root.visual.quality.shadowsize = 0  # the light casts none, and room for them takes time
    window = getattr(root.visual, "global")
    window.offwidth, window.offheight = SIDE, SIDE
    eye = root.worldbody.add("camera", name="eye", fovy=VIEW).full_identifier
    physics: Any = mjcf.Physics.from_mjcf_model(root)
    try:
        camera = engine.Camera(physics, SIDE, SIDE, eye)
        which = physics.model.name2id(eye, "camera")
        drawn = np.empty((frames, SIDE, SIDE, 3), np.uint8)
        for frame, (row, column, heading) in enumerate(walk(free, random, frames)):
            ((x, y, _),) = arena.grid_to_world_positions([(row, column)])
            along, up = math.cos(heading), -math.sin(heading)  # the world's y is up the grid
            physics.data.cam_xpos[which] = x, y, EYE
            # columns: the camera's right, its up, and what is behind it
            physics.data.cam_xmat[which] = up, 0, -along, -along, 0, -up, 0, 1, 0
            drawn[frame] = camera.render()
    finally:
        physics.free()
    return drawn


def paint_rooms(walls: np.ndarray, rooms: np.ndarray) -> None:
    """Walls that touch a room take its letter, and so a colour of their own."""
    for row, column in zip(*np.nonzero(walls == "*"), strict=True):
        near = rooms[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        letters = sorted(set(near.flatten().tolist()) - {"."})
        if letters:
            walls[row, column] = letters[0]


def render(
    seed: int, paths: dict[str, int], frames: int = FRAMES, workers: int | None = None
) -> dict[str, list[bytes]]:
    """So many packed paths for each split; whatever the number of workers, the same ones."""
    from tqdm import tqdm

    orders = [(seed, split, n, frames) for split, count in paths.items() for n in range(count)]
    wanted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(workers or wanted or 1, len(orders))
    bar = tqdm(total=len(orders) * frames, desc="rendering mazes", unit="frame", disable=None)
    done: dict[str, list[bytes]] = {split: [] for split in paths}
    with bar, painters(workers) as paint:
        for order, packed in zip(orders, paint(orders), strict=True):
            done[order[1]].append(packed)
            bar.update(frames)
    return done


Order = tuple[int, str, int, int]  # seed, split, number, frames


@contextmanager
def painters(count: int) -> Iterator[Callable[[list[Order]], Iterator[bytes]]]:
    """Processes that render, and what sends them orders. They end with the block, however it ends,
    or when this process is gone.

    Plain subprocesses: those of `multiprocessing` would run the caller's script again.
    """
    idle: queue.SimpleQueue[Painter] = queue.SimpleQueue()
    with ThreadPoolExecutor(count) as threads:
        hired: list[Painter] = []

        def serve(order: Order) -> bytes:
            painter = idle.get()
            try:
                return painter.paint(order)
            finally:
                idle.put(painter)

        try:
            for _ in range(count):
                hired.append(Painter())
                idle.put(hired[-1])
            yield lambda orders: threads.map(serve, orders)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for painter in hired:
                painter.dismiss()


class Painter:
    """One process that renders: an order goes in as a line, a packed path comes back."""

    def __init__(self) -> None:
        self.complaints = tempfile.TemporaryFile()
        here = os.pathsep.join(path or os.getcwd() for path in sys.path)
        quiet = {"LP_NUM_THREADS": "0", "OMP_NUM_THREADS": "1"}  # a process is a core's work
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from kanerva.data.mazes import work; work()"],
            env=os.environ | quiet | {"PYTHONPATH": here} | opengl(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            start_new_session=True,  # Ctrl-C is for the one who asked
        )

    def paint(self, order: Order) -> bytes:
        """A path, or the reason why there is none."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write((" ".join(map(str, order)) + "\n").encode())
            stdin.flush()
            (size,) = struct.unpack("<q", _exactly(stdout, 8))
            return _exactly(stdout, size)
        except (OSError, EOFError) as error:
            raise UserError(
                f"mazes cannot be rendered: {self._last_words()} (MUJOCO_GL="
                f"{opengl()['MUJOCO_GL']}: it needs Debian's libosmesa6, or libegl1 for egl)"
            ) from error

    def dismiss(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.complaints):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # an order that was never read
                    pass

    def _last_words(self) -> str:
        self.process.wait()
        self.complaints.seek(0)
        lines = self.complaints.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:200] if said else f"a process ended with {self.process.returncode}"


def work() -> None:
    """What a painter does until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed must not get between
    for line in sys.stdin:
        seed, split, number, frames = line.split()
        packed = pack(render_path(int(seed), split, int(number), int(frames)))
        answers.write(struct.pack("<q", len(packed)) + packed)
        answers.flush()


def opengl() -> dict[str, str]:
    """What draws without a screen: as `$MUJOCO_GL` says, else Mesa in software where it is (the
    same frames whatever the graphics card), else EGL."""
    return {
        "MUJOCO_GL": os.environ.get("MUJOCO_GL") or ("osmesa" if find_library("OSMesa") else "egl")
    }


def _exactly(stream: IO[bytes], size: int) -> bytes:
    found = stream.read(size)
    if len(found) != size:
        raise EOFError
    return found


def _lighten_textures(root: Any) -> None:
    """Only what a maze uses, at a quarter of its side: still finer than a frame shows, and read and
    handed to OpenGL in a tenth of the time."""
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
