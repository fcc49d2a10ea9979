"""The README's commands and code run as printed; the map of the package is that of its files."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from page_code import ROOT, blocks, commands, make_place, run_code, run_commands


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("readme"))


def test_the_code_runs_as_printed(place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    names = run_code("README.md")
    found, stored = capsys.readouterr().out.splitlines()
    assert found == "image 5: 1.000; not stored: 0.000" and stored.startswith("glyph 5 ")
    assert len(names["store"]) == 30 and names["receipt"].found == 0


def test_the_first_example_is_eight_lines_with_a_shipped_model():
    first = [line for line in blocks("README.md", "python")[0].splitlines() if line]
    assert len(first) <= 8 and 'kanerva.load("glyphs")' in first[1]


def test_the_commands_run_as_printed(place: Path, monkeypatch):
    monkeypatch.chdir(place)
    assert commands("README.md")
    run_commands("README.md")


def test_the_first_screen_is_what_it_is_a_picture_and_why():
    text = (ROOT / "README.md").read_text()
    first, *sections = text.split("\n## ")
    assert first.count("![") == 1 and len(first) < 1200
    assert sections[0].startswith("Why not a folder of images?") and "<!-- value: " in sections[0]


def test_the_one_table_names_the_memorys_bits_and_the_sum():
    """A row's sum is its bound and its bits, in nats."""
    text = re.sub(r"<!-- .*? -->|[*,]", "", (ROOT / "README.md").read_text())
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", text, re.M)]
    head, _, *rest = rows
    assert head[1] == "bits per image" and head[3] == head[5] == "sum"
    charged = [row for row in rest if row[1][:1].isdigit() and row[3]]
    assert len(charged) == 5
    for _, bits, *scores in charged:
        for count, bound, total in zip(
            (bits.split(" and ") * 2)[:2], scores[::2], scores[1::2], strict=True
        ):
            assert float(total) == pytest.approx(float(bound) + 0.693147 * int(count), abs=1.5)


# The map


def modules() -> dict[str, Path]:
    """Every file of the package by dotted name; a folder's name is its `__init__`."""
    found = {}
    for file in (ROOT / "src/kanerva").rglob("*.py"):
        name = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def read_map() -> dict[str, float]:
    """The line of docs/architecture.md on which each module stands.

    The map is the ```text block that begins with `src/kanerva/`. Below that line:

        indent name [name ...]  what it is

    Each line is indented by two spaces for each folder it lies in. Its names are separated by one
    space, and two or more spaces end them; what follows is prose. A name with a slash is a folder:
    lines indented below it are its own, and without any it stands for all that it holds, in any
    order. A folder may come twice, where others lie between its parts. Its `__init__` comes
    after the folder's last line unless it is named.
    """
    text = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(r"```text\nsrc/kanerva/\n(.*?)```", text, re.DOTALL)
    lines, rank = tree.splitlines(), dict[str, float]()
    last_line: dict[str, int] = {}  # of each folder
    folders = ["kanerva"]
    for number, line in enumerate(lines):
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split(" ")
        assert 0 < depth <= len(folders), (
            f"line {number + 1} of the map is indented wrongly: {line}"
        )
        folders = folders[:depth]
        for level in range(depth):
            last_line[".".join(folders[: level + 1])] = number
        for name in names:
            module = ".".join([*folders, name.rstrip("/")]).removesuffix(".__init__")
            if name.endswith("/"):
                assert len(names) == 1, f"a folder has a line of its own: {line}"
                last_line[module] = number
                folders = [*folders, name.rstrip("/")]
            else:
                assert module not in rank, f"{module} stands twice in the map"
                rank[module] = number
    whole = {folder for folder in last_line if not any(n.startswith(f"{folder}.") for n in rank)}
    for module in modules():
        inside = [folder for folder in whole if f"{module}.".startswith(f"{folder}.")]
        if module not in rank and inside:
            rank[module] = last_line[inside[0]]
        elif module not in rank and module in last_line:  # an `__init__`
            rank[module] = last_line[module] + 0.5
    return rank


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, anywhere but for type checkers alone."""
    tree = ast.parse(file.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}": node.module for alias in node.names}
            found |= {name if name in known else module for name, module in inner.items()}
    return found & known.keys()


def test_the_map_names_every_module():
    rank, known = read_map(), modules()
    missing, gone = known.keys() - rank.keys(), rank.keys() - known.keys()
    assert not missing, "docs/architecture.md does not name these"
    assert not gone, "docs/architecture.md names these, which are not there"


def test_imports_go_one_way_down_the_map():
    """A file imports only from lines above its own; within a folder that has one line, freely."""
    rank, known = read_map(), modules()
    for module, file in known.items():
        for found in imports(file, known) - {module}:
            shared = rank[found] == rank[module] and _one_line_folder(module, found, rank)
            assert rank[found] < rank[module] or shared, (
                f"{module} imports {found}, from its own line or below"
            )


def _one_line_folder(one: str, other: str, rank: dict[str, float]) -> bool:
    """Whether two modules of one line lie in a folder of which the map shows no more."""
    parts = zip(one.split("."), other.split("."), strict=False)
    common = ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], parts))
    return {line for name, line in rank.items() if f"{name}.".startswith(f"{common}.")} == {
        rank[one]
    }


def test_the_laboratory_is_imported_by_the_command_line_alone():
    known = modules()
    for module, file in known.items():
        room = ".".join(module.split(".")[:2])
        if room not in ("kanerva.lab", "kanerva.cli"):
            found = [name for name in imports(file, known) if f"{name}.".startswith("kanerva.lab.")]
            assert not found, f"{module} imports {found}"


def test_the_version_stands_once():
    import kanerva

    assert f"version: {kanerva.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {kanerva.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
