"""A journal of finished items, so that a job that was killed goes on where it was, each input exactly once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from actors.errors import ConfigError
from deployments.client.jsonl import JsonlFile


def digest(value: object) -> str:
    """Names what was asked, so that a journal is not taken for another job's."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


class Journal:
    """Append-only lines of JSON: {"index", "asked", "result"}.

    sync: force every line to the disk, so that it survives the machine and not only the process.
    Raises ConfigError when the file cannot be used.
    """

    def __init__(self, path: str | Path, sync: bool = False) -> None:
        self.done: dict[int, tuple[str, dict[str, Any]]] = {}
        self._file = JsonlFile(Path(path), "journal of Outrider", self._recall, sync)

    def _recall(self, entry: dict[str, Any]) -> None:
        self.done[int(entry["index"])] = (entry["asked"], entry["result"])

    def result(self, index: int, asked: str) -> dict[str, Any] | None:
        """The result of an item that is done. Raises ConfigError when the journal belongs to other inputs."""
        if index not in self.done:
            return None
        before, result = self.done[index]
        if before != asked:
            raise ConfigError(f"{self._file.path} belongs to another job: item {index} was asked something else")
        return result

    def add(self, index: int, asked: str, result: dict[str, Any]) -> None:
        """Note that an item is done. Returns when the operating system has it."""
        self._file.append({"index": index, "asked": asked, "result": result})
        self.done[index] = (asked, result)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
