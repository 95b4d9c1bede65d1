"""Served traffic as training data for the next draft: opt-in, bounded, and without names.

What is kept of a request: a keyed hash of who asked (so that a person's share can be deleted, and not read), the ids
of prompt and answer, and the target's best log-probabilities where the request had them. Offering never waits and
never fails; a thread of the owner's choice calls `flush`. One writer per file.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.errors import ConfigError
from actors.messages import Alternatives
from cluster.distillation.store import Sample

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner BLOB NOT NULL,
    tokens INTEGER NOT NULL,
    temperature REAL NOT NULL,
    prompt BLOB NOT NULL,
    answer BLOB NOT NULL,
    top INTEGER NOT NULL,
    top_ids BLOB NOT NULL,
    top_logp BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_owner ON answers (owner);
"""
_INSERT = (
    "INSERT INTO answers (owner, tokens, temperature, prompt, answer, top, top_ids, top_logp) VALUES (?,?,?,?,?,?,?,?)"
)
_NOTHING = -1e4
"""Log-probability of a place that holds no alternative."""


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request.

    owner: whose it is, in whatever form; only its keyed hash is stored. alternatives: one per committed token, as
    they were asked for, or none at all.
    """

    owner: str
    prompt: Sequence[int]
    committed: Sequence[int]
    temperature: float = 1.0
    alternatives: Sequence[Alternatives] = ()


class TrafficRecorder:
    """A bounded SQLite file of served answers.

    secret: key of the hash; without it nobody can tell whether a name is in the file. tokens: most tokens kept,
    prompts included; the oldest answers make room. top: most log-probabilities kept per token. pending: most answers
    waiting for a flush. fingerprint: of the target's vocabulary; a file of another target is refused (ConfigError).
    """

    def __init__(
        self,
        path: Path,
        *,
        secret: bytes,
        fingerprint: str = "",
        tokens: int = 5_000_000,
        top: int = 20,
        pending: int = 256,
    ) -> None:
        if not 16 <= len(secret) <= 64:
            raise ConfigError("the recorder's secret must have 16 to 64 bytes")
        self._secret, self._limit, self._top, self._most_pending = secret, tokens, top, pending
        self._pending: deque[Served] = deque()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self.dropped = 0
        """Answers that were not kept because the buffer was full, or the disk refused them."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # other users of the machine must not read it
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.executescript(_SCHEMA)
            self._database.execute("INSERT OR IGNORE INTO facts VALUES ('fingerprint', ?)", (fingerprint,))
            known = _fingerprint(self._database)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot record traffic in {path}: {error}") from error
        if known != fingerprint:
            self._database.close()
            raise ConfigError(f"{path} holds the traffic of a target with another vocabulary; choose another file")

    def offer(self, served: Served) -> bool:
        """Keep an answer for the next flush, without waiting. False if it was dropped, or there is nothing in it."""
        if not served.committed or not served.prompt:
            return False
        with self._lock:
            if len(self._pending) >= self._most_pending:
                self.dropped += 1
                return False
            self._pending.append(served)
            return True

    def flush(self) -> int:
        """Write what was offered, and drop the oldest past the bound. Returns how many answers were written.

        A disk that refuses costs these answers (see `dropped`) and nothing else. May be called from any thread.
        """
        with self._lock:
            batch, self._pending = list(self._pending), deque()
        if not batch:
            return 0
        rows = [self._row(served) for served in batch]
        with self._writing:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(_INSERT, rows)
                self._make_room()
                self._database.execute("COMMIT")
            except sqlite3.Error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                with self._lock:
                    self.dropped += len(batch)
                return 0
        return len(batch)

    def forget(self, owner: str) -> int:
        """Delete everything of one owner. Returns how many answers that were."""
        digest = self._hash(owner)
        with self._lock:
            kept = deque(served for served in self._pending if served.owner != owner)
            waiting = len(self._pending) - len(kept)
            self._pending = kept
        with self._writing:
            deleted = self._database.execute("DELETE FROM answers WHERE owner = ?", (digest,)).rowcount
        return waiting + deleted

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        with self._writing:
            self._database.close()

    def _hash(self, owner: str) -> bytes:
        return hashlib.blake2b(owner.encode(), key=self._secret, digest_size=16).digest()

    def _row(self, served: Served) -> tuple[object, ...]:
        top = [self._best(served, place) for place in range(len(served.committed))]
        width = max(map(len, top))
        ids, logp = array("i"), array("f")
        for pairs in top:
            padding = width - len(pairs)
            ids.extend([*(token for token, _ in pairs), *[0] * padding])
            logp.extend([*(value for _, value in pairs), *[_NOTHING] * padding])
        tokens = len(served.prompt) + len(served.committed)
        prompt, answer = array("i", served.prompt), array("i", served.committed)
        blobs = (prompt.tobytes(), answer.tobytes(), width, ids.tobytes(), logp.tobytes())
        return (self._hash(served.owner), tokens, served.temperature, *blobs)

    def _best(self, served: Served, place: int) -> list[tuple[int, float]]:
        """Best first. A token without alternatives teaches as a certain one: it is a sample of the target."""
        if place < len(served.alternatives) and served.alternatives[place].top:
            return sorted(served.alternatives[place].top, key=lambda pair: -pair[1])[: self._top]
        return [(served.committed[place], 0.0)]

    def _make_room(self) -> None:
        (total,) = self._database.execute("SELECT coalesce(sum(tokens), 0) FROM answers").fetchone()
        last = None
        if total > self._limit:
            for number, tokens in self._database.execute("SELECT number, tokens FROM answers ORDER BY number"):
                last, total = number, total - tokens
                if total <= self._limit:
                    break
        if last is not None:
            self._database.execute("DELETE FROM answers WHERE number <= ?", (last,))


def recorded_fingerprint(path: Path) -> str:
    """Of the vocabulary that a file of traffic is about. Raises ConfigError if it is no such file."""
    with _reading(path) as database:
        return _fingerprint(database)


def recorded_samples(path: Path) -> Iterator[Sample]:
    """Everything in a file of traffic, oldest first, one answer in memory at a time. Raises ConfigError."""
    with _reading(path) as database:
        rows = database.execute(
            "SELECT prompt, answer, top, top_ids, top_logp, temperature FROM answers ORDER BY number"
        )
        for prompt, answer, top, top_ids, top_logp, temperature in rows:
            yield Sample(
                torch.frombuffer(bytearray(prompt), dtype=torch.int32),
                torch.frombuffer(bytearray(answer), dtype=torch.int32),
                torch.frombuffer(bytearray(top_ids), dtype=torch.int32).view(-1, top),
                torch.frombuffer(bytearray(top_logp), dtype=torch.float32).view(-1, top).half(),
                temperature,
            )


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can only read."""
    database = None
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        _fingerprint(database)
        yield database
    except (sqlite3.Error, TypeError) as error:
        raise ConfigError(f"{path} is no file of recorded traffic: {error}") from error
    finally:
        if database is not None:
            database.close()


def _fingerprint(database: sqlite3.Connection) -> str:
    (value,) = database.execute("SELECT value FROM facts WHERE name = 'fingerprint'").fetchone()
    return str(value)
