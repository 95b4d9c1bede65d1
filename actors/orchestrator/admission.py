"""Admission: turns a request into a sequence, or says in one sentence why it cannot be served."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from actors.errors import InvalidSettingError, PromptError, PromptTooLongError
from actors.messages import GenerationRequest, OpenSequence
from actors.orchestrator.session import Session
from actors.settings import SamplingSettings
from actors.text.codec import TextStream

_LONG_TEXT = 20_000
"""Characters from which tokenising is moved off the event loop, so that a huge prompt does not stop the others."""


class Codec(Protocol):
    """What is needed of actors.text.codec.TextCodec."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that are no text, by how they are written."""

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> tuple[int, ...]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        limit: int | None = None,
    ) -> tuple[int, ...]: ...

    def stream(
        self, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0, special: bool = False
    ) -> TextStream: ...


class Admission:
    """Checks requests against the model: `vocabulary` ids, `context` positions for prompt and answer."""

    def __init__(self, codec: Codec, vocabulary: int, context: int) -> None:
        self._codec = codec
        self._vocabulary = vocabulary
        self._context = context

    async def admit(self, request: GenerationRequest) -> Session:
        """A session for the request. max_tokens beyond the context is clamped; a prompt beyond it is refused.

        Raises PromptError or InvalidSettingError.
        """
        prompt = await self._prompt(request)
        if not prompt:
            raise PromptError("the prompt is empty: send at least one token", "prompt")
        room = self._context - len(prompt)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; this model's context is {self._context}, prompt and answer "
                "together: shorten the prompt",
                "prompt" if request.messages is None else "messages",
            )
        self._check_ids(prompt, "prompt")
        sampling = self._settle(request.sampling, room)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        opening = OpenSequence(request.id, prompt, sampling, seed, request.committed, request.owner)
        text = self._codec.stream(prompt, sampling.stop, sampling.min_tokens, not sampling.skip_special_tokens)
        text.push(request.committed)
        return Session(request, opening, [*prompt, *request.committed], text)

    async def _prompt(self, request: GenerationRequest) -> tuple[int, ...]:
        prompts = [p for p in (request.text, request.tokens, request.messages) if p is not None]
        if len(prompts) != 1:
            raise PromptError("send exactly one of a text, token ids and messages", "prompt")
        if request.tokens is not None:
            return request.tokens
        if request.messages is not None:
            size = sum(len(str(message.get("content", ""))) for message in request.messages)
            arguments = (request.messages, request.tools, self._context)
            if size > _LONG_TEXT:
                return await asyncio.to_thread(self._codec.encode_chat, *arguments)
            return self._codec.encode_chat(*arguments)
        assert request.text is not None  # the only one left
        if len(request.text) > _LONG_TEXT:
            return await asyncio.to_thread(self._codec.encode, request.text, self._context)
        return self._codec.encode(request.text, self._context)

    def _settle(self, sampling: SamplingSettings, room: int) -> SamplingSettings:
        self._check_ids(sampling.logit_bias, "logit_bias")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids([token for word in sampling.bad_words for token in word], "bad_words")
        self._check_ids(sampling.prediction, "prediction")
        if sampling.allowed_token_ids == ():
            raise InvalidSettingError("allowed_token_ids is empty: nothing could be said", "allowed_token_ids")
        ends = self._special_stops(sampling)
        if ends:
            sampling = sampling.model_copy(update={"stop_token_ids": (*sampling.stop_token_ids, *ends)})
        if sampling.max_tokens <= room:
            return sampling
        return sampling.model_copy(update={"max_tokens": room, "min_tokens": min(sampling.min_tokens, room)})

    def _special_stops(self, sampling: SamplingSettings) -> list[int]:
        """Ids of the stop strings that are special tokens: these never appear in a text that leaves them out.

        Raises InvalidSettingError for a stop string with a special token and something else in it.
        """
        if not sampling.skip_special_tokens:
            return []
        special, ids = self._codec.special_tokens, []
        for stop in sampling.stop:
            if stop in special:
                ids.append(special[stop])
                continue
            within = next((token for token in special if token in stop), None)
            if within is not None:
                raise InvalidSettingError(
                    f"stop: {stop!r} never appears in an answer, because {within!r} is a special token and left out of "
                    f"the text; send stop_token_ids: [{special[within]}], or skip_special_tokens: false",
                    "stop",
                )
        return [id_ for id_ in dict.fromkeys(ids) if id_ not in sampling.stop_token_ids]

    def _check_ids(self, tokens: Sequence[int] | Mapping[int, float], param: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocabulary:
                message = f"{param} holds the token id {token}; this model's ids are 0 to {self._vocabulary - 1}"
                kind = PromptError if param == "prompt" else InvalidSettingError
                raise kind(message, param)
