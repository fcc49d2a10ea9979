"""A process that adds, finds and frees, stopped by faults of the disk or killed, forked from a warm
one: nothing that it acknowledged is lost, nothing is half there, nothing freed is left."""

import errno
import json
import os
import random
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Outcome
from shim import Act, Shim, cut_short, fail, half, kill, no_syncs, watching, watching_sqlite
from stores import add, image, open_store, payload, raw, traces

from kanerva.errors import UserError
from kanerva.models.finding import decode_blocks
from kanerva.store.store import Store

LONGEST = 60.0  # seconds for a child; it takes less than one


def lose_syncs(name: str, real: Any, arguments: tuple[Any, ...]) -> Any:
    """From here on the disk takes writes and syncs none."""
    no_syncs()
    return real(*arguments)


FAULTS: dict[str, Act] = {
    "ENOSPC": fail(errno.ENOSPC),
    "EIO": fail(errno.EIO),
    "short": cut_short,
    "half": half,
    "no sync": lose_syncs,
}


@dataclass
class Ledger:
    """What processes said of one store: by id what was added, and what of that was freed."""

    path: Path
    bits: bool = False  # of blocks that are bits
    traces: dict[int, list[bytes]] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)  # to free
    freed: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # and looked for
    notes: list[str] = field(default_factory=list)

    def hear(self, line: str) -> None:
        said, ids = json.loads(line)
        if said == "added":
            self.traces |= {int(id): [bytes.fromhex(t) for t in some] for id, some in ids.items()}
        elif said == "freeing":
            self.tried |= set(ids)
        elif said == "freed":
            self.freed |= set(ids)
        else:
            self.notes.append(ids)

    def problem(self, thorough: bool = True) -> str | None:
        """What is wrong with the store, if anything; `thorough`: also with what was freed long
        ago."""
        before = set() if thorough else self.gone
        left = self._left(self.freed - before)
        try:
            with open_store(self.path, bits=self.bits) as store:
                if store.verify().pending or store.verify().ids:
                    return "verify is not done"
                held = list(store)
                for id, found in (traces(store, held) if held else {}).items():
                    if id not in self.traces and (problem := check_whole(store, id)):
                        return f"id {id}, not acknowledged, is half there: {problem}"
                    if self.traces.setdefault(id, found) != found:
                        return f"id {id} is not what was added"
        except Exception as error:
            return repr(error)
        if lost := set(self.traces) - self.tried - set(held):
            return f"lost {lost}"
        if back := self.freed & set(held):
            return f"freed and still there: {back}"
        self.gone = set(self.traces) - set(held)
        return left or self._left(self.gone - before)

    def _left(self, ids: set[int]) -> str | None:
        """Freed, and still in the bytes of a file."""
        content = raw(self.path)
        for id in sorted(ids):
            kinds = zip(("block", "payload", "picture"), self.traces.get(id, ()), strict=False)
            if found := [kind for kind, trace in kinds if trace in content]:
                return f"{found} of id {id}, which is freed"
        return None


def check_whole(store: Store, id: int) -> str | None:
    """A payload that was given to `add`, and the picture of that image."""
    (text,) = store.payloads([id])
    number = int(text.rpartition(" ")[2])
    if text != payload(number):
        return "its payload was never given"
    model = store.model
    if model.has_code:
        same = torch.equal(store.get([id])[0], image(number))
        return None if same else "its picture is of another image"
    episode = image(number)[None, None]
    blocks = model.blocks(episode, model.encoder(episode))
    expected = decode_blocks(model, blocks).levels.int()
    found = store._pictures(np.array([id])).levels.int()
    return None if (found - expected).abs().max() <= 8 else "its picture is of another image"


class Worker:
    """Adds, finds and frees; what is done is said once it is done."""

    def __init__(self, store: Store, dice: random.Random, pipe: int) -> None:
        self.store, self.dice, self.pipe = store, dice, pipe
        self.write = os.write  # the real one, if a shim is to come

    def say(self, said: str, what: Any) -> None:
        self.write(self.pipe, json.dumps([said, what]).encode() + b"\n")

    def add(self) -> None:
        ids = add(self.store, [self.dice.getrandbits(40) for _ in range(self.dice.randint(1, 4))])
        found = traces(self.store, ids)
        self.say("added", {id: [t.hex() for t in some] for id, some in found.items()})

    def find(self) -> None:
        self.store.find(image(0))

    def free(self) -> None:
        held = list(self.store)
        most = max(self.dice.randint(1, 3), len(held) - 30)
        gone = self.dice.sample(held, min(len(held), most))
        self.say("freeing", gone)
        receipt = self.store.free(gone)
        if receipt.found == 0 and not receipt.pending:
            self.say("freed", gone)

    def work(self) -> None:
        """Until it is killed."""
        while True:
            self.add()
            if self.dice.random() < 0.3:
                self.find()
            self.free()


