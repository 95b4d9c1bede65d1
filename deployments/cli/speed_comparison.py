"""Measures streamed answers as a client sees them, and compares plain decoding with speculation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.messages import Delta
from actors.text.answer_comparison import Comparison, Reference
from cluster.observability.quantiles import quantile
from deployments.client.timing import Timing


@dataclass(slots=True)
class Summary:
    """Many answers of one way of decoding."""

    answers: list[Timing] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """Median time to first token."""
        return quantile([answer.first for answer in self.answers], 0.5, empty=0.0)

    def gap_s(self, q: float) -> float:
        """Quantile of the inter-token latency over all tokens."""
        return quantile([gap for answer in self.answers for gap in answer.gaps], q, empty=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the time that answers took, one at a time."""
        return sum(len(a.tokens) for a in self.answers) / max(sum(a.total for a in self.answers), 1e-9)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target pass."""
        passes = sum(answer.usage.passes for answer in self.answers)
        return sum(answer.usage.completion_tokens for answer in self.answers) / passes if passes else 0.0


def measure(client: Any, prompt: Any, show: Callable[[Delta], None], **sampling: Any) -> Timing:
    """Stream one answer and note when its tokens came."""
    timing = Timing()
    started = time.perf_counter()
    for delta in client.stream(prompt, margins=True, **sampling):
        timing.take(delta, time.perf_counter() - started)
        show(delta)
    return timing


def compare(reference: Sequence[Timing], other: Sequence[Timing]) -> Comparison:
    """Token for token, near-ties counted; see actors.text.answer_comparison."""
    found = Comparison()
    for number, (a, b) in enumerate(zip(reference, other, strict=True), 1):
        found.add(f"answer {number}", Reference(a.tokens, a.margins), b.tokens)
    return found
