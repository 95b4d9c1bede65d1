"""From what a Python caller says, prompts and keywords, to requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from actors.errors import InvalidSettingError
from actors.messages import GenerationRequest
from actors.settings import SamplingSettings, problems

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text, token ids, or the messages of a conversation."""


def request_for(prompt: Prompt, given: Mapping[str, Any]) -> GenerationRequest:
    """A request without a name. Raises InvalidSettingError for settings out of range or unknown."""
    settings = dict(given)
    timeout_s, priority = settings.pop("timeout_s", None), settings.pop("priority", 0)
    for name, form in (("stop", str), ("stop_token_ids", int)):
        if isinstance(settings.get(name), form):
            settings[name] = (settings[name],)
    settings.setdefault("seed", secrets.randbits(63))
    try:
        sampling = SamplingSettings(**settings)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise InvalidSettingError(problems(error, SamplingSettings().model_dump(), "sampling")[0], param) from error
    text, tokens, messages = None, None, None
    if isinstance(prompt, str):
        text = prompt
    elif all(isinstance(item, Mapping) for item in prompt) and prompt:
        messages = tuple(dict(item) for item in prompt if isinstance(item, Mapping))
    elif all(isinstance(item, int) for item in prompt):
        tokens = tuple(item for item in prompt if isinstance(item, int))
    else:
        raise InvalidSettingError("a prompt is text, a list of token ids, or a list of messages", "prompt")
    return GenerationRequest("", sampling, text, tokens, messages, timeout_s=timeout_s, priority=priority)


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
