"""What the Python client returns: one typed result per input, errors included, and its form in a journal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from actors import errors
from actors.errors import OutriderError
from actors.messages import Alternatives, Delta, FinishReason, TokenOrigin, Usage


@dataclass(slots=True)
class Result:
    """The answer to one input, or the error that took its place.

    index: the input's place in the call. texts, origins and logprobs are per token; logprobs only when asked for.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[Alternatives] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    error: OutriderError | None = None

    @property
    def ok(self) -> bool:
        """Whether there is an answer."""
        return self.error is None

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target pass; 0 before any pass."""
        return self.usage.completion_tokens / self.usage.passes if self.usage.passes else 0.0

    def take(self, delta: Delta) -> None:
        """Add a step of the answer."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.texts += delta.texts
        self.origins += delta.origins
        self.logprobs += delta.alternatives
        self.margins += delta.margins
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop
            self.usage = delta.usage or Usage()

    def as_json(self) -> dict[str, Any]:
        """Everything, for a journal or a file."""
        plain = {name: getattr(self, name) for name in ("index", "text", "tokens", "texts", "origins", "margins")}
        error = self.error
        return {
            **plain,
            "finish": self.finish,
            "stop": self.stop,
            "logprobs": [[own.logprob, own.top] for own in self.logprobs],
            "usage": asdict(self.usage),
            "error": None if error is None else [type(error).__name__, error.message, error.param],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """The inverse of `as_json`."""
        told = dict(data)
        told["usage"] = Usage(**told["usage"])
        told["logprobs"] = [Alternatives(own, tuple((t, s) for t, s in top)) for own, top in told["logprobs"]]
        if told["error"] is not None:
            name, message, param = told["error"]
            kind = getattr(errors, name, OutriderError)
            told["error"] = kind(message, param)
        return cls(**told)


def usage_from(told: dict[str, Any], passes: int = 0) -> Usage:
    """OpenAI's usage object, with this project's details, as a Usage."""
    details = told.get("completion_tokens_details") or {}
    accepted = details.get("accepted_draft_tokens", 0)
    return Usage(
        prompt_tokens=told.get("prompt_tokens", 0),
        completion_tokens=told.get("completion_tokens", 0),
        proposed_tokens=accepted + details.get("rejected_draft_tokens", 0),
        accepted_tokens=accepted,
        passes=passes,
        accepted_prediction_tokens=details.get("accepted_prediction_tokens", 0),
        rejected_prediction_tokens=details.get("rejected_prediction_tokens", 0),
    )
