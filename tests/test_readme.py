"""The README's commands and code run as printed; links and the map lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from kanerva.cli import VERBS, main

ROOT = Path(__file__).parents[1]
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
    return place


def test_the_library_example_runs_as_printed(place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (code,) = blocks("python")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["recalled"].shape == (10, 32, 1, 28, 28)
    assert names["samples"].shape == (64, 1, 28, 28) and names["nearby"].shape == (16, 1, 28, 28)
    assert names["known"].shape == (32,)
    assert re.fullmatch(r"33 of 36\n\d+\.\d nats per image\n", capsys.readouterr().out)


def test_the_commands_run_as_printed(place: Path, monkeypatch):
    monkeypatch.chdir(place)
    assert {words[0] for words in commands()} == set(VERBS)
    for words in commands():
        toy = TOY if words[0] == "train" and "--resume" not in words else []
        less = ["--episodes", "2"] if words[0] == "evaluate" else []
        assert main([*words, *toy, *less]) == 0, words


def test_every_make_target_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w[\w-]*)", "\n".join(blocks("sh")), re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_first_screen_is_two_sentences_a_picture_and_a_table():
    first = README.split("\n## ")[0]
    start, _, rest = first.partition("![")
    assert len(re.findall(r"\.(?:\s|$)", start)) == 2 and "![" not in rest
    assert len(re.findall(r"<!-- (?!value|end)", rest)) == 1 and "<!-- headline: " in rest


@pytest.mark.parametrize("name", ["README.md", "RESULTS.md", "docs/memory.md", "docs/paper_map.md"])
def test_links_lead_somewhere(name: str):
    page = ROOT / name
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        place = page.parent / file
        assert place.exists(), target
        titles = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE) if heading else []
        there = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in there, target


def test_the_map_names_every_module():
    tree = re.search(r"```text\nsrc/kanerva/.*?```", README, re.DOTALL)
    assert tree is not None
    for file in (ROOT / "src/kanerva").rglob("*.py"):
        if not file.name.startswith("__"):
            inner = file.parent.name == "data" and file.stem in ("cache", "fetch", "image_set")
            inner = inner or file.stem in ("base", "binarize")
            assert inner or file.stem in tree.group(), file


def test_imports_go_one_way_down_the_map():
    """A file imports only from its own line of the map or from lines above it."""
    tree = re.search(r"```text\nsrc/kanerva/.*?```", README, re.DOTALL)
    assert tree is not None
    rank: dict[str, int] = {}
    for number, line in enumerate(tree.group().splitlines()[2:]):
        words = line.split()
        if line.startswith(" " * 20):  # goes on from the line above
            continue
        if words and words[0] == "tests/":
            break
        for word in [words[0]] if words[0].endswith("/") else re.split(r"\s{2,}", line.strip()):
            for name in word.split():
                rank.setdefault(name.strip("/"), number)
    package = ROOT / "src/kanerva"
    for file in package.rglob("*.py"):
        part = file.relative_to(package).parts[0].removesuffix(".py")
        if part.startswith("__"):
            continue
        for found in re.findall(r"^\s*from kanerva\.(\w+)", file.read_text(), re.MULTILINE):
            assert rank[found] <= rank[part], f"{file} imports {found}, which stands below it"


def test_the_version_stands_once():
    import kanerva

    assert f"version: {kanerva.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {kanerva.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
