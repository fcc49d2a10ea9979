"""`make site`: the pages build without a warning, and every link in them leads somewhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import kanerva

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"
PLACES = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
ZENSICAL = shutil.which("zensical", path=PLACES)


class Page(HTMLParser):
    """What a page links to, and what may be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.names = set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key in ("href", "src"):
                self.links.add(value)
            if value and key in ("id", "name"):
                self.names.add(value)


def build(place: Path) -> str:
    """Build the site in a copy of the pages, as `make site` does; what was said."""
    stage = ["make", "--silent", "pages", f"STAGE={place / 'build' / 'pages'}"]
    subprocess.run(stage, cwd=ROOT, check=True)
    shutil.copytree(ROOT / "src", place / "src")  # for docstrings
    shutil.copy(ROOT / "zensical.toml", place)
    words = [str(ZENSICAL), "build", "--strict"]
    done = subprocess.run(words, cwd=place, env=os.environ | {"NO_COLOR": "1", "PATH": PLACES},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def broken_links(site: Path) -> list[str]:
    """Every link within the site that leads nowhere, as `page: link`."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            there = site / url.path.lstrip("/") if url.path[:1] == "/" else path.parent / url.path
            there = Path(os.path.normpath(unquote(str(there)))) if url.path else path
            there = there / "index.html" if there.is_dir() else there
            names = pages[there].names if there in pages else set()
            if not there.is_file() or (url.fragment and unquote(url.fragment) not in names):
                broken.append(f"{path.relative_to(site)}: {link}")
    return sorted(broken)


@pytest.mark.skipif(not ZENSICAL, reason="zensical is not installed: `make site` installs it")
def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path):
    said = build(tmp_path)
    assert "No issues found" in said and "arning" not in said
    site = tmp_path / "site"
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    for page in ROOT.glob("docs/**/*.md"):
        stem = page.relative_to(ROOT).with_suffix("")
        assert (stem.parent / "index" if stem.name == "README" else stem) in built, page
    assert broken_links(site) == []
    models = (site / "docs" / "api" / "models.html").read_text()
    assert "A trained model, ready to evaluate" in models  # a docstring


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<p id="top"><a href="sub/"><a href="sub/index.html#no">')
    (tmp_path / "sub" / "index.html").write_text('<a href="../index.html#top"><img src="no.png">')
    assert broken_links(tmp_path) == ["index.html: sub/index.html#no", "sub/index.html: no.png"]


def test_every_public_name_has_an_entry_that_exists():
    text = "".join(page.read_text() for page in API.glob("*.md"))
    entries = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    public = {f"kanerva.{name}" for name in kanerva.__all__} - {"kanerva.data"}  # a module, by name
    assert public <= set(entries)
    for entry in entries:
        home, _, name = entry.rpartition(".")
        assert getattr(import_module(home), name, None) or import_module(entry), entry
