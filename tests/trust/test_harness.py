"""A little of each part of `make trust`, in every run of the suite."""

import mmap
import os
import signal
import sys
from pathlib import Path

import children
import pytest
from children import Outcome, bad, run_cases, scratch

pytest.importorskip("hypothesis")
from corpus import fingerprint  # noqa: E402

from kanerva.errors import UserError  # noqa: E402

if sys.platform != "linux":
    pytest.skip("forks and file operations are those of Linux", allow_module_level=True)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory):
    import tempfile

    from run import Harness

    before, children.PATIENCE = dict(os.environ), 30.0  # a suite may run beside others
    with tempfile.TemporaryDirectory(dir=scratch()) as place:
        yield Harness(Path(place))
    os.environ.clear()
    os.environ.update(before)


SOME = {"kills": 8, "store kills": 12, "faults": 30, "store faults": 12, "mutations": 250}
SOME |= {"odd files": 40, "hostile files": 30, "configs": 60, "command lines": 60, "writers": 160}


@pytest.mark.parametrize("part", SOME)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_run_or_written_elsewhere(harness, part: str):
    found = harness.run(part, SOME[part])
    assert len(found) >= 6 and not bad(found), bad(found)[:3]


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_file_is_read(harness, tmp_path: Path):
    """Else its mutations would show nothing. A file of the same length that is nothing at all is
    refused, or makes a difference, or is written anew if it was a cache."""
    unread = []
    for kind in harness.kinds:
        expected = fingerprint(kind.read(kind.copy_folder(tmp_path / "sound")))
        file = kind.copy(tmp_path / "odd")
        nothing = b"\xff" * file.stat().st_size
        file.write_bytes(nothing)
        try:
            noticed = fingerprint(kind.read(tmp_path / "odd")) != expected
        except UserError:
            noticed = True
        if not noticed and file.is_file() and file.read_bytes() == nothing:
            unread.append(kind.name)
    assert len(harness.kinds) >= 50 and not unread


def test_children_that_hang_die_or_grow_are_told_apart():
    """The harness itself: each kind of failure is seen, and the cases after it still run."""

    def work(case: int) -> str:
        if case == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == 2:
            raise KeyError("x")
        if case == 3:
            # not a bytearray: malloc may take that from memory that an earlier test freed
            mmap.mmap(-1, 1_300_000_000)[::4096] = b"x" * 317383
        return "fine"

    found = {o.case: o.status for o in run_cases(work, 6)}
    assert found == {0: "fine", 1: "crash", 2: "traceback", 3: "bloat", 4: "fine", 5: "fine"}
    assert bad([Outcome(0, "refused"), Outcome(1, "lost")]) == [Outcome(1, "lost")]
