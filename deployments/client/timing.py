"""When the tokens of a streamed answer came, as the client sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.messages import Delta, Usage


@dataclass(slots=True)
class Timing:
    """One streamed answer. Times are in seconds after its request was sent.

    first: when the first token came; total: when the last one did. gaps: per token after the first delta, the time
    since the delta before, shared by the tokens that came together.
    """

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    first: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    def take(self, delta: Delta, at: float) -> None:
        """Add a step of the answer that came `at` seconds after the request."""
        if delta.tokens:
            if not self.tokens:
                self.first = at
            else:
                self.gaps += [(at - self.total) / len(delta.tokens)] * len(delta.tokens)
            self.total = at
        self.tokens += delta.tokens
        self.margins += delta.margins
        if delta.usage is not None:
            self.usage = delta.usage
