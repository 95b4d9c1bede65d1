"""From what a Python caller says, prompts and keywords, to requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from actors.errors import InvalidSettingError, PromptError
from actors.messages import GenerationRequest
from actors.settings import SamplingSettings, problems

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text, token ids, or the messages of a conversation."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What all items of a call have in common, checked once."""

    sampling: Mapping[str, Any]
    """Fields of SamplingSettings; without `seed`, every request draws its own."""
    timeout_s: float | None = None
    priority: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RequestSettings:
        """From keywords. Raises InvalidSettingError for settings out of range or unknown."""
        settings = dict(given)
        timeout_s, priority = settings.pop("timeout_s", None), settings.pop("priority", 0)
        for name, form in (("stop", str), ("stop_token_ids", int)):
            if isinstance(settings.get(name), form):
                settings[name] = (settings[name],)
        try:
            SamplingSettings(**settings)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            param = str(first["loc"][0]) if first["loc"] else None
            message = problems(error, SamplingSettings().model_dump(), "sampling")[0]
            raise InvalidSettingError(message, param) from error
        return cls(settings, timeout_s, priority)

    def request(self, prompt: Prompt) -> GenerationRequest:
        """A request without a name. Raises PromptError for a prompt that no server could be sent."""
        text, tokens, messages = _checked(prompt)
        sampling = SamplingSettings(**{"seed": secrets.randbits(63), **self.sampling})
        return GenerationRequest("", sampling, text, tokens, messages, timeout_s=self.timeout_s, priority=self.priority)


def request_for(prompt: Prompt, given: Mapping[str, Any]) -> GenerationRequest:
    """A request without a name. Raises InvalidSettingError for settings out of range or unknown, and PromptError."""
    return RequestSettings.of(given).request(prompt)


def _checked(prompt: Prompt) -> tuple[str | None, tuple[int, ...] | None, tuple[dict[str, object], ...] | None]:
    """The prompt as text, token ids or messages; two of the three are None."""
    if isinstance(prompt, str):
        check_json(prompt)
        return prompt, None, None
    if prompt and all(isinstance(item, Mapping) for item in prompt):
        messages = tuple(dict(item) for item in prompt if isinstance(item, Mapping))
        check_json(messages)
        return None, None, messages
    if all(isinstance(item, int) for item in prompt):
        return None, tuple(item for item in prompt if isinstance(item, int)), None
    raise PromptError("a prompt is text, a list of token ids, or a list of messages", "prompt")


def check_json(value: object) -> None:
    """Raises PromptError for what JSON in UTF-8 cannot say: half a surrogate pair, NaN, and what is no JSON at all."""
    try:
        if isinstance(value, str):
            value.encode()
        else:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt holds half a surrogate pair (U+{ord(error.object[error.start]):04X}), which is no character",
            "prompt",
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise PromptError(f"the prompt cannot be sent as JSON: {error}", "prompt") from error


def named(request: GenerationRequest) -> GenerationRequest:
    """With a name of its own: every try is a new sequence."""
    return GenerationRequest(
        f"batch-{secrets.token_hex(12)}",
        request.sampling,
        request.text,
        request.tokens,
        request.messages,
        timeout_s=request.timeout_s,
        priority=request.priority,
    )


def asked_of(request: GenerationRequest) -> list[object]:
    """What decides an answer, as a journal compares it: a seed that was drawn for the item does not count."""
    sampling = request.sampling.model_dump(mode="json", exclude={"seed"})
    return [request.text, request.tokens, request.messages, sampling]
