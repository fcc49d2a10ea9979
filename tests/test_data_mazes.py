"""Walks through mazes: packed without loss, whole and in order, the same on every rendering."""

import importlib.util
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest
import torch

from kanerva.data import FixedEpisodes, ImageSet, TrainingEpisodes, mazes
from kanerva.data.loading import fetch, is_present, load
from kanerva.data.maze_rendering import FRAMES, opengl, pack, paint_rooms, render, unpack
from kanerva.data.maze_walks import STEP, SWAY, TURN, shortest_path, smooth_path, walk
from kanerva.data.mazes import PATHS, read_mazes, write_mazes
from kanerva.errors import UserError
from kanerva.presets import preset
from kanerva.seeding import stream

EXTRA = all(importlib.util.find_spec(name) for name in ("labmaze", "dm_control", "mujoco"))
OPENGL = find_library("OSMesa") or find_library("EGL")
rendering = pytest.mark.skipif(
    not (EXTRA and OPENGL), reason="needs the extra, pip install 'kanerva[mazes]', and libosmesa6"
)

LOOP = np.array([[token == " " for token in row] for row in (
    "*********",
    "*       *",
    "* ***** *",
    "* *     *",
    "* * *****",
    "*       *",
    "*********",
)])  # fmt: skip


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 64, 64, 3), np.uint8)


# Packed, and read again


