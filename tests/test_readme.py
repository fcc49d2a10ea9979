"""The README's commands and code run as printed; links and the map lead somewhere."""

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from kanerva.cli import VERBS, main

ROOT = Path(__file__).parents[1]
VALUES = re.compile(r"<!-- .*? -->")
README = (ROOT / "README.md").read_text()
TOY = [  # options that every model has
    "--steps", "3", "--encoder.width", "4", "--decoder.base", "8", "--validate-episodes", "2",
    "--device", "cpu",
]  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = "\n".join(blocks("sh")).splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in found if words and words[0] == "kanerva"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a demo run in it, trained for three steps instead of two thousand."""
    place = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "--preset", "glyphs", "--run", "runs/demo", *TOY]) == 0
    (place / "photos").mkdir()
    for name, ink in (("3", 0), ("7", 255)):
        Image.new("L", (28, 28), ink).save(place / "photos" / f"{name}.png")
    return place


def test_the_library_example_runs_as_printed(place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    code, store, layer = blocks("python")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["recalled"].shape == (10, 32, 1, 28, 28)
    assert names["samples"].shape == (64, 1, 28, 28) and names["nearby"].shape == (16, 1, 28, 28)
    assert names["known"].shape == (32,)
    assert re.fullmatch(
        r"33 of 36\n\d+ 0\.\d+ 0\.\d+\n\d+\.\d nats per image\n", capsys.readouterr().out
    )
    exec(compile(store, "README.md", "exec"), names)
    assert len(names["store"]) == 30 and names["receipt"].found == 0
    assert capsys.readouterr().out.count("glyph") == 1
    exec(compile(layer, "README.md", "exec"), names)
    assert names["exact"].shape == names["found"].value.shape == (8, 5, 256)


def test_the_commands_run_as_printed(place: Path, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("kanerva.explore.server.serve", lambda *_: None)  # it would never end
    assert {words[0] for words in commands()} == set(VERBS)
    for words in commands():
        toy = TOY if words[0] == "train" and "--resume" not in words else []
        less = ["--episodes", "2"] if words[0] == "evaluate" else []
        assert main([*words, *toy, *less]) == 0, words


def test_every_make_target_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w[\w-]*)", "\n".join(blocks("sh")), re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_first_screen_is_two_sentences_why_a_picture_and_a_table():
    first = README.split("\n## ")[0]
    start, _, rest = first.partition("![")
    _, what, why = start.strip().split("\n\n")
    assert len(re.findall(r"\.(?:\s|$)", what)) == 2 and "![" not in rest
    assert why.startswith("Why not a folder of images?") and len(VALUES.sub("", why).split()) < 170
    assert len(re.findall(r"<!-- (?!value|end)", rest)) == 1 and "<!-- headline: " in rest


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "RESULTS.md",
        "docs/explore.md",
        "docs/library.md",
        "docs/memory.md",
        "docs/paper_map.md",
    ],
)
def test_links_lead_somewhere(name: str):
    page = ROOT / name
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        place = page.parent / file
        assert place.exists(), target
        titles = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE) if heading else []
        there = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in there, target


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
    assert not known.keys() - rank.keys(), "docs/architecture.md does not name these"
    assert not rank.keys() - known.keys(), "docs/architecture.md names these, which are not there"


def test_imports_go_one_way_down_the_map():
    """A file imports only from lines above its own; within a folder that has one line, freely."""
    rank, known = read_map(), modules()
    for module, file in known.items():
        for found in imports(file, known) - {module}:
            shared = rank[found] == rank[module] and _one_line_folder(module, found, rank)
            assert rank[found] < rank[module] or shared, f"{module} imports {found} from below"


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
