"""`make trust`: everything of this folder at full size, a table, and its record.

    python tests/trust/run.py [--share 0.1] [--out results/trust.json] [part ...]

`--share` runs a part of each; such a run is not filed unless `--out` says where.
"""

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before a fork: pools of threads do not survive one

import torch  # noqa: E402

torch.set_num_threads(1)

from children import Outcome, bad, scratch  # noqa: E402
from corpus import CONFIG, make_corpus  # noqa: E402
from stores import store_kinds  # noqa: E402

from kanerva.evaluation.records import write_record  # noqa: E402
from kanerva.lab.tables import trust  # noqa: E402
from kanerva.provenance import commit, device_name, versions  # noqa: E402

ROOT = Path(__file__).parents[2]
FINDINGS = 13  # each with tests named after its number
PARTS: dict[str, tuple[int, str, str]] = {  # how many at least, of what, and what must not be
    "kills": (1000, "SIGKILLs of training", "unloadable, or resumed to another run"),
    "store kills": (1000, "SIGKILLs of a store's writer", "lost, half there, freed and found"),
    "faults": (300, "faults of the disk in saves", "lost, left behind, traceback"),
    "store faults": (300, "faults of the disk in a store", "lost, half there, freed and found"),
    "mutations": (10_000, "mutated files", "traceback, hang, over 1 GB, silent change"),
    "odd files": (200, "crafted files", "traceback, hang, over 1 GB"),
    "hostile files": (60, "hostile files", "code run, written outside"),
    "configs": (1000, "made-up configs", "traceback, hang"),
    "command lines": (1000, "made-up command lines", "exit code but 0, 2, 3, 130, 143"),
    "writers": (2000, "saves of one path, 16 threads", "failed, torn when read"),
    "resumes": (22, "models resumed, 1 and 2 processes", "another run than uninterrupted"),
    "findings": (FINDINGS, "findings with tests", "a test that fails, or is missing"),
}


class Harness:
    """What the parts share: a folder in memory, the corpus, a run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        os.environ["KANERVA_CACHE"] = str(place / "cache")
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.kinds = [*make_corpus(place / "corpus"), *store_kinds(place / "corpus" / "stores")]
        self.data = place / "corpus" / "data"

    def run(self, part: str, count: int) -> list[Outcome]:
        work: dict[str, Callable[[int], list[Outcome]]] = {
            "kills": self.kills,
            "store kills": self.store_kills,
            "faults": self.faults,
            "store faults": self.store_faults,
            "mutations": self.mutations,
            "odd files": self.odd,
            "hostile files": self.hostile,
            "configs": self.configs,
            "command lines": self.lines,
            "writers": self.writers,
            "resumes": self.resumes,
            "findings": self.findings,
        }
        return work[part](count)

    def kills(self, count: int) -> list[Outcome]:
        from kills import Chain

        return Chain(self.place / "kills", self.data, CONFIG).run(count)

    def store_kills(self, count: int) -> list[Outcome]:
        from store_trials import run_store_kills

        return run_store_kills(self.place / "store-kills", count)

    def faults(self, count: int) -> list[Outcome]:
        from faults import run_faults

        return run_faults(self.place / "faults", None if count >= PARTS["faults"][0] else count)

    def store_faults(self, count: int) -> list[Outcome]:
        from store_trials import run_store_faults

        whole = count >= PARTS["store faults"][0]
        return run_store_faults(self.place / "store-faults", None if whole else count)

    def mutations(self, count: int) -> list[Outcome]:
        from mutations import run_mutations

        return run_mutations(self.kinds, count, self.place / "mutations")

    def odd(self, count: int) -> list[Outcome]:
        from crafted import odd_cases, run_crafted

        whole = count >= PARTS["odd files"][0]
        cases = odd_cases(self.kinds, self.place / "bombs" if whole else None)
        return run_crafted(_some(cases, count, PARTS["odd files"][0]), self.place / "odd")

    def hostile(self, count: int) -> list[Outcome]:
        from crafted import hostile_cases, run_crafted

        cases = hostile_cases(self.kinds, self.data)
        return run_crafted(_some(cases, count, PARTS["hostile files"][0]), self.place / "hostile")

    def configs(self, count: int) -> list[Outcome]:
        from lines import run_configs

        return run_configs(count)

    def lines(self, count: int) -> list[Outcome]:
        from lines import run_lines

        from kanerva.store.store import Store

        place = self.place / "lines"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.place / "corpus" / "run" / "run", place / "run")
        shutil.copy(self.place / "corpus" / "picture.png" / "a.png", place / "a.png")
        with Store(place / "s.kanerva", model=place / "run") as store:
            store.add(torch.rand(6, 1, 28, 28).round(), [f"number {n}" for n in range(6)])
        return run_lines(place, self.data, count)

    def writers(self, count: int) -> list[Outcome]:
        from writers import run_writers

        return run_writers(self.place / "writers" / "m", count)

    def resumes(self, count: int) -> list[Outcome]:
        from suites import run_suite

        most = None if count >= PARTS["resumes"][0] else count
        return run_suite("test_resume.py", self.place / "resumes", "trust", most)

    def findings(self, count: int) -> list[Outcome]:
        from suites import run_findings

        return run_findings(self.place / "findings", count)


def _some(cases: list[Any], count: int, whole: int) -> list[Any]:
    """All, or a share spread over them."""
    return cases if count >= whole else cases[:: max(1, whole // count)]


def attempt(harness: Harness, part: str, count: int) -> list[Outcome]:
    """The outcomes of a part, and nothing on the screen; that it fell over is one too."""
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            found = harness.run(part, count)
    except Exception:
        return [Outcome(0, "crash", f"{part}: {traceback.format_exc()}{said.getvalue()[-500:]}")]
    if len(found) < count and count >= PARTS[part][0]:
        found.append(Outcome(len(found), "crash", f"{part}: only {len(found)} of {count} tried"))
    return found


def summary(part: str, found: list[Outcome], seconds: float) -> dict[str, Any]:
    least, what, never = PARTS[part]
    return {
        "what": what,
        "at_least": least,
        "tried": len(found),
        "bad": len(bad(found)),
        "bad_is": never,
        "ended": dict(Counter(outcome.status for outcome in found).most_common()),
        "slowest_s": max((outcome.seconds for outcome in found), default=0.0),
        "most_mb": max((outcome.megabytes for outcome in found), default=0.0),
        "wall_s": round(seconds, 1),
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    place = Path(tempfile.mkdtemp(dir=scratch(), prefix="kanerva-trust-"))
    parts, problems, began = dict[str, Any](), list[Outcome](), time.monotonic()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            harness = Harness(place)
        for part in given.parts or PARTS:
            start = time.monotonic()
            found = attempt(harness, part, max(2, round(PARTS[part][0] * given.share)))
            row = summary(part, found, time.monotonic() - start)
            parts[part.replace(" ", "_")] = row
            problems += bad(found)
            ended = ", ".join(f"{name} {count}" for name, count in row["ended"].items())
            print(f"{part}: {ended} in {row['wall_s']:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    record = {
        "kind": "trust",
        "parts": parts,
        "wall_s": round(time.monotonic() - began, 1),
        "commit": commit(),
        "versions": versions(),
        "device": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "command": "make trust",
    }
    print(trust(record))
    for outcome in problems[:20]:
        print(f"\n{outcome.status}: {outcome.detail}", file=sys.stderr)
    whole_run = given.share >= 1 and not given.parts
    out = given.out or (ROOT / "results" / "trust.json" if whole_run and not problems else None)
    if out is not None:
        write_record(json.loads(json.dumps(record)), out)
        print(f"record: {out}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
