"""Tests of this folder as cases: what pytest says of each."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from children import Outcome

HERE = Path(__file__).parent
FINDING = re.compile(r"test_(\d+)_")


def run_suite(file: str, place: Path, mark: str, most: int | None = None) -> list[Outcome]:
    """Tests of some files that have a mark, or the first of them."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["-m", mark, "--basetemp", str(place / "tests")]
    place.mkdir(parents=True, exist_ok=True)
    files = [str(path) for path in sorted(HERE.glob(file))]
    listed = subprocess.run([*words, "--collect-only", *files], **_AS_TEXT)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    report = place / "report.xml"
    subprocess.run([*words, "--junitxml", str(report), *names[:most]], **_AS_TEXT)
    found = []
    for number, case in enumerate(ElementTree.parse(report).iter("testcase")):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        detail = f"{case.get('name')}: {wrong[0].get('message', '') if wrong else ''}"
        seconds = float(case.get("time", 0))
        found.append(Outcome(number, "lost" if wrong else "passed", detail, seconds))
    return found


_AS_TEXT = {"capture_output": True, "text": True, "cwd": HERE.parents[1], "check": False}


def run_findings(place: Path, count: int) -> list[Outcome]:
    """One case for each numbered finding: all its tests pass, and it has some."""
    found = run_suite("test_findings_*.py", place, "not slow")
    by_number: dict[int, list[Outcome]] = {}
    for outcome in found:
        match = FINDING.match(outcome.detail)
        by_number.setdefault(int(match.group(1)) if match else 0, []).append(outcome)
    return [_verdict(number, by_number.get(number, [])) for number in range(1, count + 1)]


def _verdict(number: int, tests: list[Outcome]) -> Outcome:
    failed = [test.detail for test in tests if test.status != "passed"]
    status = "lost" if failed or not tests else "mended"
    return Outcome(number, status, f"finding {number}, {len(tests)} tests: {failed}")
