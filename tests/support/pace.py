"""A draft that is never too late: each pass of the target waits until the draft has made some steps since the last.

How many drafts a pass finds otherwise depends on what else the machine does, and a test could ask for none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from actors.engines.protocol import Expand, Ranked, Row
from actors.messages import VerificationResult


class Pace:
    """Wrap both engines with the same pace, those of all replicas.

    steps: of the draft between two passes. patience_s: a draft whose trees are full makes no more steps; the pass then
        goes ahead. It does at once where the draft has no sequence.
    """

    def __init__(self, steps: int = 1, patience_s: float = 0.5) -> None:
        self.steps, self.patience_s = steps, patience_s
        self.made = 0
        self.opened = 0
        self.moved = threading.Condition()

    def target(self, model: Any) -> PacedTarget:
        return PacedTarget(model, self)

    def draft(self, model: Any) -> PacedDraft:
        return PacedDraft(model, self)

    def wait(self, since: int) -> int:
        """Until `steps` were made after the first `since`. Returns how many were made in all."""
        with self.moved:
            self.moved.wait_for(lambda: not self.opened or self.made >= since + self.steps, self.patience_s)
            return self.made


class PacedTarget:
    def __init__(self, model: Any, pace: Pace) -> None:
        self._model, self._pace, self._seen = model, pace, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        self._seen = self._pace.wait(self._seen)
        found: list[VerificationResult | None] = self._model.forward(rows)
        return found


class PacedDraft:
    def __init__(self, model: Any, pace: Pace) -> None:
        self._model, self._pace, self._names = model, pace, set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, opening: Any) -> None:
        self._model.open(opening)
        self._count(self._names | {opening.sequence})

    def close(self, sequence: str) -> None:
        self._model.close(sequence)
        self._count(self._names - {sequence})

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        found: list[Ranked] = self._model.expand(requests)
        with self._pace.moved:
            self._pace.made += 1
            self._pace.moved.notify_all()
        return found

    def _count(self, names: set[str]) -> None:
        with self._pace.moved:
            self._pace.opened += len(names) - len(self._names)
            self._names = names
            self._pace.moved.notify_all()
