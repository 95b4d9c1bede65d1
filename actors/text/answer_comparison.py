"""Compares answers token for token, and tells a different answer from a near-tie.

A forward pass rounds differently for other batch shapes, so in float32 a token may differ where the reference's own
two best scores lie closer than the rounding. Such a place is a near-tie: it is counted, and
the answers are compared no further, since what follows a different token is another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TOLERANCE = 1e-3
"""In units of logits, for float32; zero for float64 and for emulated models."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An answer of the target alone, with the distance between the two best scores at each token."""

    tokens: Sequence[int]
    margins: Sequence[float] = ()


@dataclass(slots=True)
class Comparison:
    """A tally over many answers."""

    tolerance: float = TOLERANCE
    identical: int = 0
    ties: int = 0
    """Answers that part at a near-tie of the reference."""
    different: list[str] = field(default_factory=list)
    """What differs, one line an answer."""
    tokens: int = 0
    """Tokens found equal."""

    def add(self, name: str, reference: Reference, tokens: Sequence[int]) -> None:
        """Compare one answer with its reference."""
        place = first_difference(reference.tokens, tokens)
        self.tokens += len(reference.tokens) if place is None else place
        if place is None:
            self.identical += 1
        elif place < len(reference.margins) and reference.margins[place] < self.tolerance:
            self.ties += 1
        else:
            one, other = _at(reference.tokens, place), _at(tokens, place)
            margin = f"{reference.margins[place]:.2g}" if place < len(reference.margins) else "unknown"
            self.different.append(f"{name}: token {place} is {other}, the target alone says {one} (margin {margin})")

    @property
    def same(self) -> bool:
        """No answer differs outside near-ties."""
        return not self.different

    def __str__(self) -> str:
        answers = self.identical + self.ties + len(self.different)
        ties = f", {self.ties} part at a near-tie" if self.ties else ""
        wrong = f", {len(self.different)} DIFFER" if self.different else ""
        return f"{self.identical} of {answers} answers identical{ties}{wrong} ({self.tokens} tokens)"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two ends; None if they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "the end"
