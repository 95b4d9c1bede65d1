"""What one target pass did, for whoever sends its results and books its costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from actors.messages import VerificationResult


@dataclass(slots=True)
class PassReport:
    """One pass: what it decided, by the orchestrator it is for, and where its time went (seconds).

    results: also has the orchestrators with work in the pass for which nothing was committed.
    """

    results: dict[str, list[VerificationResult]] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    hold_seconds: float = 0.0
    form_seconds: float = 0.0
    commit_seconds: float = 0.0
    plain_seconds: float = 0.0
    """What the pass would have taken without drafts, as the cost fit has it."""
    queue_seconds: list[float] = field(default_factory=list)
    """How long the sequences that got a slot had waited for it."""

    def add(self, owner: str, result: VerificationResult) -> None:
        """File a result for its orchestrator."""
        self.results.setdefault(owner, []).append(result)

    def __iter__(self) -> Iterator[VerificationResult]:
        return chain.from_iterable(self.results.values())

    @property
    def declined(self) -> int:
        """Rows whose drafts were not worth verifying."""
        return sum(result.declined for result in self)

    @property
    def starved(self) -> int:
        """Rows that wanted drafts and found none."""
        return sum(result.starved for result in self)
