"""`kanerva store` as a user types it."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from kanerva.cli import main
from kanerva.store.store import Receipt, Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kanerva import data

    place = tmp_path_factory.mktemp("pictures")
    for n, picture in enumerate(data.load("glyphs", "test").images[:12]):
        Image.fromarray(picture[0].numpy()).save(place / f"glyph-{n:02}.png")
    return place


@pytest.fixture
def store(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "g.kanerva")
    assert main(["store", "add", path, str(folder), "--model", "glyphs"]) == 0
    assert "added               12" in capsys.readouterr().out
    return path


def test_add_find_get_free(store: str, folder: Path, tmp_path: Path, capsys):
    damaged, mask = tmp_path / "cue.png", tmp_path / "mask.png"
    with Image.open(folder / "glyph-05.png") as file:
        picture = file.copy()
    half = Image.new("L", picture.size)
    half.paste(picture.crop((0, 0, picture.width, picture.height // 2)))
    half.save(damaged)
    seen = Image.new("L", picture.size)
    seen.paste(255, (0, 0, picture.width, picture.height // 2))
    seen.save(mask)
    out = tmp_path / "found.png"
    words = ["store", "find", store, str(damaged), "--observed", str(mask), "--k", "2"]
    assert main([*words, "--json", "--out", str(out)]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["hits"][0]["payload"].endswith("glyph-05.png")
    assert answer["hits"][0]["probability"] > 0.9 and answer["none"] < 0.1
    with Image.open(out) as drawn:
        assert drawn.width > 100
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "none of these" in table and "glyph-05.png" in table
    assert main(["store", "get", store, "6", "--out", str(out)]) == 0
    assert "glyph-05.png" in capsys.readouterr().out
    assert main(["store", "free", store, "6", "7", "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["freed"] == 2 and receipt["found afterwards"] == 0 and not receipt["pending"]
    assert main(["store", "info", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 10
    assert main(["store", "verify", store]) == 0


def test_what_is_left_of_a_freed_image_is_an_error(store: str, monkeypatch, capsys):
    left = Receipt([1], bytes=30, found=2, pending=False)
    monkeypatch.setattr(Store, "free", lambda self, ids: left)
    assert main(["store", "free", store, "1"]) == 2
    said = capsys.readouterr()
    assert "found afterwards    2" in said.out
    assert "2 freed pieces are still in a file" in said.err and said.err.count("\n") == 1


def test_verify_reports_no_search_that_it_does_not_make(store: str, capsys):
    assert main(["store", "verify", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed": 0, "pending": False}


def test_files_that_cannot_be_read_are_skipped(store: str, folder: Path, tmp_path: Path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"nothing")
    good = str(folder / "glyph-03.png")
    assert main(["store", "add", store, good, str(broken), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["added"] == 1
    assert "skipped 1 of 2 files" in said.err and "broken.png" in said.err
    assert main(["store", "find", store, str(broken), good, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["cue"] == good and answer["hits"][0]["payload"] == good
    for verb in ("add", "find"):
        for twice in ([str(broken)], [str(broken)] * 2):
            assert main(["store", verb, store, *twice]) == 2
            assert "1 of 1 files cannot be read" in capsys.readouterr().err


def test_one_image_of_another_size_does_not_end_a_long_add(
    folder: Path, tmp_path: Path, capsys, monkeypatch
):
    """Nor a search. Complete batches were stored before, and a rerun would add them twice."""
    monkeypatch.setattr("kanerva.cli.store._BATCH", 4)
    path, small = str(tmp_path / "new.kanerva"), tmp_path / "z-small.png"
    Image.new("L", (10, 9)).save(small)
    words = ["store", "add", path, str(folder), str(small), "--model", "glyphs", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["added"] == 12
    assert "skipped 1 of 13 files" in said.err
    assert "z-small.png: 10 x 9 where 28 x 28 is needed: use --resize" in said.err
    good = str(folder / "glyph-03.png")
    assert main(["store", "find", path, str(small), good, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["cue"] == good and answer["hits"][0]["payload"] == good


def test_python_out_of_memory_gets_one_line(store: str, monkeypatch, capsys):
    """Its error has no text, as in `range(10**14)` made a list."""

    def fill(self: Store) -> dict[str, object]:
        raise MemoryError

    monkeypatch.setattr(Store, "info", fill)
    assert main(["store", "info", store]) == 2
    assert capsys.readouterr().err == (
        "kanerva: not enough memory; use smaller sizes or a smaller batch\n"
    )


def test_a_mistake_makes_no_store(folder: Path, tmp_path: Path, capsys):
    Image.new("L", (40, 40)).save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    new = tmp_path / "new.kanerva"
    for file, says in (("large.png", "--resize"), ("broken.png", "cannot be read")):
        words = ["store", "add", str(new), str(tmp_path / file), "--model", "glyphs"]
        assert main(words) == 2
        assert says in capsys.readouterr().err and not new.exists()


def test_cues_are_made_black_and_white_as_what_was_added(tmp_path: Path, capsys):
    """Greys would pass for Gaussian noise, which explains another image too."""
    ink = Image.new("L", (28, 28))
    ink.paste(255, (12, 4, 15, 24))
    ink.save(tmp_path / "ink.png")
    path = str(tmp_path / "one.kanerva")
    assert main(["store", "add", path, str(tmp_path / "ink.png"), "--model", "glyphs"]) == 0
    soft = ink.point(lambda level: 30 + level * 3 // 4)
    soft.save(tmp_path / "soft.png")
    capsys.readouterr()
    found = {}
    for noise in ([], ["--noise", "gaussian"]):
        assert main(["store", "find", path, str(tmp_path / "soft.png"), "--json", *noise]) == 0
        found[len(noise)] = json.loads(capsys.readouterr().out)[0]["hits"][0]["probability"]
    assert main(["store", "find", path, str(tmp_path / "ink.png"), "--json"]) == 0
    same = json.loads(capsys.readouterr().out)[0]["hits"][0]["probability"]
    assert found[0] == same != found[2]


def test_lists_and_globs(store: str, folder: Path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{folder}/glyph-00.png\n{folder}/glyph-01.png\n"))
    assert main(["store", "add", store, "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == [13, 14]
    assert main(["store", "add", store, f"{folder}/glyph-0[23].png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["added"] == 2


def test_a_file_whose_name_is_also_a_pattern_is_taken_by_its_name(
    store: str, folder: Path, tmp_path: Path, capsys
):
    """Browsers name a second download photo[1].png; as a pattern that is photo1.png."""
    named, other = tmp_path / "photo[1].png", tmp_path / "photo1.png"
    for path, number in ((named, 5), (other, 6)):
        path.write_bytes((folder / f"glyph-{number:02}.png").read_bytes())
    assert main(["store", "find", store, str(named), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["cue"] == str(named) and answer["hits"][0]["id"] == 6
    assert main(["store", "add", store, str(named), str(tmp_path / "photo[12].png")]) == 0
    assert main(["store", "get", store, "13", "14", "--json"]) == 0
    added = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["payload"] for row in added] == [str(named), str(other)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add", "new.kanerva", "PICTURES"], "--model NAME"),
        (["find", "new.kanerva", "PICTURES"], "no store at new.kanerva"),
        (["add", "STORE", "absent.png"], "'absent.png': no such file"),
        (["find", "STORE", "PICTURES", "absent.png"], "'absent.png': no such file"),
        (["add", "STORE"], "no images given"),
        (["get", "STORE", "99"], "does not hold id 99"),
        (["free", "STORE", "six"], "ids are numbers, got 'six'"),
        (["free", "STORE"], "no ids given"),
        (["find", "STORE", "PICTURES", "--k", "0"], "--k must be at least 1"),
        (["find", "STORE", "PICTURES", "--noise", "fog"], "--noise"),
        (["find", "STORE", "PICTURES", "--observed", "PICTURES"], "--observed is one picture"),
        (["find", "STORE", "PICTURES", "--shifts", "1000000000"], "shifts is a number of pixels"),
        (["find", "STORE", "PICTURES", "--out", "no/such.png"], "cannot write"),
        (["add", "STORE", "PICTURES", "--k", "3"], "--k is for find; add does not use it"),
        (["add", "STORE", "PICTURES", "--noise=none"], "--noise is for find"),
        (["add", "STORE", "PICTURES", "--observed", "PICTURES"], "--observed is for find"),
        (["free", "STORE", "1", "--out", "a.png"], "--out is for find and get"),
        (["get", "STORE", "1", "--resize"], "--resize is for add and find"),
        (["info", "STORE", "--shifts", "1"], "--shifts is for find"),
        (["verify", "STORE", "extra", "words"], "verify takes only a store, got also 'extra'"),
        (["info", "STORE", "1"], "info takes only a store"),
        (["info", "NO_STORE"], "no store"),
        (["lose", "STORE"], "lose"),
    ],
)
def test_mistakes_get_one_line(words, says: str, store: str, folder: Path, tmp_path, capsys):
    other = tmp_path / "other.kanerva"
    other.write_text("not a database at all, but long enough to be read as one " * 40)
    named = {"STORE": store, "PICTURES": str(folder), "NO_STORE": str(other)}
    assert main(["store", *(named.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.strip().count("\n") <= 1  # a picture's path may come before


def test_an_interrupted_add_says_how_many_are_stored(store: str, folder: Path, monkeypatch, capsys):
    added, calls = Store.add, []

    def interrupted(self: Store, *given, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return added(self, *given, **options)

    monkeypatch.setattr(Store, "add", interrupted)
    monkeypatch.setattr("kanerva.cli.store._BATCH", 2)
    assert main(["store", "add", store, str(folder)]) == 130
    assert "the first 2 images were added" in capsys.readouterr().err
