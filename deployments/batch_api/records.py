"""What the store of files and batches holds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from actors.errors import RequestError

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""A batch in one of these is not at its end."""


class MissingError(RequestError):
    """No such file or batch, or it belongs to another key."""

    status = 404
    code = "not_found"


class InUseError(RequestError):
    """Not possible in the state in which the object is."""

    status = 409
    code = "conflict"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. `created` is in Unix seconds."""

    id: str
    owner: str
    name: str
    purpose: str
    bytes: int
    created: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One batch. `times` holds, per status it has had, the Unix second in which it began."""

    id: str
    owner: str
    endpoint: str
    input: str
    window: str
    window_s: int
    metadata: dict[str, str]
    status: Status
    times: dict[str, int]
    total: int = 0
    completed: int = 0
    failed: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    """Why the batch as a whole failed: code, message, param and line."""
    output: str | None = None
    errors: str | None = None

    @property
    def expires(self) -> int:
        """The Unix second after which nothing more is begun."""
        return self.times["validating"] + self.window_s
