"""Walks through a maze: from goal to goal by shortest paths, looking ahead."""

import math
from collections import deque

import numpy as np
from jaxtyping import Bool, Float

STEP, TURN = 0.25, math.radians(20)  # most per frame: cells walked, angle turned
AHEAD, ROUND = 0.5, 0.6  # cells: how far ahead the walker looks; length over which corners round
SWAY, SWAY_FRAMES = math.radians(10), 24  # amplitude and period of the head's swaying
FINE = 50  # points of a path per cell

Free = Bool[np.ndarray, "rows columns"]  # a maze: True where there is no wall
Points = Float[np.ndarray, "n 2"]  # row and column, in cells
Poses = Float[np.ndarray, "n 3"]  # row, column and heading: 0 looks along a row, pi / 2 down
Cell = tuple[int, int]


def walk(free: Free, random: np.random.Generator, frames: int) -> Poses:
    """Position and heading in each frame of a random walk.

    The walker takes shortest paths from goal to goal, rounds corners, and moves at most STEP and
    turns at most TURN per frame. If the next goal lies behind, it first turns around.
    """
    cells = [(row, column) for row, column in np.argwhere(free).tolist()]
    here = cells[random.integers(len(cells))]
    phase = random.uniform()
    heading: float | None = None
    poses: list[tuple[float, float, float]] = []
    while len(poses) < frames:
        goal = cells[random.integers(len(cells))]
        if abs(goal[0] - here[0]) + abs(goal[1] - here[1]) < 4:
            continue  # too close
        points = smooth_path(shortest_path(free, here, goal))
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


def shortest_path(free: Free, start: Cell, goal: Cell) -> list[Cell]:
    """The cells from start to goal, both included. Neighbours share a side."""
    came, ahead = {start: start}, deque([start])
    while goal not in came:
        row, column = here = ahead.popleft()
        for cell in ((row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)):
            if free[cell] and cell not in came:
                came[cell] = here
                ahead.append(cell)
    path = [goal]
    while path[-1] != start:
        path.append(came[path[-1]])
    return path[::-1]


def smooth_path(cells: list[Cell]) -> Points:
    """Sample a path of cells finely and smooth it by a moving average; the ends stay in place."""
    count = (len(cells) - 1) * FINE + 1
    at = np.arange(count) / FINE
    rows, columns = zip(*cells, strict=True)
    points = np.stack([np.interp(at, np.arange(len(cells)), side) for side in (rows, columns)], 1)
    half = round(ROUND * FINE / 2)
    padded = np.pad(points, ((half, half), (0, 0)), "reflect", reflect_type="odd")
    window = np.ones(2 * half + 1) / (2 * half + 1)
    return np.stack([np.convolve(side, window, "valid") for side in padded.T], 1)
