"""Stores: files that were altered, come from elsewhere, or were left by one who was killed."""

import errno
import json
import os
import shutil
import signal
import sqlite3
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from shim import Shim, fail, watching
from stores import add, content, image, model, open_store, payload, raw, traces

from kanerva.cli import main
from kanerva.errors import UserError
from kanerva.files import read_tensors
from kanerva.store import database
from kanerva.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Eight images, of which the third is freed; closed."""
    path = tmp_path / "place" / "a.kanerva"
    path.parent.mkdir()
    with open_store(path) as store:
        add(store, list(range(8)))
        store.free(3)
    return path


def alter(path: Path, *statements: str) -> None:
    """With SQLite, as anyone can."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def read_all(path: Path) -> object:
    with open_store(path) as store:
        store.verify()
        return content(store)


# What was altered is noticed

ALTERED = [
    "UPDATE items SET block = zeroblob(length(block)) WHERE id = 5",
    "UPDATE items SET payload = 'another' WHERE id = 5",
    "UPDATE items SET payload = x'00' WHERE id = 5",
    "UPDATE items SET codec = 1 WHERE id = 5",
    "UPDATE items SET codec = 'x', digest = 7 WHERE id = 5",
    "UPDATE items SET id = 9 WHERE id = 8",
    "UPDATE items SET id = -5 WHERE id = 5",
    "DELETE FROM items WHERE id = 5",
    "DELETE FROM items WHERE id = 8",
    "DELETE FROM freed",
    "UPDATE freed SET id = 4",
    "UPDATE freed SET id = -4",
    "INSERT INTO freed VALUES (1000000000000000, 0)",
    "UPDATE sqlite_sequence SET seq = 7",
    "UPDATE sqlite_sequence SET seq = 'many'",
    "DELETE FROM about WHERE name = 'model'",
    "UPDATE about SET value = x'ff' WHERE name = 'model'",
    "UPDATE about SET value = '[3, 28, 28]' WHERE name = 'image'",
    "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END",
    "CREATE VIEW v AS SELECT 1",
    "PRAGMA journal_mode = DELETE",
]


@pytest.mark.parametrize("statement", ALTERED)
def test_an_altered_store_is_refused(store: Path, statement: str):
    read_all(store)
    alter(store, statement)
    with pytest.raises(UserError):
        read_all(store)


def test_ids_beyond_the_file_take_no_memory(store: Path):
    """`ids` is made of the last one: here it would have a petabyte."""
    alter(store, "UPDATE items SET id = 1000000000000000 WHERE id = 8",
          "UPDATE sqlite_sequence SET seq = 1000000000000000")  # fmt: skip
    with pytest.raises(UserError, match="ids are missing"):
        open_store(store)


@pytest.mark.parametrize("block", [struct.pack("<f", float("nan")) + bytes(16), b"", bytes(3)])
def test_a_forged_block_is_refused(store: Path, block: bytes):
    """Its digest is right: whoever writes a store can write that too."""
    with closing(sqlite3.connect(store)) as db:
        digest = database._digest(5, 0, block, b"")
        db.execute("UPDATE items SET block=?, payload=x'', digest=? WHERE id=5", (block, digest))
        db.commit()
    store.with_name("a.kanerva-levels").unlink()
    with pytest.raises(UserError, match="block"):
        read_all(store)


def test_an_id_that_no_number_of_sqlites_is_not_held(store: Path):
    with open_store(store) as opened:
        for id in (2**70, -1, 0, 2**63):
            with pytest.raises(UserError, match="does not hold id"):
                opened.free(id)


@pytest.mark.parametrize("kind", ["levels", "index"])
def test_a_cache_of_another_store_is_not_taken(tmp_path: Path, kind: str):
    """Of a store that was removed, and its caches were not."""
    pytest.importorskip("faiss")

    def fill(path: Path, numbers: list[int]) -> tuple[object, ...]:
        with open_store(path, coded=True) as store:
            add(store, numbers)
            found = store.find(image(40), k=6).ids, content(store)
        cache = path.with_name(f"{path.name}-{kind}").read_bytes()
        return *found, codes_of(cache).tobytes() if kind == "index" else cache[64:]

    one, other, alone = (tmp_path / name for name in ("one", "other", "alone"))
    fill(one, list(range(20)))
    shutil.copy(f"{one}-{kind}", f"{other}-{kind}")
    numbers = list(range(40, 20, -1))
    assert fill(other, numbers) == fill(alone, numbers)


