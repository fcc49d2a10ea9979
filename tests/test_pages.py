"""Pages are small, their links lead somewhere, and their code and commands run as printed.

The README has test_readme.py. Tested elsewhere: the code of docs/pretrained.md and
docs/block_memory.md, the commands of docs/results/commands.md, every figure (test_quote.py).
"""

import re
import shutil
from pathlib import Path

import pytest

from kanerva.cli import VERBS, main
from page_code import ROOT, blocks, commands, make_place, run_code, run_commands

PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
FENCED = re.compile(r"```.*?```", re.DOTALL)


@pytest.mark.parametrize(("name", "most"), [("README.md", 8192), ("RESULTS.md", 20480)])
def test_a_visitors_first_pages_are_small(name: str, most: int):
    assert (ROOT / name).stat().st_size <= most


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Links and pictures that lead to no file or, after a #, to no heading."""
    found = [a or b for a, b in LINK.findall(FENCED.sub("", page.read_text()))]
    broken = []
    for target in found:
        if re.match(r"https?://", target):
            continue
        file, _, heading = target.partition("#")
        place = page.parent / file if file else page
        if not place.exists() or (heading and heading not in anchors(place)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_links_and_pictures_lead_somewhere(name: str):
    assert broken_links(ROOT / name) == []


def test_a_broken_link_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n[a](#a-page) [b](#b) [c](page.md#a-page) [d](page.md#d) [e](none.md)\n"
        '![f](f.png) <img src="g.png"> [h](https://example.org/h)\n\n```sh\n# i\n[i](i.md)\n```\n'
    )
    assert broken_links(page) == ["#b", "page.md#d", "none.md", "f.png", "g.png"]


def test_every_page_of_docs_is_linked_from_another():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in map(ROOT.joinpath, PAGES)
        for target, _ in LINK.findall(page.read_text())
    }
    docs = [ROOT / name for name in PAGES if name.startswith("docs/")]
    assert [str(page) for page in docs if page.resolve() not in linked] == []


# Code and commands


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy for each page, so that none rests on what another left."""
    copy = shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(copy)
    monkeypatch.setattr("kanerva.explore.server.serve", lambda *_: None)  # it would never end
    return copy


def test_the_code_of_getting_started(place: Path, capsys: pytest.CaptureFixture[str]):
    names = run_code("docs/getting_started.md")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "33 of 36"
    assert re.fullmatch(r"handle 0: 1\.000; not stored: 0\.000", second)
    assert names["recalled"].shape == (10, 32, 1, 28, 28) and Path("recalled.png").is_file()


def test_the_code_of_the_library_page(place: Path, capsys: pytest.CaptureFixture[str]):
    names = run_code("docs/library.md")
    assert names["samples"].shape == (64, 1, 28, 28) and names["nearby"].shape == (16, 1, 28, 28)
    assert names["known"].shape == (32,) and names["pictures"].shape == (32, 1, 28, 28)
    assert re.search(r"\n\d+\.\d nats per image\n$", capsys.readouterr().out)


def test_the_code_of_the_store_page(place: Path, capsys: pytest.CaptureFixture[str]):
    names = run_code("docs/store.md")
    assert [hits[0].id for hits in names["several"]] == names["ids"][:4]
    assert names["picture"].shape == (1, 1, 28, 28) and names["receipt"].found == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "glyph 0" in first and second.startswith("62 images; 0 found")


@pytest.mark.parametrize("name", ["getting_started", "command_line", "store"])
def test_the_commands_of_a_page(name: str, place: Path):
    assert commands(f"docs/{name}.md")
    run_commands(f"docs/{name}.md")


def test_the_commands_of_explore_and_of_shipped_models(place: Path):
    main(["store", "add", "digits.kanerva", "scans", "--model", "mnist"])
    shutil.copytree("runs/demo", "runs/mine")
    run_commands("docs/explore.md")
    main(["evaluate", "runs/mine", "--episodes", "2"])
    run_commands("docs/pretrained.md")


def test_the_page_of_commands_has_every_verb():
    assert {words[0] for words in commands("docs/command_line.md")} == set(VERBS)


def test_every_make_target_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(block for page in PAGES for block in blocks(page, "sh"))
    named = re.findall(r"^make (\w[\w-]*)", text, re.MULTILINE)
    assert "demo" in named and all(f"\n{target}:" in makefile for target in named)
