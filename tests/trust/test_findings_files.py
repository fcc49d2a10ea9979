"""Files that are written: whole, where they belong, by one at a time; and what is trusted."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import kanerva
from kanerva.cli import main
from kanerva.config import RunConfig, run_from_dict, to_dict
from kanerva.errors import UserError
from kanerva.evaluation.record import evaluate
from kanerva.evaluation.records import record_name
from kanerva.memory.heap import Memory
from kanerva.models import loading
from kanerva.models.loading import load
from kanerva.runs import locked
from kanerva.training.checkpoint import recover
from kanerva.training.loop import train

_FINISHED: list[Path] = []  # trained by the first test that asks


@pytest.fixture
def run(tmp_path: Path, small_run: RunConfig, mnist_root: Path, tmp_path_factory) -> Path:
    """A copy of a run of eight steps."""
    if not _FINISHED:
        place = tmp_path_factory.mktemp("finished") / "run"
        train(replace(small_run, steps=8), place, data_root=mnist_root)
        _FINISHED.append(place)
    return Path(shutil.copytree(_FINISHED[0], tmp_path / "run", symlinks=True))


def edit_config(run: Path, **changes: object) -> None:
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(content | changes))


# 2: names are names


@pytest.mark.parametrize(
    "name", ["/etc/x", "../../x", "..", ".", "a/b", "a\\b", "", ".hidden", "\x1b"]
)
def test_2_a_config_and_a_record_name_no_path(small_run: RunConfig, name: str):
    content = to_dict(small_run)
    with pytest.raises(UserError, match="preset must be a plain name"):
        run_from_dict(content | {"preset": name})
    record = {"preset": "p", "model": "m", "variant": None, "seed": 0, "split": "test"}
    assert record_name(record) == "p/m-s0.json"
    for key in ("preset", "model", "split"):
        if name or key == "preset":
            with pytest.raises(UserError, match="plain name"):
                record_name(record | {key: f"{name}/" if key == "split" else name})
    with pytest.raises(UserError, match="plain name"):
        record_name(record | {"variant": f"../{name}"})


def test_2_evaluate_writes_nowhere_else(run: Path, tmp_path: Path, mnist_root: Path, capsys):
    results, words = tmp_path / "results", ["--data-root", str(mnist_root), "--episodes", "1"]
    words += ["--controls", "8", "--device", "cpu", "--results", str(results)]
    assert main(["evaluate", str(run), *words, "--variant", "../../out"]) == 2
    shutil.rmtree(run / "checkpoints" / "last")
    edit_config(run, preset=str(tmp_path / "out" / "x"))
    assert main(["evaluate", str(run), *words]) == 2
    assert not results.exists() and not (tmp_path / "out").exists()


# 5: two writers


def test_5_writers_of_one_file_do_not_tear_it(tmp_path: Path):
    """Eight threads: every save succeeds, every read is whole, nothing is left."""
    path, problems = tmp_path / "m", []
    Memory(torch.zeros(1, 4, 4)).save(path)

    def work(number: int) -> None:
        try:
            for _ in range(20):
                Memory(torch.full((1, 4, 4), float(number))).save(path)
                found = Memory.load(path).map
                assert (found == found[0, 0, 0]).all()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not problems and os.listdir(tmp_path) == ["m"]


def test_5_nothing_else_writes_files():
    """Whole files come from plain_files, but for drafts in folders that are moved as a whole."""
    source = Path(kanerva.__file__).parent
    drafts = {"data/packing.py", "data/maze_rendering.py"}
    writes = re.compile(r"\.write_(text|bytes)\(|open\([^)]*[\"'][wax]b?[\"']|savefig\((?!buffer)")
    found = {
        str(file.relative_to(source)): writes.findall(file.read_text())
        for file in source.rglob("*.py")
        if writes.search(file.read_text())
    }
    assert set(found) == drafts


# 6: metrics.csv


def whole_rows(run: Path) -> list[str]:
    text = (run / "metrics.csv").read_text()
    rows = text.splitlines()
    assert text.endswith("\n") and "\0" not in text
    assert {row.count(",") for row in rows} == {rows[0].count(",")}
    return rows


@pytest.mark.parametrize("kept", [-7, 200, 3, 0])
def test_6_a_short_metrics_file_goes_on_after_its_last_whole_row(
    run: Path, small_run: RunConfig, mnist_root: Path, kept: int
):
    content = (run / "metrics.csv").read_bytes()
    (run / "metrics.csv").write_bytes(content[:kept])
    before = content[:kept].decode().rpartition("\n")[0].splitlines()
    train(small_run, run, resume=True, data_root=mnist_root)
    rows = whole_rows(run)
    assert rows[0] == content.decode().splitlines()[0] and rows[: len(before)] == before
    assert rows[-1].startswith("12,")
    assert "it continues after its last complete row" in (run / "log.txt").read_text()


def test_6_metrics_are_on_the_disk_before_a_checkpoint_refers_to_them(
    run: Path, small_run: RunConfig, mnist_root: Path, monkeypatch
):
    synced, real = [], os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    train(small_run, run, resume=True, data_root=mnist_root)
    metrics = synced.index(str(run / "metrics.csv"))
    assert any("/.last.tmp/.state.json" in path for path in synced[metrics:])


# 7: the lock


def test_7_a_refused_resume_changes_nothing(run: Path, small_run: RunConfig, mnist_root: Path):
    shutil.copytree(run / "checkpoints" / "last", run / "checkpoints" / ".last.old")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in before}
    with locked(run), pytest.raises(UserError, match="another process is training"):
        train(replace(small_run, steps=40), run, resume=True, data_root=mnist_root)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert {path: path.stat().st_mtime_ns for path in before} == times


# 11: digests of what is trusted


@pytest.mark.parametrize(
    "change", [{"episode_length": 4}, {"seed": 5}, {"data": {"set": "glyphs"}}]
)
def test_11_an_altered_run_config_is_noticed(run: Path, mnist_root: Path, change: dict):
    edit_config(run, **change)
    with pytest.raises(UserError, match="was altered"):
        evaluate(run, load(run), data_root=mnist_root, episodes=1, control_images=8)


def test_11_an_altered_state_is_noticed_by_evaluate(run: Path, mnist_root: Path):
    path = run / "checkpoints" / "last" / "state.json"
    state = json.loads(path.read_text())
    state["progress"]["images_seen"] = 10**9
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"state\.json was altered"):
        evaluate(run, load(run), data_root=mnist_root, episodes=1, control_images=8)


@pytest.mark.parametrize("file", ["config.json", "config.yaml", "model.safetensors"])
def test_11_an_altered_shipped_model_is_noticed(tmp_path: Path, monkeypatch, file: str):
    shutil.copytree(loading.PRETRAINED / "glyphs-1", tmp_path / "glyphs-1")
    monkeypatch.setattr(loading, "PRETRAINED", tmp_path)
    load("glyphs")
    path = tmp_path / "glyphs-1" / file
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b"28", b"29") if b"28" in content[:900] else content[:-1] + b"x"
    )
    with pytest.raises(UserError, match="was altered"):
        load("glyphs")


# 12: a folder where a picture goes


def test_12_a_folder_where_a_picture_goes_is_one_line(run: Path, mnist_root: Path, capsys):
    (run / "reconstructions.png").mkdir()
    words = ["--data-root", str(mnist_root), "--episodes", "1", "--controls", "8"]
    assert main(["evaluate", str(run), *words, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# 13: links and leftovers


def test_13_links_in_a_run_folder_are_not_followed(
    run: Path, small_run: RunConfig, mnist_root: Path, tmp_path: Path
):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("metrics.csv", "samples/step-0000012.png", "config.yaml", "log.txt"):
        target = outside / name.replace("/", "-")
        content = (run / name).read_bytes() if (run / name).exists() else b"mine"
        target.write_bytes(content)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    with pytest.raises(UserError, match="log.txt|symbolic links|cannot write to run folder"):
        train(small_run, run, resume=True, data_root=mnist_root)
    (run / "log.txt").unlink()
    train(small_run, run, resume=True, data_root=mnist_root)
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


@pytest.mark.parametrize("name", ["samples", "checkpoints"])
def test_13_a_folder_of_a_run_that_is_a_link_is_refused(
    run: Path, small_run: RunConfig, mnist_root: Path, tmp_path: Path, name: str
):
    (run / name).rename(tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    before = sorted(path.name for path in (tmp_path / "outside").rglob("*"))
    with pytest.raises(UserError, match=f"{name} is a link"):
        train(small_run, run, resume=True, data_root=mnist_root)
    assert sorted(path.name for path in (tmp_path / "outside").rglob("*")) == before


def test_13_a_checkpoint_that_is_a_link_can_be_replaced(
    run: Path, small_run: RunConfig, mnist_root: Path, tmp_path: Path
):
    last = run / "checkpoints" / "last"
    last.rename(tmp_path / "kept")
    last.symlink_to(tmp_path / "kept")
    before = (tmp_path / "kept" / "state.json").read_bytes()
    train(small_run, run, resume=True, data_root=mnist_root)
    train(replace(small_run, steps=16), run, resume=True, data_root=mnist_root)
    assert not last.is_symlink() and (tmp_path / "kept" / "state.json").read_bytes() == before


def test_13_what_a_kill_leaves_is_removed_by_the_next_save(tmp_path: Path):
    program = (
        "import os, sys, signal, torch; from pathlib import Path\n"
        "from kanerva.memory.heap import Memory\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Memory(torch.zeros(1, 2, 2)).save(Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "m")]).returncode == -9
    (tmp_path / ".m.tmp").write_bytes(b"of an older version")
    assert len(os.listdir(tmp_path)) == 2
    Memory(torch.ones(1, 2, 2)).save(tmp_path / "m")
    assert os.listdir(tmp_path) == ["m"]


def test_13_what_a_kill_leaves_beside_a_checkpoint_is_removed_on_resume(run: Path):
    best = run / "checkpoints" / "best"
    shutil.copytree(best, best.with_name(".best.tmp"))
    recover(best)
    assert sorted(os.listdir(best.parent)) == ["best", "last"]


def test_13_a_picture_replaces_a_link(tmp_path: Path):
    from kanerva.pictures import write_picture

    (tmp_path / "kept").write_bytes(b"kept")
    (tmp_path / "a.png").symlink_to(tmp_path / "kept")
    write_picture(Image.new("L", (2, 2)), tmp_path / "a.png")
    assert (tmp_path / "kept").read_bytes() == b"kept" and not (tmp_path / "a.png").is_symlink()
