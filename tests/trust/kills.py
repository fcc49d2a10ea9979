"""Runs that are killed again and again, by fork from one warm parent: at chosen operations on
files, and at any moment. After each kill what is there loads; in the end the run is the same."""

import hashlib
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from children import Outcome
from corpus import CONFIG
from shim import Shim, kill, watching

from kanerva.config import RunConfig
from kanerva.models.loading import load
from kanerva.runs import read_run_config
from kanerva.training.checkpoint import read_state
from kanerva.training.loop import train

LONGEST = 120.0  # seconds for a child; a run takes less than one


def child(config: RunConfig, run: Path, data: Path, number: int, moment: float | None) -> int:
    """Train on, until operation `number` or a moment; how the process ended."""
    process = os.fork()
    if process == 0:
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            with watching(Shim(run, number, kill)):
                train(config, run, resume=True, data_root=data, accelerator="cpu")
            os._exit(0)
        except BaseException:
            os._exit(1)
    if moment is not None:
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return 99


def state_of(run: Path) -> str:
    """What a run came to: its weights, its optimiser, and its rows less the clock's column."""
    files = [f"checkpoints/{name}" for name in ("best/model.safetensors", "last/model.safetensors")]
    files.append("checkpoints/last/optimizer.safetensors")
    parts = [hashlib.sha256((run / file).read_bytes()).hexdigest() for file in files]
    for row in (run / "metrics.csv").read_text().splitlines():
        cells = row.split(",")
        parts.append(",".join(cells[:9] + cells[10:]))
    return "\n".join(parts)


def check_loads(run: Path) -> str | None:
    """What is wrong with what a kill left, if anything."""
    checkpoints = run / "checkpoints"
    try:
        if (run / "config.yaml").exists():
            read_run_config(run)
        for name in ("last", ".last.old"):
            if (checkpoints / name / "state.json").exists():
                read_state(checkpoints / name)
        if any((checkpoints / name).exists() for name in ("best", ".best.old", "last")):
            load(run)
    except Exception as error:
        return repr(error)
    return None


@dataclass
class Chain:
    """One run after another, each killed until it has ended."""

    place: Path
    data: Path
    config: RunConfig = CONFIG
    found: list[Outcome] = field(default_factory=list)
    compared: int = 0

    def measure(self) -> None:
        """A run that is not killed: what it comes to, its operations and its time."""
        whole = self.place / "whole"
        with watching(Shim(whole)) as shim:
            began = time.monotonic()
            train(self.config, whole, resume=True, data_root=self.data, accelerator="cpu")
        self.seconds, self.operations = time.monotonic() - began, shim.count
        self.expected = state_of(whole)

    def run(self, kills: int, seed: int = 0) -> list[Outcome]:
        dice, run = random.Random(seed), self.place / "killed"
        self.measure()
        number = done = 0
        while done < kills and number < 3 * kills:
            number += 1
            moment = dice.uniform(0, self.seconds) if number % 2 else None
            at = 0 if moment is not None else dice.randint(1, max(2, self.operations // 2))
            code = child(self.config, run, self.data, at, moment)
            problem = check_loads(run) if code in (0, -signal.SIGKILL) else f"exit {code}"
            if problem is not None:
                self.found.append(Outcome(number, "lost", f"{at} {moment}: {problem}"))
                shutil.rmtree(run, ignore_errors=True)
            elif code == 0:
                self.finish(number, run)
            else:
                done += 1
                self.found.append(Outcome(number, "killed"))
        if run.exists():
            self.finish(kills, run)
        return self.found

    def finish(self, number: int, run: Path) -> None:
        """Resume to the end and compare, then begin anew."""
        code = child(self.config, run, self.data, 0, None)
        if code or state_of(run) != self.expected:
            self.found.append(Outcome(number, "silent", f"exit {code}: another run than unkilled"))
        left = [path.name for path in run.rglob(".*") if path.is_file() or path.is_dir()]
        if left:
            self.found.append(Outcome(number, "lost", f"left {left}"))
        self.compared += 1
        shutil.rmtree(run, ignore_errors=True)
