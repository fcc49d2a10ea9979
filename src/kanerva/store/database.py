"""The store's one file: SQLite, with a write-ahead log, so that what was acknowledged is there.

Ids count from 1 and are never used twice. A freed image's bytes are overwritten where they lie, by
as many zeros: no page is moved, so no copy of it stays behind in another. The log forgets it at
the next checkpoint, which waits for readers.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kanerva.errors import UserError

_APPLICATION, _VERSION = 0x6B616E76, 1  # "kanv"
_WAIT = 5.0  # seconds, for another writer, or for readers of what is to be forgotten
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT,
                    codec INTEGER NOT NULL, block BLOB NOT NULL, payload BLOB NOT NULL);
CREATE TABLE freed (id INTEGER PRIMARY KEY, pending INTEGER NOT NULL);
"""
Row = tuple[int, bytes, bytes]  # codec, block, payload


class Database:
    """Blocks and payloads by id."""

    def __init__(self, path: Path, about: dict[str, str] | None = None) -> None:
        """Open a store, or make one that says `about` itself, where there is none."""
        self.path = path
        new = not path.exists() or path.stat().st_size == 0
        if new and about is None:
            raise UserError(f"no store at {path}: say which model writes it, model=...")
        if not path.parent.is_dir():
            raise UserError(f"{path}: no such folder")
        with self._plain_errors():
            self._db = sqlite3.connect(path, timeout=_WAIT, isolation_level=None)
            if new:
                self._create(about or {})
            kind = self._one("PRAGMA application_id")
            if kind != _APPLICATION:
                raise UserError(f"{path} is no store of kanerva's")
            if (version := self._one("PRAGMA user_version")) != _VERSION:
                raise UserError(f"{path} is a store of version {version}; this reads {_VERSION}")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.execute("PRAGMA synchronous = FULL")
            self.about = dict(self._db.execute("SELECT name, value FROM about").fetchall())

    def _create(self, about: dict[str, str]) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        with self.writing():
            if self._one("PRAGMA application_id") == _APPLICATION:
                return  # another process was quicker
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            self._db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {_VERSION}")

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """What SQLite says, in one line that names the file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(f"{self.path}: another process is writing; try again") from error
            raise UserError(f"{self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise UserError(f"{self.path} is no store, or a damaged one: {error}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all of it or nothing, durable at its end."""
        with self._plain_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _one(self, question: str, *values: object) -> int:
        return self._db.execute(question, values).fetchone()[0] or 0

    # Reading

    def version(self) -> tuple[int, int]:
        """Changes whenever anyone has written."""
        with self._plain_errors():
            return self._one("PRAGMA data_version"), self._db.total_changes

    def state(self) -> tuple[int, list[int]]:
        """The last id given out, and the ids freed, as of one moment."""
        with self._plain_errors():
            self._db.execute("BEGIN")
            try:
                last = self._one("SELECT max(id) FROM items")
                freed = self._db.execute("SELECT id FROM freed ORDER BY id").fetchall()
            finally:
                self._db.execute("COMMIT")
        return last, [id for (id,) in freed]

    def rows(self, ids: Sequence[int]) -> list[Row]:
        """Codec, block and payload of ids that are held, in their order."""
        return self._select("codec, block, payload", ids)

    def payloads(self, ids: Sequence[int]) -> list[str]:
        """Payloads alone."""
        return [payload.decode() for (payload,) in self._select("payload", ids)]

    def _select(self, columns: str, ids: Sequence[int]) -> list[Any]:
        found: dict[int, Any] = {}
        with self._plain_errors():
            for start in range(0, len(ids), 500):
                part = [int(id) for id in ids[start : start + 500]]
                marks = ",".join("?" * len(part))
                answer = self._db.execute(
                    f"SELECT id, {columns} FROM items WHERE id IN ({marks}) "
                    f"AND id NOT IN (SELECT id FROM freed)",
                    part,
                )
                found |= {row[0]: row[1:] for row in answer.fetchall()}
        for id in ids:
            if id not in found:
                raise UserError(f"{self.path} does not hold id {id}: it was freed, or never given")
        return [found[id] for id in ids]

    # Writing

    def insert(self, rows: Sequence[Row], prepare: Callable[[list[int]], None]) -> list[int]:
        """Add rows; `prepare` gets their ids before they are there for others to see."""
        with self.writing():
            first = self._one("SELECT max(seq) FROM sqlite_sequence") + 1
            ids = list(range(first, first + len(rows)))
            self._db.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?)",
                [(id, *row) for id, row in zip(ids, rows, strict=True)],
            )
            prepare(ids)
        return ids

    def erase(self, ids: Sequence[int]) -> int:
        """Overwrite rows by zeros where they lie; bytes overwritten. Pending until `settle`."""
        with self.writing():
            size = sum(len(block) + len(payload) for _, block, payload in self.rows(ids))
            self._db.executemany(
                "UPDATE items SET block = zeroblob(length(block)), "
                "payload = zeroblob(length(payload)) WHERE id = ?",
                [(int(id),) for id in ids],
            )
            self._db.executemany("INSERT INTO freed VALUES (?, 1)", [(int(id),) for id in ids])
        return size

    def checkpoint(self) -> bool:
        """Empty the log; False if a reader still needs it after five seconds."""
        with self._plain_errors():
            return not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def pending(self) -> list[int]:
        """Ids whose bytes may still stand in the log."""
        with self._plain_errors():
            return [id for (id,) in self._db.execute("SELECT id FROM freed WHERE pending")]

    def settle(self) -> None:
        """Nothing is pending any more."""
        with self.writing():
            self._db.execute("UPDATE freed SET pending = 0 WHERE pending")

    def check(self) -> None:
        """Read every page; a damaged file is refused."""
        with self._plain_errors():
            answer = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if answer != "ok":
            raise UserError(f"{self.path} is damaged: {answer}")

    def shares(self, blocks: Sequence[bytes], payloads: Sequence[bytes]) -> set[bytes]:
        """Those of these bytes that a row still held has too."""
        shared: set[bytes] = set()
        with self._plain_errors():
            for column, values in (("block", blocks), ("payload", payloads)):
                for value in values:
                    if self._one(f"SELECT count(*) FROM items WHERE {column} = ?", value):
                        shared.add(value)
        return shared

    def close(self) -> None:
        self._db.close()


def about_model(name: str, fingerprint: str, image: tuple[int, int, int]) -> dict[str, str]:
    """What a store says of the model that writes it."""
    return {"model": name, "fingerprint": fingerprint, "image": json.dumps(list(image))}


def live_ids(last: int, freed: Sequence[int]) -> np.ndarray:
    """Ids that are held, in order."""
    held = np.ones(last, dtype=bool)
    held[np.asarray(freed, dtype=np.int64) - 1] = False
    return np.flatnonzero(held) + 1
