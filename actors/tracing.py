"""Traces of requests, as the parts in this folder see them: a part's share of a sequence begins, and ends.

Off by default. Once per sequence and part, never per token or pass: what happens in between is the metrics' business.
"""

from __future__ import annotations

from typing import Protocol


class Tracer(Protocol):
    """Records one span per sequence in one part (ingress, orchestrator, target, draft). Must never raise."""

    def begin(self, sequence: str) -> None:
        """The part takes the sequence. Begun twice, the span starts at the later one."""

    def end(self, sequence: str, **facts: str | int | float) -> None:
        """The part is done with it. Nothing happens for a sequence that is not begun."""


class NoTraces:
    """Tracing switched off."""

    def begin(self, sequence: str) -> None:
        pass

    def end(self, sequence: str, **facts: str | int | float) -> None:
        pass


NO_TRACES = NoTraces()
