"""The store's one file: SQLite with a write-ahead log, so that acknowledged writes are durable.

Ids count from 1 and are never reused. The bytes of a freed image are overwritten in place with as
many zeros: no page moves, so no copy stays behind in another page. They leave the log at its next
checkpoint, which waits for readers.

SQLite's pages have no checksums, so each row has a digest. A file may be untrusted, so its tables
must be exactly those created here, with values of the expected types and sizes.
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
_WAIT = 5.0  # seconds to wait for another writer, or for readers before a checkpoint
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
        """Open a store. If there is none, make one with this `about` table."""
        self.path = path
        with self.plain_errors():
            if is_new(path):
                if about is None:
                    raise UserError(f"no store at {path}: say which model writes it, model=...")
                if not path.parent.is_dir():
                    raise UserError(f"{path}: no such folder")
                with alone(path.parent):
                    if is_new(path):  # unless another process has just made it
                        write_whole(path, _empty(about))
            _refuse_others(path)
            # absolute, because SQLite may take a relative path for a URI
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
            raise UserError(
                f"{self.path} is a store of version {version}; this kanerva reads {_VERSION}"
            )
        if self._db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise self._damaged("it has no write-ahead log")
        if _schema(self._db) != _schema_made():
            raise self._damaged("its tables are not those of a store")
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute("PRAGMA synchronous = FULL")
        found = self._db.execute("SELECT name, value FROM about LIMIT 100").fetchall()
        self.about: dict[str, str] = {n: v for n, v in found if isinstance(v, str)}
        if missing := {*ABOUT} - {*self.about}:
            raise self._damaged(f"it does not state its {sorted(missing)[0]}")

    def _damaged(self, how: object) -> UserError:
        return UserError(f"{self.path} is damaged: {how}")

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Turn errors of SQLite into one line that names the file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(f"{self.path}: another process is writing; try again") from error
            raise UserError(f"{self.path}: {error}") from error
        except sqlite3.ProgrammingError as error:
            if "thread" in str(error):
                how = "a store is used in the thread that opened it; open another in this one"
                raise UserError(f"{self.path}: {how}") from error
            raise UserError(f"{self.path}: this store was closed; open it again") from error
        except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: in text it quotes
            raise UserError(f"{self.path} is no store, or a damaged one: {error}") from error
        except OSError as error:  # from a cache, which is written in the same transaction
            raise UserError(f"{error.filename or self.path}: {reason(error)}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run one transaction: atomic, and durable when it ends."""
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
        """A value that changes whenever any process has written."""
        with self.plain_errors():
            return self._one("PRAGMA data_version"), self._db.total_changes

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read everything from one snapshot."""
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
        """The last id issued, and all freed ids, from one snapshot."""
        with self._reading():
            return self._state()

    def _state(self) -> tuple[int, list[int]]:
        last = self._last()
        freed = [id for (id,) in self._db.execute("SELECT id FROM freed ORDER BY id").fetchall()]
        if freed and not 1 <= freed[0] <= freed[-1] <= last:
            raise self._damaged("ids were freed that were never issued")
        return last, freed

    def _last(self) -> int:
        """The last id issued. Rows are never deleted, so SQLite's sequence and the last row must
        agree."""
        last = self._one("SELECT max(seq) FROM sqlite_sequence")
        room = self._one("PRAGMA page_count") * self._one("PRAGMA page_size")
        if last != self._one("SELECT max(id) FROM items") or not 0 <= last <= room:
            raise self._damaged("ids are missing")
        return last

    def rows(self, ids: Sequence[int]) -> list[Row]:
        """Codec, block and payload of stored ids, in the given order."""
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
                raise UserError(f"{self.path} does not hold id {id}: it was freed, or never issued")
        return [found[id] for id in ids]

    def payloads(self, ids: Sequence[int]) -> list[str]:
        """The payloads of ids as strings. They may be file names, which need not be valid UTF-8."""
        return [payload.decode(errors="surrogateescape") for _, _, payload in self.rows(ids)]

    def _sound(self, id: int, codec: Any, block: Any, payload: Any, digest: Any) -> Row:
        """Check the types and the digest of a row."""
        kinds = (int, bytes, bytes, bytes)
        if tuple(map(type, (codec, block, payload, digest))) != kinds:
            raise self._damaged(f"id {id} is not of a store's types")
        if digest != _digest(id, codec, block, payload):
            raise self._damaged(f"id {id} was altered after it was added")
        return codec, block, payload

    def freed_of(self, ids: Sequence[int]) -> set[int]:
        """Which of these ids are freed."""
        with self.plain_errors():
            marks = ",".join("?" * len(ids))
            answer = self._db.execute(f"SELECT id FROM freed WHERE id IN ({marks})", [*ids])
            return {id for (id,) in answer.fetchall()}

    # Writing

    def insert(self, rows: Sequence[Row], prepare: Callable[[list[int]], None]) -> list[int]:
        """Add rows. `prepare` is called with their ids before other processes can see them."""
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
        """Overwrite rows with zeros in place, pending until `confirm_erased`. Returns the number of
        bytes overwritten."""
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
        """Truncate the log; False if a reader still needs it after `_WAIT` seconds."""
        with self.plain_errors():
            return not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def pending(self) -> list[int]:
        """Freed ids whose bytes may still be in the log."""
        with self.plain_errors():
            return [id for (id,) in self._db.execute("SELECT id FROM freed WHERE pending")]

    def confirm_erased(self, ids: Sequence[int]) -> None:
        """Mark these ids as no longer pending. Others stay pending: another process may have just
        erased them."""
        with self.writing():
            question = "UPDATE freed SET pending = 0 WHERE id = ?"
            self._db.executemany(question, [(id,) for id in ids])

    def check(self) -> None:
        """Read every page and every row; a damaged file is refused."""
        with self._reading():
            if (answer := self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
                raise self._damaged(answer)
            last, freed = self._state()
            erased, count = set(freed), 0
            for row in self._db.execute("SELECT * FROM items"):
                count += 1
                if row[0] not in erased:
                    self._sound(*row)
                elif any(not isinstance(v, bytes) or v.strip(b"\0") for v in row[2:]):
                    raise self._damaged(f"id {row[0]} was freed, but is still there")
            if count != last:
                raise self._damaged(f"{last} images were added, but {count} are there")

    def shares(self, needles: Sequence[bytes]) -> set[bytes]:
        """Which of these byte strings also occur in what is not freed: as a part of a block or a
        payload, as a search of the file finds them, or of what each store has."""
        always = (_TABLES + " ".join([*self.about, *self.about.values()])).encode()
        within = "SELECT EXISTS (SELECT 1 FROM items WHERE instr(block, ?1) OR instr(payload, ?1))"
        with self.plain_errors():
            return {one for one in needles if one in always or self._one(within, one)}

    def search(self, needles: Sequence[bytes]) -> set[bytes]:
        """Which of these byte strings occur anywhere in the file."""
        with self.plain_errors():
            return raw.search(self._bytes, needles)

    def close(self) -> None:
        with self.plain_errors():
            self._db.close()
        raw.release(self._bytes)
        self._bytes = -1


ABOUT = ("model", "fingerprint", "image", "store")


def is_new(path: Path) -> bool:
    """Whether there is no file yet, or an empty one."""
    return not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0)


def _refuse_others(path: Path) -> None:
    """Refuse what SQLite must not open: a pipe, on which it would hang, and a store with a rollback
    journal, which may name any file for SQLite to delete."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is no store: not a regular file")
    journal = path.with_name(f"{path.name}-journal")
    if os.path.lexists(journal):
        raise UserError(f"{journal} is not a store's: remove it to open {path}")


def _digest(id: int, codec: int, block: bytes, payload: bytes) -> bytes:
    """The digest of a row, including its id."""
    head = f"{id} {codec} {len(block)} ".encode()
    return hashlib.blake2b(head + block + payload, digest_size=8).digest()


def _empty(about: dict[str, str]) -> bytes:
    """The bytes of an empty store's file: written atomically, so that no half-made file exists."""
    with closing(_tables()) as db:
        db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {_VERSION}")
        content = db.serialize()
    return content[:18] + b"\2\2" + content[20:]  # write-ahead log on (SQLite's format, 1.3.3)


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
    """The `about` table of a new store: its model, and a random id of its own."""
    store = os.urandom(16).hex()  # so that caches of another store with this path are not used
    values = (name, fingerprint, json.dumps(list(image)), store)
    return dict(zip(ABOUT, values, strict=True))


def live_ids(last: int, freed: Sequence[int]) -> np.ndarray:
    """Stored ids, in order."""
    held = np.ones(last, dtype=bool)
    held[np.asarray(freed, dtype=np.int64) - 1] = False
    return np.flatnonzero(held) + 1
