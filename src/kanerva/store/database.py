"""The store's one file: SQLite, with a write-ahead log, so that what was acknowledged is there.

Ids count from 1 and are never used twice. A freed image's bytes are overwritten where they lie, by
as many zeros: no page is moved, so no copy of it stays behind in another. The log forgets it at
the next checkpoint, which waits for readers.

SQLite's pages have no check sums, so each row has a digest; and a file may come from anywhere, so
its tables must be those that are made here, and values of the types and sizes that are written.
"""

import hashlib
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kanerva.errors import UserError
from kanerva.locks import alone
from kanerva.plain_files import reason, write_whole
from kanerva.store import raw

_APPLICATION, _VERSION = 0x6B616E76, 1  # "kanv"
_WAIT = 5.0  # seconds, for another writer, or for readers of what is to be forgotten
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT,
                    codec INTEGER NOT NULL, block BLOB NOT NULL, payload BLOB NOT NULL,
                    digest BLOB NOT NULL);
CREATE TABLE freed (id INTEGER PRIMARY KEY, pending INTEGER NOT NULL);
"""
Row = tuple[int, bytes, bytes]  # codec, block, payload


class Database:
    """Blocks and payloads by id."""

    def __init__(self, path: Path, about: dict[str, str] | None = None) -> None:
        """Open a store, or make one that says `about` itself, where there is none."""
        self.path = path
        with self.plain_errors():
            if is_new(path):
                if about is None:
                    raise UserError(f"no store at {path}: say which model writes it, model=...")
                if not path.parent.is_dir():
                    raise UserError(f"{path}: no such folder")
                with alone(path.parent):
                    if is_new(path):  # no other process was quicker
                        write_whole(path, _empty(about))
            _refuse_others(path)
            # an absolute path is none of the URIs that SQLite may take
            self._db = sqlite3.connect(path.absolute(), timeout=_WAIT, isolation_level=None)
            self._bytes = raw.hold(path)
            try:
                self._open()
            except BaseException:
                self.close()
                raise

    def _open(self) -> None:
        self._db.execute("PRAGMA trusted_schema = OFF")
        self._db.execute("PRAGMA cell_size_check = ON")
        if self._one("PRAGMA application_id") != _APPLICATION:
            raise UserError(f"{self.path} is no store of kanerva's")
        if (version := self._one("PRAGMA user_version")) != _VERSION:
            raise UserError(f"{self.path} is a store of version {version}; this reads {_VERSION}")
        if self._db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise self._damaged("it has no write-ahead log")
        if _schema(self._db) != _schema_made():
            raise self._damaged("its tables are not those of a store")
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute("PRAGMA synchronous = FULL")
        found = self._db.execute("SELECT name, value FROM about LIMIT 100").fetchall()
        self.about: dict[str, str] = {n: v for n, v in found if isinstance(v, str)}
        if missing := {*ABOUT} - {*self.about}:
            raise self._damaged(f"it does not say its {sorted(missing)[0]}")

    def _damaged(self, how: object) -> UserError:
        return UserError(f"{self.path} is damaged: {how}")

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """What SQLite says, in one line that names the file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(f"{self.path}: another process is writing; try again") from error
            raise UserError(f"{self.path}: {error}") from error
        except sqlite3.ProgrammingError as error:
            raise UserError(f"{self.path}: this store was closed; open it again") from error
        except (sqlite3.Error, UnicodeError) as error:  # the latter of what it quotes from a file
            raise UserError(f"{self.path} is no store, or a damaged one: {error}") from error
        except OSError as error:  # of a cache, which is written in the same transaction
            raise UserError(f"{error.filename or self.path}: {reason(error)}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all of it or nothing, durable at its end."""
        with self.plain_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _one(self, question: str, *values: object) -> int:
        found = self._db.execute(question, values).fetchone()
        if found is None or not isinstance(found[0], int | None):
            raise self._damaged(f"{question} is {found}")
        return found[0] or 0

    # Reading

    def version(self) -> tuple[int, int]:
        """Changes whenever anyone has written."""
        with self.plain_errors():
            return self._one("PRAGMA data_version"), self._db.total_changes

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """All as of one moment."""
        with self.plain_errors():
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                if self._db.in_transaction:
                    self._db.execute("COMMIT")

    def state(self) -> tuple[int, list[int]]:
        """The last id given out, and the ids freed, as of one moment."""
        with self._reading():
            return self._state()

    def _state(self) -> tuple[int, list[int]]:
        last = self._last()
        freed = [id for (id,) in self._db.execute("SELECT id FROM freed ORDER BY id").fetchall()]
        if freed and not 1 <= freed[0] <= freed[-1] <= last:
            raise self._damaged("ids were freed that were never given")
        return last, freed

    def _last(self) -> int:
        """The last id: rows stay where they are, so it is both counted and there."""
        last = self._one("SELECT max(seq) FROM sqlite_sequence")
        room = self._one("PRAGMA page_count") * self._one("PRAGMA page_size")
        if last != self._one("SELECT max(id) FROM items") or not 0 <= last <= room:
            raise self._damaged("ids are missing")
        return last

    def rows(self, ids: Sequence[int]) -> list[Row]:
        """Codec, block and payload of ids that are held, in their order."""
        found: dict[int, Row] = {}
        with self.plain_errors():
            for start in range(0, len(ids), 500):
                part = [int(id) for id in ids[start : start + 500] if 0 < id < 2**63]
                marks = ",".join("?" * len(part))
                answer = self._db.execute(
                    f"SELECT * FROM items WHERE id IN ({marks}) "
                    f"AND id NOT IN (SELECT id FROM freed)",
                    part,
                )
                found |= {row[0]: self._sound(*row) for row in answer.fetchall()}
        for id in ids:
            if id not in found:
                raise UserError(f"{self.path} does not hold id {id}: it was freed, or never given")
        return [found[id] for id in ids]

    def payloads(self, ids: Sequence[int]) -> list[str]:
        """The strings alone; a file's name need not be UTF-8."""
        return [payload.decode(errors="surrogateescape") for _, _, payload in self.rows(ids)]

    def _sound(self, id: int, codec: Any, block: Any, payload: Any, digest: Any) -> Row:
        """A row as it was added."""
        kinds = (int, bytes, bytes, bytes)
        if tuple(map(type, (codec, block, payload, digest))) != kinds:
            raise self._damaged(f"id {id} is not of a store's types")
        if digest != _digest(id, codec, block, payload):
            raise self._damaged(f"id {id} was altered after it was added")
        return codec, block, payload

    def freed_of(self, ids: Sequence[int]) -> set[int]:
        """Those of some ids that are freed by now."""
        with self.plain_errors():
            marks = ",".join("?" * len(ids))
            answer = self._db.execute(f"SELECT id FROM freed WHERE id IN ({marks})", [*ids])
            return {id for (id,) in answer.fetchall()}

    # Writing

    def insert(self, rows: Sequence[Row], prepare: Callable[[list[int]], None]) -> list[int]:
        """Add rows; `prepare` gets their ids before they are there for others to see."""
        with self.writing():
            first = self._last() + 1
            ids = list(range(first, first + len(rows)))
            self._db.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?)",
                [(id, *row, _digest(id, *row)) for id, row in zip(ids, rows, strict=True)],
            )
            prepare(ids)
        return ids

    def erase(self, ids: Sequence[int]) -> int:
        """Zero rows where they lie; bytes overwritten. Pending until `confirm_erased`."""
        with self.writing():
            size = sum(len(block) + len(payload) for _, block, payload in self.rows(ids))
            self._db.executemany(
                "UPDATE items SET block = zeroblob(length(block)), "
                "payload = zeroblob(length(payload)), digest = zeroblob(length(digest)) "
                "WHERE id = ?",
                [(int(id),) for id in ids],
            )
            self._db.executemany("INSERT INTO freed VALUES (?, 1)", [(int(id),) for id in ids])
        return size

    def checkpoint(self) -> bool:
        """Empty the log; False if a reader still needs it after five seconds."""
        with self.plain_errors():
            return not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def pending(self) -> list[int]:
        """Ids whose bytes may still stand in the log."""
        with self.plain_errors():
            return [id for (id,) in self._db.execute("SELECT id FROM freed WHERE pending")]

    def confirm_erased(self, ids: Sequence[int]) -> None:
        """These are pending no more; others may be, of a process that has just erased them."""
        with self.writing():
            question = "UPDATE freed SET pending = 0 WHERE id = ?"
            self._db.executemany(question, [(id,) for id in ids])

    def check(self) -> None:
        """Read every page and every row; a damaged file is refused."""
        with self._reading():
            if (answer := self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
                raise self._damaged(answer)
            last, freed = self._state()
            gone, count = set(freed), 0
            for row in self._db.execute("SELECT * FROM items"):
                count += 1
                if row[0] not in gone:
                    self._sound(*row)
                elif any(not isinstance(v, bytes) or v.strip(b"\0") for v in row[2:]):
                    raise self._damaged(f"id {row[0]} is freed, and still there")
            if count != last:
                raise self._damaged(f"{last} images were added, {count} are there")

    def shares(self, blocks: Sequence[bytes], payloads: Sequence[bytes]) -> set[bytes]:
        """Those of these bytes that a row still held has too."""
        shared: set[bytes] = set()
        with self.plain_errors():
            for column, values in (("block", blocks), ("payload", payloads)):
                for value in values:
                    if self._one(f"SELECT count(*) FROM items WHERE {column} = ?", value):
                        shared.add(value)
        return shared

    def search(self, needles: Sequence[bytes]) -> set[bytes]:
        """Which of these bytes stand in the file, wherever."""
        with self.plain_errors():
            return raw.search(self._bytes, needles)

    def close(self) -> None:
        self._db.close()
        raw.release(self._bytes)
        self._bytes = -1


ABOUT = ("model", "fingerprint", "image", "store")


def is_new(path: Path) -> bool:
    """Whether nothing is there yet, or an empty file."""
    return not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0)


