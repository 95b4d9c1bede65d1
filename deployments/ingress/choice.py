"""One choice of an answer as its deltas arrive: text, tool calls, log-probabilities, and where its tokens came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.errors import EngineError
from actors.messages import Alternatives, Delta, Usage
from deployments.ingress.tools.tool_calls import ToolCall, ToolCallReader

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(slots=True)
class Step:
    """What one delta adds to one choice."""

    text: str
    entries: list[tuple[int, Alternatives, str]]
    """Per token with log-probabilities: id, the target's view of it, and the text it released."""
    tokens: list[Json]
    calls: list[ToolCall]
    finish: str | None
    first: bool


@dataclass(slots=True)
class Choice:
    """One choice as its deltas arrive."""

    index: int
    echo: str = ""
    reader: ToolCallReader = field(default_factory=lambda: ToolCallReader(()))
    stop_text: Callable[[str | int], str] | None = None
    """What is shown of the stop string or token that ended the answer; None shows nothing."""
    piece: Callable[[int], bytes] = lambda token: b""
    """The bytes of a token, to show drafts that were rejected."""
    text: str = ""
    entries: list[tuple[int, Alternatives, str]] = field(default_factory=list)
    tokens: list[Json] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    started: bool = False
    finish: str | None = None
    stop: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    logprob: float = 0.0
    offset: int = field(init=False)
    """Where in the text the next token's logprobs entry begins."""

    def __post_init__(self) -> None:
        self.offset = len(self.echo)

    def take(self, delta: Delta, with_tokens: bool) -> Step:
        """Add `delta`. Raises EngineError when generation failed."""
        if delta.finish == "error":
            raise EngineError("generation failed before the answer was complete")
        released, calls = self.reader.push(delta.text)
        text = ("" if self.started else self.echo) + released
        entries = list(zip(delta.tokens, delta.alternatives, delta.texts, strict=False))
        tokens = described(delta, self.piece) if with_tokens else []
        step = Step(text, entries, tokens, calls, delta.finish, not self.started)
        if delta.finish is not None:
            rest, more = self.reader.finish()
            step.text += rest
            if self.stop_text is not None and delta.stop is not None:
                step.text += self.stop_text(delta.stop)
            step.calls += more
            if delta.finish == "stop" and (self.calls or step.calls):
                step.finish = "tool_calls"  # an answer that was cut says so, whatever it called before
            self.usage = delta.usage or Usage()
            self.stop = delta.stop
        self.started = True
        self.finish = step.finish
        self.text += step.text
        self.entries += entries
        self.tokens += step.tokens
        self.calls += step.calls
        self.logprob += sum(alternatives.logprob for _, alternatives, _ in entries)
        return step


def described(delta: Delta, piece: Callable[[int], bytes]) -> list[Json]:
    """Every token of a delta with where it came from, and with the target's view of it when that was asked for.

    A token that stands in the place of rejected drafts names them.
    """
    told: list[Json] = [
        {"id": token, "text": text, "origin": origin}
        for token, text, origin in zip(delta.tokens, delta.texts, delta.origins, strict=False)
    ]
    for token, margin in zip(told, delta.margins, strict=False):
        token["margin"] = finite(margin)
    for token, own in zip(told, delta.alternatives, strict=False):
        token["logprob"] = finite(own.logprob)
        token["top"] = [[other, finite(score)] for other, score in own.top]
    for token, drafts in zip(told, delta.rejected, strict=False):
        if drafts:
            token["rejected"] = [{"id": draft, "text": piece(draft).decode("utf-8", "replace")} for draft in drafts]
    return told


def finite(value: float) -> float:
    """`value` as JSON can say it."""
    return max(LOWEST_LOGPROB, min(value, -LOWEST_LOGPROB))
