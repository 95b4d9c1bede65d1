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
        A line for which it returns False is removed from the file.
    sync: force every line to the disk, so that it survives the machine and not only the process.
    Raises ConfigError when the file cannot be used.
    """

    def __init__(self, path: Path, kind: str, recall: Callable[[Any], bool | None], sync: bool = False) -> None:
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

    def _recover(self, kind: str, recall: Callable[[Any], bool | None]) -> None:
        self._file.seek(0)
        whole, removed = 0, False
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                removed = recall(json.loads(line)) is False or removed
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self.path}, line {number}: this is no {kind}") from error
            whole += len(line)
        self._file.truncate(whole)
        if removed:
            self._rewrite(recall)
        self._file.seek(0, os.SEEK_END)

    def _rewrite(self, recall: Callable[[Any], bool | None]) -> None:
        """Put a copy without the removed lines in the file's place, at once: a crash leaves the one or the other."""
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("wb") as kept:
                self._file.seek(0)
                kept.writelines(line for line in self._file if recall(json.loads(line)) is not False)
                kept.flush()
                os.fsync(kept.fileno())
            part.replace(self.path)
            self._file.close()
            self._file = open(self.path, "a+b")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error

    def append(self, entry: Any) -> None:
        """Add one line; returns when the operating system has it."""
        try:
            line = json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair in an answer: as it came, escaped
            line = json.dumps(entry).encode()
        self._file.write(line + b"\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
