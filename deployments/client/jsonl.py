"""A file of JSON lines that is only ever appended to, and can be opened again after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from actors.errors import ConfigError


class JsonlFile:
    """Whole lines of JSON. What a crash cut short is dropped when the file is opened again; all before it counts.

    kind: what the file is, for messages ("journal of Outrider").
    recall: told every line that is there; what it raises of ValueError, KeyError or TypeError means a foreign file.
    sync: force every line to the disk, so that it survives the machine and not only the process.
    Raises ConfigError when the file cannot be used.
    """

    def __init__(self, path: Path, kind: str, recall: Callable[[Any], None], sync: bool = False) -> None:
        self.path = path
        self._sync = sync
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._recover(kind, recall)
        except ConfigError:
            self._file.close()
            raise

    def _recover(self, kind: str, recall: Callable[[Any], None]) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                recall(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self.path}, line {number}: this is no {kind}") from error
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def append(self, entry: Any) -> None:
        """Add one line; returns when the operating system has it."""
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