@pytest.mark.parametrize("kind", ["levels", "index"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, kind: str):
    pytest.importorskip("faiss")
    path = tmp_path / "a.kanerva"
    with open_store(path, coded=True) as store:
        add(store, list(range(20)))
        expected = (content(store), store.find(image(3), k=8).ids)
    file = path.with_name(f"a.kanerva-{kind}")
    sound = file.read_bytes()
    for at in (0, 70, len(sound) // 2, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[at] ^= 16
        file.write_bytes(damaged)
        with open_store(path, coded=True) as store:
            assert (content(store), store.find(image(3), k=8).ids) == expected
            store.verify()
        assert file.read_bytes()[:64] == sound[:64] or kind == "index"
        if kind == "index":
            assert torch.equal(read_tensors(file)[0]["codes"], torch.from_numpy(codes_of(sound)))


def codes_of(content: bytes) -> np.ndarray:
    from safetensors.numpy import load

    return load(content)["codes"]


def test_a_store_that_was_large_finds_what_it_holds(tmp_path: Path):
    """From an index in a file to all pictures in memory and back; then in the next process."""
    pytest.importorskip("faiss")
    path, held = tmp_path / "a.kanerva", dict[int, int]()

    def check(store: Store, numbers: list[int], gone: int) -> None:
        held.update(zip(add(store, numbers), numbers, strict=True))
        for id in list(held)[:gone]:
            store.free(id)
            del held[id]
            expected, k = sorted(held), len(held)
            assert sorted(store.find(image(99), k=k).ids) == expected
        rows, wanted = store._index._features, store._pictures(np.array(sorted(held))).features
        assert rows is None or torch.equal(rows.vectors, wanted)

    with open_store(path, coded=True) as store:
        check(store, list(range(20)), 6)
        check(store, list(range(20, 30)), 8)
        check(store, [30, 31], 2)
    with open_store(path, coded=True) as store:
        check(store, [32], 3)
        check(store, list(range(33, 43)), 12)


# Nothing is written or removed elsewhere, nothing waits


def test_a_journal_beside_a_store_removes_no_file(store: Path, tmp_path: Path):
    """SQLite deletes what a journal names as the journal of several files, once it has obeyed."""
    victim = tmp_path / "precious"
    victim.write_text("kept")
    hot_journal(store, victim)
    with pytest.raises(UserError, match="a.kanerva-journal is not a store's"):
        open_store(store)
    assert victim.exists()


def hot_journal(store: Path, victim: Path) -> None:
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(victim)
    pages = store.stat().st_size // 4096
    head = magic + struct.pack(">5I", 0, 0, pages, 512, 4096)
    tail = struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">2I", len(name), sum(name))
    store.with_name(f"{store.name}-journal").write_bytes(head.ljust(512, b"\0") + tail + magic)


def test_the_journal_of_that_test_does_harm(tmp_path: Path):
    """Else the test above would show nothing."""
    victim, path = tmp_path / "precious", tmp_path / "a.db"
    victim.write_text("kept")
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (x)")
    hot_journal(path, victim)
    with closing(sqlite3.connect(path)) as db:
        db.execute("SELECT * FROM t").fetchall()
    assert not victim.exists()


@pytest.mark.parametrize("name", ["", "-levels", "-index", "-wal"])
@pytest.mark.parametrize("make", ["pipe", "link", "zero", "folder"])
def test_odd_things_in_the_place_of_a_file(store: Path, tmp_path: Path, name: str, make: str):
    """Read or refused at once, and nothing elsewhere is touched."""
    outside, file = tmp_path / "outside", store.with_name(store.name + name)
    outside.write_bytes(b"kept" * 100)
    file.unlink(missing_ok=True)
    {
        "pipe": lambda: os.mkfifo(file),
        "link": lambda: file.symlink_to(outside),
        "zero": lambda: file.symlink_to("/dev/zero"),
        "folder": lambda: file.mkdir(),
    }[make]()
    if not name:
        with pytest.raises(UserError):
            open_store(store)
    with suppress(UserError), open_store(store, coded=True) as opened:
        add(opened, list(range(20)))
        opened.find(image(9))
        opened.free(2)
    assert outside.read_bytes() == b"kept" * 100


def test_a_store_behind_a_link_is_searched_where_it_lies(store: Path, tmp_path: Path):
    """Its log lies beside the file, not beside the link."""
    link = tmp_path / "link.kanerva"
    link.symlink_to(store)
    with open_store(link) as opened:
        assert opened.free(5).found == 0
        assert payload(4).encode() not in raw(store)
        assert {file.parent for file in opened.files} == {store.parent}


def test_names_that_are_not_names(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a\0b", "a" * 5000, "/dev/null/x", "."):
        with pytest.raises(UserError):
            Store(name, model=model())
    Store("file:x?mode=memory", model=model()).close()  # no URI
    assert (tmp_path / "file:x?mode=memory").is_file()


def test_payloads_that_steer_a_terminal_or_are_no_utf8(tmp_path: Path, capfd):
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    name = os.fsdecode(b"a\xff\x1b[2J.png")
    Image.new("L", (28, 28)).save(tmp_path / "plain.png")
    (tmp_path / "plain.png").rename(folder / name)
    path = str(tmp_path / "a.kanerva")
    assert main(["store", "add", path, str(folder), "--model", "glyphs", "--resize"]) == 0
    assert main(["store", "get", path, "1"]) == 0
    assert main(["store", "find", path, str(folder / name), "--resize"]) == 0
    said = "".join(capfd.readouterr())
    assert "\x1b" not in said and "\\x1b" in said
    assert main(["store", "get", path, "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["payload"] == str(folder / name)
    assert main(["store", "free", path, "9" * 5000]) == 2
    assert main(["store", "free", path, "9" * 19]) == 2
    assert "Traceback" not in capfd.readouterr().err


# Killed, full, and several at once


def test_what_a_killed_add_left_is_gone_after_free(store: Path):
    """It had written pictures behind the last; two of them, of which one is then added alone."""
    with open_store(store) as opened:

        def die(ids: list[int]) -> None:
            opened._levels.write(ids, pictures)
            raise KeyboardInterrupt

        pictures = np.stack([traces_of_new(opened, n) for n in (20, 21)])
        with pytest.raises(KeyboardInterrupt):
            opened._db.insert([(0, bytes(20), b"")] * 2, die)
        assert pictures[1].tobytes() in raw(store)
        (id,) = add(opened, [21])
        assert opened.free(id).found == 0
        assert pictures[1].tobytes() not in raw(store)


def traces_of_new(store: Store, number: int) -> np.ndarray:
    (id,) = add(store, [number])
    picture = np.frombuffer(traces(store, [id])[id][2], dtype=np.uint8)
    store.free(id)
    return picture


def test_a_reader_does_not_bring_back_what_was_freed(store: Path):
    """It mends the cache while another process frees; here it has not yet heard of it."""
    with open_store(store) as writer, open_store(store) as reader:
        picture = traces(writer, [5])[5][2]
        real = reader._db.rows
        freed: list[int] = []

        def rows(ids: list[int]) -> object:
            found = real(ids)
            if 5 in ids and not freed:
                freed.extend(writer.free(5).ids)
            return found

        reader._db.rows = rows
        reader._mend([5])
        assert freed and picture not in raw(store)


def test_an_index_that_a_reader_saves_holds_nothing_freed(tmp_path: Path):
    pytest.importorskip("faiss")
    path = tmp_path / "a.kanerva"
    with open_store(path) as writer, open_store(path, coded=True) as reader:
        add(writer, list(range(20)))
        real = reader._index._alone

        def late() -> object:
            if 5 in writer:
                writer.free(5)
            return real()

        reader._index._alone = late
        reader.find(image(3))
        codes = read_tensors(path.with_name("a.kanerva-index"))[0]["codes"]
        assert not codes[4].any() and codes[3].any()


def test_what_is_added_after_another_process_has_closed_the_store_is_kept(tmp_path: Path):
    """`free` reads the file's bytes. Had it opened and closed it for that, SQLite's locks would be
    gone with it, and who closes the store would remove the log that is still written to."""
    path, freed, closed = (tmp_path / name for name in ("a.kanerva", "freed", "closed"))

    def wait_for(file: Path) -> None:
        end = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < end
            time.sleep(0.01)

    process = os.fork()
    if process == 0:
        try:
            store = open_store(path)
            store.free(add(store, [1, 2])[0])
            freed.touch()
            wait_for(closed)
            add(store, [3, 4])
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    wait_for(freed)
    open_store(path).close()
    closed.touch()
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    with open_store(path) as store:
        store.verify()
        assert list(store) == [2, 3, 4]


def test_a_cache_that_cannot_be_written_stops_no_search(store: Path):
    with open_store(store) as opened:
        expected = content(opened)
    store.with_name("a.kanerva-levels").write_bytes(b"")
    with open_store(store) as opened:
        with watching(Shim(store.parent, 2, fail(errno.ENOSPC))) as shim:
            assert content(opened) == expected
        assert shim.struck


def test_adding_waits_for_no_lock_that_a_killed_process_had(tmp_path: Path, monkeypatch):
    """tqdm's lock is one for all processes that are forked from one."""
    from tqdm import tqdm

    class Held:
        def __enter__(self) -> None:
            raise AssertionError("waited for")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(tqdm, "_lock", Held(), raising=False)
    with open_store(tmp_path / "a.kanerva") as store:
        assert add(store, [1, 2]) == [1, 2]


def test_a_store_is_made_by_one_of_many(tmp_path: Path):
    path, problems = tmp_path / "a.kanerva", list[object]()
    model()  # made here: its weights come from torch's global generator, which threads share

    def work(number: int) -> None:
        try:
            with open_store(path) as store:
                assert len(add(store, [number, number + 1])) == 2
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not problems
    with open_store(path) as store:
        store.verify()
        assert len(store) == 12


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_store_is_never_half_made(tmp_path: Path, place: str, monkeypatch):
    """Killed while it is made: there is none, or a whole one."""
    path = tmp_path / "a.kanerva"
    real: Callable[..., None] = database.write_whole

    def die(*words: object) -> None:
        if place == "after":
            real(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "write_whole", die)
    with pytest.raises(KeyboardInterrupt):
        open_store(path)
    monkeypatch.undo()
    with open_store(path) as store:
        assert add(store, [1]) == [1]
