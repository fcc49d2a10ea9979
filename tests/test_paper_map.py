"""docs/paper_map.md points at code, tests and defaults, docs/architecture.md at code: every one of
them is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kanerva.config import KppPaperConfig, RunConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper_map.md").read_text()
WALKS = (ROOT / "docs" / "architecture.md").read_text()
NAME = r"`[A-Za-z_][\w.]*`"
# `src/kanerva/x.py` · `name`, `other`: a path, then names that live in it
POINTER = re.compile(rf"`((?:src|tests)/[\w/.]+\.py)` · ({NAME}(?:,\s+{NAME})*)")
POINTERS = [
    (path, name)
    for path, names in POINTER.findall(PAGE + WALKS)
    for name in re.findall(r"[\w.]+", names)
]


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """What a module or class body defines: functions, classes and their members, assignments."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{prefix}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def defined(path: str) -> set[str]:
    return names_in(ast.parse((ROOT / path).read_text()).body)


@pytest.mark.parametrize(("path", "name"), sorted(set(POINTERS)))
def test_every_name_on_the_page_exists(path: str, name: str):
    assert (ROOT / path).is_file(), f"docs/ names {path}, which is not there"
    assert name in defined(path), f"docs/ names {name}, which is not in {path}"


def test_every_path_and_test_on_the_page_exists():
    for path in re.findall(r"`((?:src|tests|docs)/[^`\s]*|[A-Z]+\.md)`", PAGE + WALKS):
        assert (ROOT / path).exists(), f"docs/ names {path}, which is not there"
    pointed_at = {name for _, name in POINTERS}
    loose = set(re.findall(r"`(test_\w+)`", PAGE)) - pointed_at
    assert not loose, f"docs/paper_map.md names tests without their file: {loose}"


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"`([a-z][\w.]* = [^`]+)`", PAGE))))
def test_every_default_on_the_page_is_the_default(setting: str):
    key, _, stated = setting.partition(" = ")
    run = RunConfig(model=KppPaperConfig())
    value: object = run if hasattr(run, key.split(".")[0]) else run.model
    for part in key.split("."):
        value = getattr(value, part)
    assert value == ast.literal_eval(stated), f"docs/paper_map.md says {setting}, it is {value!r}"


def test_every_equation_and_figure_has_a_row():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    for number in range(1, 10):
        assert any(re.match(rf"\| {number} \((§|App)", row) for row in rows), f"Eq. {number}"
    figures = PAGE.split("## Figures, boxes and footnotes")[1].split("| Footnote |")[0]
    numbered = set(re.findall(r"\b\d+\b", " ".join(re.findall(r"^\| ([^|]*)", figures, re.M))))
    assert {str(number) for number in range(1, 17)} <= numbered


def test_every_contents_link_leads_to_a_heading():
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    for anchor in re.findall(r"\]\(#([\w-]+)\)", PAGE):
        assert anchor in headings, f"docs/paper_map.md links to #{anchor}"
