"""A little of each part of `make trust`, in every run of the suite."""

import os
import signal
import sys
from pathlib import Path

import pytest
from children import Outcome, bad, run_cases, scratch

pytest.importorskip("hypothesis")
if sys.platform != "linux":
    pytest.skip("forks and file operations are those of Linux", allow_module_level=True)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory):
    import tempfile

    from run import Harness

    before = dict(os.environ)
    with tempfile.TemporaryDirectory(dir=scratch()) as place:
        yield Harness(Path(place))
    os.environ.clear()
    os.environ.update(before)


SOME = {"kills": 8, "faults": 30, "mutations": 200, "odd files": 40, "hostile files": 30}
SOME |= {"configs": 60, "command lines": 60, "writers": 160}


@pytest.mark.parametrize("part", SOME)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_run_or_written_elsewhere(harness, part: str):
    found = harness.run(part, SOME[part])
    assert len(found) >= 6 and not bad(found), bad(found)[:3]


def test_children_that_hang_die_or_grow_are_told_apart():
    """The harness itself: each kind of failure is seen, and the cases after it still run."""

    def work(case: int) -> str:
        if case == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == 2:
            raise KeyError("x")
        if case == 3:
            bytearray(1_300_000_000)[::4096] = b"x" * 317383
        return "fine"

    found = {o.case: o.status for o in run_cases(work, 6)}
    assert found == {0: "fine", 1: "crash", 2: "traceback", 3: "bloat", 4: "fine", 5: "fine"}
    assert bad([Outcome(0, "refused"), Outcome(1, "lost")]) == [Outcome(1, "lost")]
