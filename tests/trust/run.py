"""`make trust`: everything of this folder at full size, a table, and its record.

    python tests/trust/run.py [--share 0.1] [--out results/trust.json] [part ...]

`--share` runs a part of each; such a run is not filed unless `--out` says where.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # before a fork: pools of threads do not survive one

from children import Outcome, bad, scratch  # noqa: E402
from corpus import CONFIG, make_corpus  # noqa: E402

from kanerva.evaluation.records import write_record  # noqa: E402
from kanerva.provenance import commit, device_name, versions  # noqa: E402

ROOT = Path(__file__).parents[2]
PARTS: dict[str, tuple[int, str]] = {  # how many, and what must not be
    "kills": (1000, "unloadable, or another run than unkilled"),
    "faults": (300, "lost, or left behind"),
    "mutations": (10_000, "traceback, hang, over 1 GB, silent change"),
    "odd files": (200, "traceback, hang, over 1 GB"),
    "hostile files": (60, "code run, written outside"),
    "configs": (1000, "traceback, hang"),
    "command lines": (1000, "exit code but 0, 2, 3, 130, 143"),
    "writers": (2000, "failed save, torn read"),
}


class Harness:
    """What the parts share: a folder in memory, the corpus, a run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        os.environ["KANERVA_CACHE"] = str(place / "cache")
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.kinds = make_corpus(place / "corpus")
        self.data = place / "corpus" / "data"

    def run(self, part: str, count: int) -> list[Outcome]:
        work: dict[str, Callable[[int], list[Outcome]]] = {
            "kills": self.kills,
            "faults": self.faults,
            "mutations": self.mutations,
            "odd files": self.odd,
            "hostile files": self.hostile,
            "configs": self.configs,
            "command lines": self.lines,
            "writers": self.writers,
        }
        return work[part](count)

    def kills(self, count: int) -> list[Outcome]:
        from kills import Chain

        return Chain(self.place / "kills", self.data, CONFIG).run(count)

    def faults(self, count: int) -> list[Outcome]:
        from faults import run_faults

        return run_faults(self.place / "faults", None if count >= PARTS["faults"][0] else count)

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

        place = self.place / "lines"
        shutil.copytree(self.place / "corpus" / "run" / "run", place / "run")
        shutil.copy(self.place / "corpus" / "picture.png" / "a.png", place / "a.png")
        return run_lines(place, self.data, count)

    def writers(self, count: int) -> list[Outcome]:
        from writers import run_writers

        return run_writers(self.place / "writers" / "m", count)


def _some(cases: list[Any], count: int, whole: int) -> list[Any]:
    """All, or a share spread over them."""
    return cases if count >= whole else cases[:: max(1, whole // count)]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    place = Path(tempfile.mkdtemp(dir=scratch(), prefix="kanerva-trust-"))
    rows, problems, began = [], list[Outcome](), time.monotonic()
    try:
        harness = Harness(place)
        print(f"{'part':<16}{'cases':>8}{'bad':>6}{'seconds':>9}  how they ended", flush=True)
        for part in given.parts or PARTS:
            whole, never = PARTS[part]
            start = time.monotonic()
            found = harness.run(part, max(2, round(whole * given.share)))
            ended = dict(Counter(outcome.status for outcome in found).most_common())
            seconds, wrong = time.monotonic() - start, bad(found)
            rows.append(
                {"part": part, "cases": len(found), "bad": len(wrong), "never": never,
                 "ended": ended, "seconds": round(seconds, 1)}
            )  # fmt: skip
            problems += wrong
            said = ", ".join(f"{name} {count}" for name, count in ended.items())
            print(f"{part:<16}{len(found):>8}{len(wrong):>6}{seconds:>9.1f}  {said}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for outcome in problems[:20]:
        print(f"\n{outcome.status}: {outcome.detail}", file=sys.stderr)
    whole_run = given.share >= 1 and not given.parts
    out = given.out or (ROOT / "results" / "trust.json" if whole_run and not problems else None)
    if out is not None:
        record = {
            "kind": "trust",
            "rows": rows,
            "wall_s": round(time.monotonic() - began, 1),
            "commit": commit(),
            "versions": versions(),
            "device": device_name(torch.device("cpu")),
            "command": "make trust",
        }
        write_record(json.loads(json.dumps(record)), out)
        print(f"record: {out}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
