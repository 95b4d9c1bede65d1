"""An opening as a vLLM request, and back again in vLLM's worker.

What vLLM schedules by (lengths, stops, log-probabilities) travels in its own parameters. What decides tokens travels
in `extra_args`, which vLLM hands to the worker as it is, because there the worker's own sampler decides
(internals.py). Pure: imports no vLLM, so both directions are tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.errors import InvalidSettingError
from actors.messages import OpenSequence
from actors.settings import SamplingSettings

PAYLOAD = "outrider"


@dataclass(frozen=True, slots=True)
class Request:
    """What vLLM is asked: token ids to start from, and keyword arguments of its SamplingParams."""

    name: str
    tokens: tuple[int, ...]
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the worker must know of a request to decide its tokens."""

    sequence: str
    sampling: SamplingSettings
    seed: int
    prompt: int
    """Tokens of vLLM's prompt that are the request's own; what follows them was committed by an earlier replica."""


def room(opening: OpenSequence, context: int) -> int:
    """Tokens that the answer may still have; a resumed one may have none left."""
    tokens = len(opening.prompt) + len(opening.committed)
    return min(opening.sampling.max_tokens - len(opening.committed), context - tokens)


def request(opening: OpenSequence, eos: Sequence[int], context: int) -> Request:
    """A request whose tokens the worker's sampler decides, whatever the settings are. There must be room for one."""
    sampling = opening.sampling
    payload = [
        opening.sequence,
        sampling.model_dump_json(exclude={"prediction", "stop"}),
        opening.seed,
        len(opening.prompt),
    ]
    params = {"temperature": 0.0, "extra_args": {PAYLOAD: payload}}
    return _with_limits(opening, eos, context, params)


def plain_request(opening: OpenSequence, eos: Sequence[int], context: int) -> Request:
    """A request that vLLM decides by itself: no speculation, and noise of its own.

    Raises InvalidSettingError for what only the worker's sampler can do.
    """
    sampling = opening.sampling
    for name, used in {"margins": sampling.margins, "response_format": sampling.grammar is not None}.items():
        if used:
            raise InvalidSettingError(f"{name} is not supported while vLLM decodes without Outrider's sampler", name)
    if sampling.bad_words:
        raise InvalidSettingError("bad_words is not supported while vLLM decodes without Outrider's sampler")
    params: dict[str, Any] = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": max(sampling.top_k, 0),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) if sampling.allowed_token_ids is not None else None,
        "min_tokens": max(sampling.min_tokens - len(opening.committed), 0),
        "seed": opening.seed,
    }
    return _with_limits(opening, eos, context, params)


def facts(extra_args: dict[str, Any] | None) -> Facts | None:
    """What the worker reads; None for a request that did not come from `request`."""
    payload = (extra_args or {}).get(PAYLOAD)
    if payload is None:
        return None
    sequence, sampling, seed, prompt = payload
    return Facts(sequence, SamplingSettings.model_validate_json(sampling), seed, prompt)


def _with_limits(opening: OpenSequence, eos: Sequence[int], context: int, params: dict[str, Any]) -> Request:
    sampling = opening.sampling
    tokens = (*opening.prompt, *opening.committed)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    params |= {
        "max_tokens": room(opening, context),
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,  # the ends of text are among the stops
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }
    return Request(opening.sequence, tokens, params)