def test_packing_loses_nothing():
    ramp = np.arange(5 * 64 * 64 * 3).reshape(5, 64, 64, 3).astype(np.uint8)
    for frames in (noise(3), ramp, np.zeros((1, 64, 64, 3), np.uint8)):
        assert np.array_equal(unpack(pack(frames)), frames)
    assert len(pack(ramp)) < ramp.size / 4


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A small file of mazes: two paths of training, one of each other split."""
    packed = {"train": [noise(4, 1), noise(3, 2)], "validation": [noise(2, 3)], "test": [noise(2)]}
    path = tmp_path / "mazes" / f"rendered-{mazes.RECIPE}.safetensors"
    path.parent.mkdir()
    write_mazes(path, {split: [pack(one) for one in paths] for split, paths in packed.items()}, 0)
    return path


def test_splits_come_back_with_their_paths(written: Path):
    train = load("mazes", "train", root=written.parent.parent)
    assert is_present("mazes", written.parent.parent)
    assert (train.name, train.split, train.image_shape) == ("mazes", "train", (3, 64, 64))
    assert train.groups is not None and train.groups.tolist() == [0, 0, 0, 0, 1, 1, 1]
    expected = np.concatenate([noise(4, 1), noise(3, 2)])
    assert np.array_equal(train.images.permute(0, 2, 3, 1).numpy(), expected)
    assert len(read_mazes(written, "validation")) == len(read_mazes(written, "test")) == 2
    assert fetch("mazes", written.parent.parent) == [written]  # what is there is not rendered anew


@pytest.mark.parametrize("harm", ["altered", "cut short", "of another kind"])
def test_a_damaged_file_is_not_believed(written: Path, harm: str):
    raw = bytearray(written.read_bytes())
    raw[-1000] ^= 1
    written.write_bytes(raw if harm == "altered" else raw[: len(raw) // 2])
    if harm == "of another kind":
        write_mazes(written, {"train": [pack(noise(1))]}, 0)
    with pytest.raises(UserError, match="move .* away and run `kanerva data fetch mazes`") as error:
        read_mazes(written, "test")
    assert "\n" not in str(error.value)


def test_the_protocol_is_kept():
    counts = {split: paths * FRAMES for split, paths in PATHS.items()}
    assert counts == {"train": 12_000, "validation": 1_200, "test": 2_400}


def test_a_rendering_that_is_broken_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mazes, "render", killed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(KeyboardInterrupt):
        load("mazes", "train", root=tmp_path)
    assert list((tmp_path / "mazes").iterdir()) == [] and not is_present("mazes", tmp_path)


def test_rendered_on_first_use_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def drawn(seed: int, paths: dict[str, int]) -> dict[str, list[bytes]]:
        asked.append((seed, paths))
        return {split: [pack(noise(2))] for split in paths}

    monkeypatch.setattr(mazes, "render", drawn)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert len(load("mazes", "validation", root=tmp_path)) == len(load("mazes", "test", tmp_path))
    assert asked == [(mazes.SEED, PATHS)]


def test_without_the_extra_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not is_present("mazes", tmp_path)
    for ask in (lambda: load("mazes", "test", root=tmp_path), lambda: fetch("mazes", tmp_path)):
        with pytest.raises(
            UserError, match=r"install with pip install 'kanerva\[mazes\]'"
        ) as error:
            ask()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "mazes").exists()


def test_what_cannot_draw_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUJOCO_GL", "crayons")
    with pytest.raises(UserError, match="mazes cannot be rendered: .*MUJOCO_GL=crayons") as error:
        render(0, {"train": 1}, frames=2, workers=1)
    assert "\n" not in str(error.value)


def test_nothing_of_the_extra_is_imported_before_it_is_needed():
    check = (
        "import sys, kanerva.data.mazes;"
        "assert not {'labmaze', 'dm_control', 'mujoco'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


# Episodes along paths


def walks(*sizes: int) -> ImageSet:
    """Frame n is all n; so many frames in each path."""
    frames = torch.arange(sum(sizes)).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 3)
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return ImageSet("walks", "train", frames, groups=groups)


def numbers(episodes: torch.Tensor) -> torch.Tensor:
    return (episodes[:, :, 0, 0, 0] * 255).round().long()


def along(image_set: ImageSet, **other: int) -> TrainingEpisodes:
    options = dict(episode_length=4, batch=3, seed=1) | other
    return TrainingEpisodes(image_set, binarization="none", **options)


def in_order_on_one_path(image_set: ImageSet, shown: torch.Tensor) -> bool:
    assert image_set.groups is not None
    groups = image_set.groups[shown]
    return bool((shown.diff(dim=1) == 1).all() and (groups == groups[:, :1]).all())


def test_an_episode_is_neighbours_on_one_path_and_none_twice():
    paths = walks(10, 23, 3, 12, 4)
    episodes = along(paths)
    assert episodes.steps_per_epoch == (2 + 5 + 0 + 3 + 1) // 3
    starts = set()
    for epoch in range(20):
        steps = range(3 * epoch, 3 * epoch + 3)
        shown = torch.cat([numbers(episodes.batch_at(step)) for step in steps])
        assert in_order_on_one_path(paths, shown)
        assert len(shown.unique()) == shown.numel() == 36
        starts |= set(shown[:, 0].tolist())
    assert {start % 4 for start in starts if 10 <= start < 33} == {0, 1, 2, 3}  # from anywhere


def test_every_run_that_fits_takes_its_turn():
    episodes = along(walks(8, 8, 8), batch=6)
    for epoch in range(3):
        shown = numbers(episodes.batch_at(epoch))
        assert sorted(shown.flatten().tolist()) == list(range(24))
    assert not torch.equal(shown, numbers(episodes.batch_at(0)))


def test_a_step_along_paths_is_the_same_whenever_it_is_asked_and_shared():
    paths = walks(30, 40, 50)
    forwards = [along(paths, batch=6).batch_at(step) for step in range(12)]
    again = along(paths, batch=6)
    for step in reversed(range(12)):
        assert torch.equal(again.batch_at(step), forwards[step])
        parts = [along(paths, batch=6, rank=rank, world_size=3).batch_at(step) for rank in range(3)]
        assert torch.equal(torch.cat(parts), forwards[step])
    assert not torch.equal(along(paths, batch=6, seed=2).batch_at(0), forwards[0])


@pytest.mark.parametrize(("length", "episodes"), [(4, 3 + 2 + 1), (3, 4 + 2 + 2), (1, 21), (2, 11)])
def test_every_frame_of_a_path_is_scored_once(length: int, episodes: int):
    paths = walks(11, 6, 4)
    fixed = FixedEpisodes(paths, episode_length=length, binarization="none")
    batch = fixed.batch(0, len(fixed))
    assert len(fixed) == episodes and batch.images.shape[:2] == (episodes, length)
    assert torch.equal(numbers(batch.images), batch.indices)
    assert in_order_on_one_path(paths, batch.indices)
    assert sorted(batch.indices[batch.counted].tolist()) == list(range(21))
    starts = batch.indices[:, 0].tolist()
    assert starts != sorted(starts)  # in random order
    whole = FixedEpisodes(paths, episode_length=4, binarization="none")
    assert fixed.fingerprint() == whole.fingerprint()
    assert fixed.fingerprint(limit=2) != whole.fingerprint()


def test_paths_that_are_too_short_are_named():
    with pytest.raises(
        UserError, match="episode_length=5 is longer than a path of walks .*: 4 fra"
    ):
        FixedEpisodes(walks(9, 4), episode_length=5, binarization="none")
    with pytest.raises(UserError, match="batch=3 .* walks train holds 2 along its paths"):
        along(walks(7, 7))


def test_without_paths_the_order_is_what_it_was():
    plain = ImageSet("plain", "train", walks(30).images)
    order = torch.randperm(30, generator=stream(1, "order", 1))
    shown = torch.cat([numbers(along(plain).batch_at(step)) for step in (2, 3)])
    assert torch.equal(shown.flatten(), order[:24])
    fixed = FixedEpisodes(plain, episode_length=4, binarization="none")
    order = torch.randperm(30, generator=stream("episodes", "plain", "train"))
    assert torch.equal(fixed.indices.flatten(), torch.cat([order, order[:2]]))


def test_a_path_holds_the_longest_episode_of_the_paper():
    assert FRAMES >= 64
    run = preset("mazes", "kpp-paper")
    assert run.model.image == (3, 64, 64) and run.data.binarization == "none"
    assert FRAMES // preset("mazes").episode_length * PATHS["train"] >= preset("mazes").batch


# Walks


def test_a_shortest_path_is_as_short_as_can_be():
    """Against the distances of Floyd and Warshall."""
    cells = [(row, column) for row, column in np.argwhere(LOOP).tolist()]
    place = np.array(cells)
    far = np.abs(place[:, None] - place).sum(2).astype(float)
    far[far > 1] = np.inf
    for middle in range(len(cells)):
        far = np.minimum(far, far[:, middle, None] + far[None, middle])
    for start in range(0, len(cells), 3):
        for goal in range(len(cells)):
            way = shortest_path(LOOP, cells[start], cells[goal])
            assert (way[0], way[-1], len(way) - 1) == (cells[start], cells[goal], far[start, goal])
            assert all(LOOP[cell] for cell in way)


def test_corners_are_rounded_and_ends_stay():
    cells = [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3)]
    points = smooth_path(cells)
    assert np.allclose(points[[0, -1]], [cells[0], cells[-1]])
    steps = np.diff(points, axis=0)
    turns = np.diff(np.unwrap(np.arctan2(steps[:, 0], steps[:, 1])))
    assert np.abs(turns).max() < 0.2 and turns.sum() == pytest.approx(np.pi / 2)
    assert np.abs(points - np.array([1, 3])).sum(1).min() > 0.1  # the corner itself is cut


def test_a_walk_keeps_off_the_walls_and_to_its_pace():
    poses = walk(LOOP, np.random.default_rng(3), 400)
    assert poses.shape == (400, 3)
    for side in ((0.3, 0.3), (0.3, -0.3), (-0.3, 0.3), (-0.3, -0.3)):
        rows, columns = np.rint(poses[:, :2] + side).astype(int).T
        assert LOOP[rows, columns].all()
    moved = np.linalg.norm(np.diff(poses[:, :2], axis=0), axis=1)
    assert moved.max() <= STEP + 0.03 and moved.mean() > STEP / 2
    assert np.abs(np.diff(poses[:, 2])).max() <= TURN + SWAY
    ahead = np.diff(poses[:, :2], axis=0)
    looked = np.stack([np.sin(poses[:-1, 2]), np.cos(poses[:-1, 2])], 1)
    assert (ahead * looked).sum(1).min() > -0.02  # one walks forwards
    assert len(np.unique(np.rint(poses[:, :2]), axis=0)) > LOOP.sum() / 2
    assert np.array_equal(poses, walk(LOOP, np.random.default_rng(3), 400))
    assert np.array_equal(poses[:50], walk(LOOP, np.random.default_rng(3), 50))


def test_walls_take_the_letter_of_the_room_they_touch():
    walls = np.array([list("*****"), list("*   *"), list("*****")])
    rooms = np.array([list("....."), list(".A..."), list(".....")])
    paint_rooms(walls, rooms)
    assert ["".join(row) for row in walls] == ["AAA**", "A   *", "AAA**"]


# Rendering


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[bytes]]:
    """Two short walks for training and one for test, by one process."""
    return render(0, {"train": 2, "test": 1}, frames=8, workers=1)


@rendering
def test_frames_are_the_same_whoever_draws_them(drawn: dict[str, list[bytes]]):
    for workers in (2, 3):  # three: each in a process that drew nothing else before
        assert render(0, {"train": 2, "test": 1}, frames=8, workers=workers) == drawn
    assert render(1, {"train": 1}, frames=8, workers=1)["train"][0] != drawn["train"][0]


@rendering
def test_every_path_is_another(drawn: dict[str, list[bytes]]):
    assert len({*drawn["train"], *drawn["test"]}) == 3


@rendering
def test_sky_is_above_and_floor_below_and_neighbours_are_alike(drawn: dict[str, list[bytes]]):
    for packed in (*drawn["train"], *drawn["test"]):
        frames = unpack(packed).astype(float)
        assert frames.shape == (8, 64, 64, 3)
        assert frames.mean((1, 2, 3)).min() > 30 and frames.std((1, 2, 3)).min() > 15
        sky, floor = frames[:, :4].mean((0, 1, 2)), frames[:, -4:].mean((0, 1, 2))
        assert sky[2] > floor[2] and sky.mean() > floor.mean()  # blue and brighter
        steps = [np.abs(one - next).mean() for one, next in zip(frames, frames[1:], strict=False)]
        assert 0 < max(steps) < 60


@rendering
def test_numpy_is_left_as_it_was():
    script = (
        "import numpy as np; from kanerva.data.maze_rendering import render_path;"
        "np.random.seed(5);"
        "render_path(0, 'train', 0, 1); a = np.random.rand(); np.random.seed(5);"
        "assert a == np.random.rand()"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, env=os.environ | opengl()
    )
