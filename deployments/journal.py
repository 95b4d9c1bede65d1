"""A journal of finished items, so that a job that was killed goes on where it was, each input exactly once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from actors.errors import ConfigError


def digest(value: object) -> str:
    """Names what was asked, so that a journal is not taken for another job's."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


class Journal:
    """Append-only lines of JSON: {"index", "asked", "result"}.

    A line that was cut short by a crash is dropped when the journal is opened again; everything before it counts.
    sync: force every line to the disk, so that it survives the machine and not only the process.
    Raises ConfigError when the file cannot be used.
    """

    def __init__(self, path: str | Path, sync: bool = False) -> None:
        self._sync = sync
        self._path = Path(path)
        self.done: dict[int, tuple[str, dict[str, Any]]] = {}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._path, "a+b")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ConfigError(f"cannot write the journal {path}: {error.strerror}") from error
        try:
            self._recover()
        except ConfigError:
            self._file.close()
            raise

    def _recover(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                self.done[int(entry["index"])] = (entry["asked"], entry["result"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self._path}, line {number}: this is no journal of Outrider") from error
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def result(self, index: int, asked: str) -> dict[str, Any] | None:
        """The result of an item that is done. Raises ConfigError when the journal belongs to other inputs."""
        if index not in self.done:
            return None
        before, result = self.done[index]
        if before != asked:
            raise ConfigError(f"{self._path} belongs to another job: item {index} was asked something else")
        return result

    def add(self, index: int, asked: str, result: dict[str, Any]) -> None:
        """Note that an item is done. Returns when the operating system has it."""
        line = json.dumps({"index": index, "asked": asked, "result": result}, ensure_ascii=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self.done[index] = (asked, result)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