def run_child(work: Callable[[int], object], moment: float | None) -> tuple[int, list[str]]:
    """A forked process that does `work(pipe)`, killed at a moment: how it ended, what it said."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            work(writer)
            os._exit(0)
        except BaseException:
            os.write(writer, json.dumps(["traceback", traceback.format_exc()]).encode() + b"\n")
            os._exit(1)
    os.close(writer)
    end, said, late = time.monotonic() + (moment or LONGEST), b"", False
    while True:
        left = None if late else max(0.0, end - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            late = True
            os.kill(process, signal.SIGKILL)
        elif part := os.read(reader, 1 << 20):
            said += part
        else:
            break
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    lines = said.decode().split("\n")[:-1]  # a last line may be cut short
    return 99 if late and moment is None else code, lines


# Faults


def run_store_faults(place: Path, most: int | None = None) -> list[Outcome]:
    """Each operation of a process that adds, finds and frees fails once; or `most` in all."""
    found: list[Outcome] = []
    for coded in (False, True):
        shutil.rmtree(place, ignore_errors=True)
        base, tried = place / "base" / "a.kanerva", place / "tried" / "a.kanerva"
        base.parent.mkdir(parents=True)
        with open_store(base, coded) as store:
            held = traces(store, add(store, list(range(20))))
            store.find(image(0))
        number = 0
        for number in range(1, 1000):
            for name, act in FAULTS.items():
                if most is not None and (number * 7 + len(name)) % max(1, 600 // most):
                    continue
                shutil.rmtree(tried.parent, ignore_errors=True)
                shutil.copytree(base.parent, tried.parent)
                ledger = Ledger(tried, traces=dict(held))
                found.append(_strike(ledger, coded, name, act, number))
            if found and found[-1].status == "not reached":
                break
    shutil.rmtree(place, ignore_errors=True)
    return [outcome for outcome in found if outcome.status != "not reached"]


def _strike(ledger: Ledger, coded: bool, name: str, act: Act, number: int) -> Outcome:
    def work(pipe: int) -> None:
        with ExitStack() as stack:
            shim = stack.enter_context(watching(Shim(ledger.path.parent, number, act)))
            stack.enter_context(watching_sqlite(shim))
            try:
                worker = Worker(open_store(ledger.path, coded), random.Random(number), pipe)
            except UserError as error:
                os.write(pipe, json.dumps(["refused", str(error)]).encode() + b"\n")
                return
            for step in (worker.add, worker.find, worker.free, worker.add, worker.free):
                try:
                    step()
                except UserError as error:
                    worker.say("refused", str(error))
            worker.say("struck", shim.struck)

    code, lines = run_child(work, None)
    for line in lines:
        ledger.hear(line)
    case = f"store{' with an index' if coded else ''}: {name} at operation {number}"
    if code:
        return Outcome(number, "hang" if code == 99 else "traceback", f"{case}: {ledger.notes}")
    if problem := ledger.problem():
        return Outcome(number, "lost", f"{case}: {problem} {ledger.notes}")
    if ledger.notes == [""]:
        return Outcome(number, "not reached", case)
    refused = [note for note in ledger.notes if " " in note]
    return Outcome(number, "refused" if refused else "carried on", f"{case}: {refused}")


# Kills


def _work(path: Path, coded: bool, bits: bool, at: int, dice: random.Random, pipe: int) -> None:
    """Until operation `at`, or for good."""
    with ExitStack() as stack:
        if at:
            shim = stack.enter_context(watching(Shim(path.parent, at, kill)))
            stack.enter_context(watching_sqlite(shim))
        Worker(open_store(path, coded, bits), dice, pipe).work()


def run_store_kills(place: Path, kills: int, seed: int = 0) -> list[Outcome]:
    """So many kills, half at operations on files and half at any moment; a fresh store every 50:
    plain, with an index, of bits."""
    found, dice, each = list[Outcome](), random.Random(seed), min(50, kills // 3)
    number = done = 0
    ledger = Ledger(place)
    while done < kills and number < 3 * kills:
        coded, bits = number // each % 3 == 1, number // each % 3 == 2
        if number % each == 0:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            ledger = Ledger(place / "a.kanerva", bits)
        number += 1
        moment = dice.uniform(0.005, 0.15) if number % 2 else None
        at = 0 if moment is not None else dice.randint(1, 400)
        work = partial(_work, ledger.path, coded, bits, at, random.Random(f"{seed} {number}"))
        code, lines = run_child(work, moment)
        for line in lines:
            ledger.hear(line)
        if code != -signal.SIGKILL:
            found.append(Outcome(number, "traceback", f"exit {code}: {ledger.notes}"))
        elif problem := ledger.problem(thorough=number % 10 == 0):
            found.append(Outcome(number, "lost", f"{at} {moment}: {problem}"))
        else:
            done += 1
            found.append(Outcome(number, "killed"))
    shutil.rmtree(place, ignore_errors=True)
    return found