def _refuse_others(path: Path) -> None:
    """What SQLite would wait for, or obey: a pipe; a journal of its other mode, which may name any
    file for it to delete."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is no store: not a regular file")
    journal = path.with_name(f"{path.name}-journal")
    if os.path.lexists(journal):
        raise UserError(f"{journal} is not a store's: remove it to open {path}")


def _digest(id: int, codec: int, block: bytes, payload: bytes) -> bytes:
    """Of a row, its id included."""
    head = f"{id} {codec} {len(block)} ".encode()
    return hashlib.blake2b(head + block + payload, digest_size=8).digest()


def _empty(about: dict[str, str]) -> bytes:
    """The file of a store that holds nothing: made whole, so that none is ever half made."""
    with closing(_tables()) as db:
        db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {_VERSION}")
        content = db.serialize()
    return content[:18] + b"\2\2" + content[20:]  # with a write-ahead log (SQLite's format, 1.3.3)


def _tables() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in _TABLES.split(";"):
        db.execute(statement)
    return db


def _schema(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    question = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name LIMIT 100"
    return db.execute(question).fetchall()


@cache
def _schema_made() -> list[tuple[object, ...]]:
    with closing(_tables()) as db:
        return _schema(db)


def about_model(name: str, fingerprint: str, image: tuple[int, int, int]) -> dict[str, str]:
    """What a store says of itself and of the model that writes it."""
    own = os.urandom(16).hex()  # caches of another store of this name are not taken for its own
    values = (name, fingerprint, json.dumps(list(image)), own)
    return dict(zip(ABOUT, values, strict=True))


def live_ids(last: int, freed: Sequence[int]) -> np.ndarray:
    """Ids that are held, in order."""
    held = np.ones(last, dtype=bool)
    held[np.asarray(freed, dtype=np.int64) - 1] = False
    return np.flatnonzero(held) + 1
