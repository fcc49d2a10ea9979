"""Many writers of one file, in several processes and threads: none fails, every read is whole."""

import os
import threading
from pathlib import Path

import torch
from children import Outcome

from kanerva.memory.heap import Memory

PROCESSES, THREADS = 2, 8


def run_writers(path: Path, saves: int) -> list[Outcome]:
    """So many saves of one path; as many reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Memory(torch.zeros(1, 8, 8)).save(path)
    children, ends = [], []
    for number in range(PROCESSES):
        end, mine = os.pipe()
        child = os.fork()
        if child == 0:
            problems = _work(path, number, saves // PROCESSES)
            os.write(mine, "\n".join(problems).encode()[:60_000])
            os._exit(0)
        os.close(mine)
        children.append(child)
        ends.append(end)
    found = []
    for child, end in zip(children, ends, strict=True):
        with os.fdopen(end) as file:
            found += [Outcome(0, "lost", line) for line in file.read().splitlines()]
        if os.waitpid(child, 0)[1]:
            found.append(Outcome(0, "crash", "a writer died"))
    left = [name for name in os.listdir(path.parent) if name != path.name]
    if left:
        found.append(Outcome(0, "lost", f"left {left[:3]}"))
    return found + [Outcome(number, "saved") for number in range(saves)]


def _work(path: Path, process: int, saves: int) -> list[str]:
    problems: list[str] = []

    def write(number: int) -> None:
        value = float(100 * process + number)
        for _ in range(saves // THREADS):
            try:
                Memory(torch.full((1, 8, 8), value)).save(path)
                map = Memory.load(path).map
                if not (map == map[0, 0, 0]).all():
                    problems.append("a torn read")
            except Exception as error:
                problems.append(" ".join(repr(error).split()))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return problems
