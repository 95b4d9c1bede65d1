"""Files and batches that clients have handed in: facts in SQLite, contents as plain files beside it.

Knows no HTTP and runs nothing. Several processes may share a folder: every change is one transaction, and a batch is
worked on by whoever holds its lock, which the operating system takes back from a process that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from deployments.batch_api.records import OPEN, InUseError, MissingError, Status, StoredBatch, StoredFile

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input TEXT NOT NULL, window TEXT NOT NULL, window_s INTEGER NOT NULL, metadata TEXT NOT NULL, status TEXT NOT NULL,
    times TEXT NOT NULL, total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, problems TEXT NOT NULL DEFAULT '[]', output TEXT, errors TEXT);
"""


class BatchStore:
    """The files and batches under one folder. Blocking; callable from any thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("files", "work"):
            (folder / name).mkdir(exist_ok=True, mode=0o700)
        (folder / "batches.sqlite").touch(mode=0o600)  # SQLite would let others read what clients handed in
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            folder / "batches.sqlite", isolation_level=None, check_same_thread=False, timeout=30
        )
        self._database.row_factory = sqlite3.Row
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_TABLES)
        except sqlite3.Error:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the database, when what other threads have begun is done: SQLite crashes if it is closed under them."""
        with self._lock:
            self._database.close()

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    # -- files ---------------------------------------------------------------------------------------------------

    def add_file(
        self, owner: str, name: str, purpose: str, content: BinaryIO | Path, id_: str | None = None
    ) -> StoredFile:
        """Keep a copy of `content`. With an id that is there already, nothing happens."""
        id_ = id_ or f"file-{secrets.token_hex(12)}"
        part = self._folder / "files" / f"{id_}.part"
        with part.open("wb") as target:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, target)
            else:
                shutil.copyfileobj(content, target)
            target.flush()
            os.fsync(target.fileno())
            size = target.tell()
        part.rename(self.content(id_))
        with self._transaction() as database:
            database.execute(
                "INSERT OR IGNORE INTO files (id, owner, name, purpose, bytes, created) VALUES (?, ?, ?, ?, ?, ?)",
                (id_, owner, name, purpose, size, int(self._clock())),
            )
        return self.file(id_, owner)

    def content(self, id_: str) -> Path:
        """Where a file's content is. `id_` is one that this store has given out."""
        return self._folder / "files" / id_

    def file(self, id_: str, owner: str) -> StoredFile:
        """Raises MissingError."""
        row = self._one("SELECT * FROM files WHERE id = ? AND owner = ?", (id_, owner))
        if row is None:
            raise MissingError(f"no such file: {id_}", "file_id")
        return _file(row)

    def files(
        self, owner: str, after: str | None = None, limit: int = 100, purpose: str | None = None, newest: bool = True
    ) -> tuple[list[StoredFile], bool]:
        """Some files of an owner, beginning behind `after`, and whether there are more."""
        rows, more = self._page("files", owner, after, limit, newest, "(? IS NULL OR purpose = ?)", (purpose, purpose))
        return [_file(row) for row in rows], more

    def held_bytes(self, owner: str) -> int:
        """What all files of an owner take."""
        row = self._one("SELECT COALESCE(SUM(bytes), 0) AS held FROM files WHERE owner = ?", (owner,))
        return int(row["held"]) if row is not None else 0

    def remove_file(self, id_: str, owner: str) -> None:
        """Raises MissingError, or InUseError while a batch reads it."""
        self.file(id_, owner)
        with self._transaction() as database:
            marks = ", ".join("?" * len(OPEN))
            reading = database.execute(
                f"SELECT id FROM batches WHERE input = ? AND status IN ({marks})", (id_, *OPEN)
            ).fetchone()
            if reading is not None:
                raise InUseError(f"{id_} is being read by {reading['id']}: cancel it first", "file_id")
            database.execute("DELETE FROM files WHERE id = ?", (id_,))
        self.content(id_).unlink(missing_ok=True)

    # -- batches -------------------------------------------------------------------------------------------------

    def add_batch(
        self, owner: str, endpoint: str, input_: str, window: str, window_s: int, metadata: dict[str, str]
    ) -> StoredBatch:
        """Begin a batch. Raises MissingError when the owner has no such file."""
        self.file(input_, owner)
        id_ = f"batch_{secrets.token_hex(12)}"
        times = json.dumps({"validating": int(self._clock())})
        with self._transaction() as database:
            database.execute(
                "INSERT INTO batches (id, owner, endpoint, input, window, window_s, metadata, status, times)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?)",
                (id_, owner, endpoint, input_, window, window_s, json.dumps(metadata), times),
            )
        return self.batch(id_, owner)

    def batch(self, id_: str, owner: str | None = None) -> StoredBatch:
        """owner: None for any. Raises MissingError."""
        row = self._one("SELECT * FROM batches WHERE id = ? AND (? IS NULL OR owner = ?)", (id_, owner, owner))
        if row is None:
            raise MissingError(f"no such batch: {id_}", "batch_id")
        return _batch(row)

    def batches(self, owner: str, after: str | None = None, limit: int = 20) -> tuple[list[StoredBatch], bool]:
        """Some batches of an owner, the newest first, beginning behind `after`, and whether there are more."""
        rows, more = self._page("batches", owner, after, limit, True)
        return [_batch(row) for row in rows], more

    def unfinished(self, owner: str | None = None) -> list[str]:
        """Batches that are not at their end, the oldest first."""
        marks = ", ".join("?" * len(OPEN))
        with self._lock:
            rows = self._database.execute(
                f"SELECT id FROM batches WHERE status IN ({marks}) AND (? IS NULL OR owner = ?) ORDER BY number",
                (*OPEN, owner, owner),
            ).fetchall()
        return [str(row["id"]) for row in rows]

    def advance(self, id_: str, to: Status, only_from: tuple[Status, ...], **facts: Any) -> StoredBatch:
        """Change the status if it is one of `only_from`, and set `facts`; returns what the batch is then."""
        with self._transaction() as database:
            row = database.execute("SELECT * FROM batches WHERE id = ?", (id_,)).fetchone()
            if row is None:
                raise MissingError(f"no such batch: {id_}", "batch_id")
            if row["status"] in only_from:
                times = json.loads(row["times"]) | {to: int(self._clock())}
                values = {"status": to, "times": json.dumps(times), **facts}
                if "problems" in values:
                    values["problems"] = json.dumps(values["problems"])
                database.execute(
                    f"UPDATE batches SET {', '.join(f'{name} = ?' for name in values)} WHERE id = ?",
                    (*values.values(), id_),
                )
        return self.batch(id_)

    def count(self, id_: str, total: int, completed: int, failed: int) -> StoredBatch:
        """Note how far a batch is; returns what it is then."""
        with self._transaction() as database:
            database.execute(
                "UPDATE batches SET total = ?, completed = ?, failed = ? WHERE id = ?", (total, completed, failed, id_)
            )
        return self.batch(id_)

    def work(self, id_: str) -> Path:
        """The folder in which a batch is worked on."""
        folder = self._folder / "work" / id_
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder

    def tidy(self, id_: str) -> None:
        """Remove that folder if the batch is at its end: its results are files then."""
        if self.batch(id_).status not in OPEN:
            shutil.rmtree(self._folder / "work" / id_, ignore_errors=True)

    @contextmanager
    def held(self, id_: str) -> Iterator[bool]:
        """Whether this is now the only one to work on the batch, among all processes, until the context ends."""
        with (self.work(id_) / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    # -- SQLite --------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _one(self, query: str, values: tuple[Any, ...]) -> sqlite3.Row | None:
        with self._lock:
            row: sqlite3.Row | None = self._database.execute(query, values).fetchone()
            return row

    def _page(
        self,
        table: Literal["files", "batches"],
        owner: str,
        after: str | None,
        limit: int,
        newest: bool,
        where: str = "1",
        values: tuple[Any, ...] = (),
    ) -> tuple[list[sqlite3.Row], bool]:
        behind = ""
        if after is not None:
            if self._one(f"SELECT 1 FROM {table} WHERE id = ? AND owner = ?", (after, owner)) is None:
                raise MissingError(f"nothing of the name {after!r}", "after")
            behind = f" AND number {'<' if newest else '>'} (SELECT number FROM {table} WHERE id = ?)"
            values = (*values, after)
        query = (
            f"SELECT * FROM {table} WHERE owner = ? AND {where}{behind} ORDER BY number {'DESC' if newest else 'ASC'}"
        )
        with self._lock:
            rows = self._database.execute(f"{query} LIMIT ?", (owner, *values, limit + 1)).fetchall()
        return rows[:limit], len(rows) > limit


def _file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(row["id"], row["owner"], row["name"], row["purpose"], row["bytes"], row["created"])


def _batch(row: sqlite3.Row) -> StoredBatch:
    told = {name: row[name] for name in row.keys() if name != "number"}  # noqa: SIM118 (a Row is no mapping)
    told |= {name: json.loads(told[name]) for name in ("metadata", "times", "problems")}
    return StoredBatch(**told)
