"""Cases run in forked children, so that none that hangs, dies or grows takes the others along."""

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from threading import RLock
from types import FrameType

from tqdm import tqdm

from kanerva.errors import UserError

tqdm.set_lock(RLock())  # its own is shared with forks, and one that is killed in it stops the rest

PATIENCE = 5.0  # seconds for a case
ROOM = 1000.0  # megabytes that a case may add


@dataclass(frozen=True)
class Outcome:
    """How a case ended: what its work returned, or refused, traceback, hang, crash, bloat."""

    case: int
    status: str
    detail: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0  # at most, above what the process had


BAD = ("traceback", "hang", "crash", "bloat", "silent", "code run", "written outside", "lost")


class Hang(BaseException):
    """A case took too long; no `except Exception` keeps it."""


def bad(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status in BAD]


def run_cases(work: Callable[[int], str], count: int, processes: int = 2) -> list[Outcome]:
    """`work(n)` for n below `count`, each under a limit of time and memory."""
    found: list[Outcome] = []
    for first in range(0, count, 500):  # a fresh process now and then
        cases = list(range(first, min(first + 500, count)))
        streams = [_Stream(work, cases[part::processes]) for part in range(processes)]
        while streams:
            ready = select.select([stream.pipe for stream in streams], [], [], 0.5)[0]
            for stream in streams:
                stream.read(stream.pipe in ready)
            for stream in [stream for stream in streams if stream.finished]:
                found += stream.found
                streams.remove(stream)
    return sorted(found, key=lambda outcome: outcome.case)


class _Stream:
    """A child that works through some cases; another takes over where one dies."""

    def __init__(self, work: Callable[[int], str], cases: list[int]) -> None:
        self.work, self.left, self.found = work, cases, list[Outcome]()
        self.finished = not cases
        self._start()

    def _start(self) -> None:
        self.pipe, end = os.pipe()
        self.buffer, self.heard = b"", time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.pipe)
            _work(self.work, self.left, end)
        os.close(end)

    def read(self, ready: bool) -> None:
        if ready:
            content = os.read(self.pipe, 65536)
            self.heard, self.buffer = time.monotonic(), self.buffer + content
            *lines, self.buffer = self.buffer.split(b"\n")
            for line in lines:
                self.found.append(Outcome(*json.loads(line)))
                self.left.remove(self.found[-1].case)
            if not content:
                self._end("crash")
        elif time.monotonic() - self.heard > 4 * PATIENCE:  # deaf to its alarm
            os.kill(self.child, signal.SIGKILL)
            self._end("hang")

    def _end(self, status: str) -> None:
        os.close(self.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        if self.left:
            self.found.append(Outcome(self.left.pop(0), status, f"exit {code}"))
        self.finished = not self.left
        if self.left:
            self._start()


def _work(work: Callable[[int], str], cases: list[int], end: int) -> None:
    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, late)
    for case in list(cases):
        status, detail, *cost = _attempt(work, case)
        os.write(end, json.dumps([case, status, detail[-2000:], *cost]).encode() + b"\n")
    os._exit(0)


def _attempt(work: Callable[[int], str], case: int) -> tuple[str, str, float, float]:
    with suppress(OSError):  # the peak is counted anew
        Path("/proc/self/clear_refs").write_text("5")
    before, began = _megabytes("VmRSS"), time.monotonic()
    said = StringIO()
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            status, detail = work(case), ""
    except UserError as error:
        text = str(error)
        status, detail = ("refused", text) if "\n" not in text else ("traceback", repr(text))
    except Hang:
        status, detail = "hang", f"{time.monotonic() - began:.1f} s"
    except BaseException:
        status, detail = "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if status in BAD:
        detail += said.getvalue()[-500:]
    seconds, grown = time.monotonic() - began, max(0.0, _megabytes("VmHWM") - before)
    if grown > ROOM:
        status, detail = "bloat", f"{grown:.0f} MB"
    return status, detail, round(seconds, 3), round(grown, 1)


def _megabytes(what: str) -> float:
    """Of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(what))


def scratch() -> str:
    """Where files are made: in memory where there is room for them."""
    return (
        "/dev/shm"
        if sys.platform == "linux" and os.access("/dev/shm", os.W_OK)
        else tempfile.gettempdir()
    )
