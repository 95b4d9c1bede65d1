"""What each HTTP route does. Knows no Ray; what generates, and who may ask, is handed in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from actors.errors import OutriderError, PromptError, PromptTooLongError, UnavailableError
from actors.messages import Delta, GenerationRequest
from deployments.ingress import error_responses
from deployments.ingress.auth import Tenant
from deployments.ingress.choice import Choice
from deployments.ingress.grammar_check import GrammarCheck
from deployments.ingress.middleware import BODY_LIMIT_S, read_body
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.request_body import Body, parse, validated
from deployments.ingress.responses import Answer, ChatAnswer, CompletionAnswer, Options
from deployments.ingress.schema import ChatRequest, Common, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deployments.ingress.service import Codec, Served, Service
from deployments.ingress.streams import EventStream, merged, while_connected
from deployments.ingress.tool_calls import ToolCallReader
from deployments.ingress.translate import chat_requests, check_messages, check_model, completion_requests, grammar_param

BATCH_PRIORITY = -10
"""Of requests of a batch that name none: what people wait for goes first."""
DONE = b"data: [DONE]\n\n"
PAGE_POLICY = (
    "default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)
"""The page is one file and talks to its own server only."""
B = TypeVar("B", bound=Body)
Deltas = AsyncGenerator[tuple[int, Delta], None]
"""Steps of all choices, with the choice's index."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What the door lets in.

    body_bytes: the longest body; more is refused unread. body_s: within so many seconds it must have come.
    cors_origins: pages of these origins may call from browsers.
    access_log: one line of JSON per request, without keys and prompts.
    guards_browsers: refuse pages of other sites; is_loopback: and names that are not this machine's.
    """

    body_bytes: int = 4 * 1024 * 1024
    body_s: float = BODY_LIMIT_S
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False
    guards_browsers: bool = False
    is_loopback: bool = False


@dataclass(slots=True)
class Routes:
    """What the routes share."""

    service: Service
    codec: Codec
    served: Served
    limits: HttpLimits
    gate: RequestGate
    clock: Callable[[], float] = time.time
    grammars: GrammarCheck = field(default_factory=GrammarCheck)

    async def identify(self, request: Request) -> None:
        """Finds out who asks. Raises ForbiddenError."""
        request.state.tenant = self.gate.identify(request.headers.get("authorization"))

    async def read(self, request: Request, model: type[B]) -> B:
        """The checked body. Raises RequestError."""
        return parse(model, await read_body(request, self.limits.body_bytes, self.limits.body_s))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self.read(request, CompletionRequest)
        return await self._respond(request, body, *await self._completion(body))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self.read(request, ChatRequest)
        with _naming_messages():
            return await self._respond(request, body, *await self._conversation(body))

    async def answer(self, route: str, given: dict[str, object], owner: str) -> tuple[str, dict[str, object]]:
        """One request of a batch, for the owner of a key: the answer's id, and the answer. Raises OutriderError."""
        given = {"priority": BATCH_PRIORITY, **given, "stream": False}
        tenant = self.gate.tenant(owner)
        if route == "/v1/completions":
            body = validated(CompletionRequest, given)
            answer, asked = await self._completion(body)
            await self._collect(answer, self._deltas(tenant, body, asked))
        else:
            talk = validated(ChatRequest, given)
            with _naming_messages():
                answer, asked = await self._conversation(talk)
                await self._collect(answer, self._deltas(tenant, talk, asked))
        return answer.id, answer.whole()

    async def _completion(self, body: CompletionRequest) -> tuple[Answer, list[GenerationRequest]]:
        id_ = f"cmpl-{secrets.token_hex(16)}"
        asked = await asyncio.to_thread(completion_requests, body, id_, self.codec, self.served)
        await self._check_grammar(body, asked[0])
        echoes = await asyncio.to_thread(self._echoes, body) if body.echo else [""] * len(body.prompt)
        candidates = len(asked) // len(body.prompt)
        choices = [Choice(i, piece=self.codec.piece, echo=echoes[i // candidates]) for i in range(len(asked))]
        options = _options(body, candidates, kept=body.n)
        return CompletionAnswer(id_, int(self.clock()), self.served, self.codec, choices, options), asked

    async def _conversation(self, body: ChatRequest) -> tuple[Answer, list[GenerationRequest]]:
        id_ = f"chatcmpl-{secrets.token_hex(16)}"
        asked = await asyncio.to_thread(chat_requests, body, id_, self.codec, self.served)
        await self._check_grammar(body, asked[0])
        names = [] if body.tool_choice == "none" else [tool["function"]["name"] for tool in body.tools]
        choices = [
            Choice(i, piece=self.codec.piece, reader=ToolCallReader(names, body.parallel_tool_calls))
            for i in range(len(asked))
        ]
        return ChatAnswer(id_, int(self.clock()), self.served, self.codec, choices, _options(body, body.n)), asked

    async def _check_grammar(self, body: Common, request: GenerationRequest) -> None:
        """All choices of a request share one grammar."""
        if request.sampling.grammar is not None:
            await self.grammars.check(request.sampling.grammar, grammar_param(body))

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        check_model(name, self.served)
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids of a text or of a conversation."""
        body = await self.read(request, TokenizeRequest)
        check_model(body.model, self.served)
        try:
            if body.messages is not None:
                check_messages(len(body.messages), self.served)
                messages = [message.plain() for message in body.messages]
                tokens = await asyncio.to_thread(self.codec.encode_chat, messages, None, self.limits.body_bytes)
            else:
                text, special = body.prompt or "", body.add_special_tokens
                tokens = await asyncio.to_thread(self.codec.encode, text, self.limits.body_bytes, special)
        except PromptTooLongError as error:
            raise PromptTooLongError(error.message, "prompt" if body.messages is None else "messages") from error
        return JSONResponse({"tokens": list(tokens), "count": len(tokens), "max_model_len": self.served.context})

    async def tokenizer_info(self) -> Response:
        """GET /tokenizer_info: special tokens and chat template, as lm-evaluation-harness asks for them."""
        return JSONResponse(self.codec.describe())

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: text of ids."""
        body = await self.read(request, DetokenizeRequest)
        check_model(body.model, self.served)
        if any(token >= self.codec.vocabulary for token in body.tokens):
            raise PromptError(f"token ids must be below {self.codec.vocabulary}", "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self.codec.decode, body.tokens)})

    async def page(self) -> Response:
        """GET /: the live page."""
        return HTMLResponse(_page(), headers={"content-security-policy": PAGE_POLICY})

    async def health(self) -> Response:
        """GET /health: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: both tiers can serve."""
        if not await self.service.ready():
            raise UnavailableError("a tier has no replica that can serve yet; /status tells which")
        return JSONResponse({"status": "ready"})

    async def status(self) -> Response:
        """GET /status: tiers, load and what the controllers do."""
        return JSONResponse(await self.service.status())

    async def version(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": self.served.version})

    def _model(self) -> dict[str, object]:
        return {
            "id": self.served.model_id,
            "object": "model",
            "created": self.served.created,
            "owned_by": "outrider",
            "max_model_len": self.served.context,
            "rule": self.served.rule,
            "exact": self.served.exact,
            "default_sampling": {"temperature": 1.0, **self.served.sampling},
            **({"vocabulary_fingerprint": self.served.vocabulary} if self.served.vocabulary else {}),
        }

    def _echoes(self, body: CompletionRequest) -> list[str]:
        return [prompt if isinstance(prompt, str) else self.codec.decode(prompt) for prompt in body.prompt]

    async def _respond(
        self, request: Request, body: Common, answer: Answer, asked: list[GenerationRequest]
    ) -> Response:
        deltas = self._deltas(request.state.tenant, body, asked)
        if body.stream:
            return await self._stream(request, answer, deltas)
        await while_connected(request, self._collect(answer, deltas))
        return JSONResponse(answer.whole())

    async def _deltas(self, tenant: Tenant, body: Common, asked: list[GenerationRequest]) -> Deltas:
        """What the service says, once the request's turn has come; the turn ends with the answer."""
        spent = 0
        async with self.gate.admit(tenant, body.priority, len(asked), body.timeout_s):
            owned = [replace(one, owner=tenant.name) for one in asked]
            streams: list[AsyncIterator[Delta]] = [self.service.generate(one) for one in owned]
            deltas = merged(streams)
            try:
                async for index, delta in deltas:
                    spent += len(delta.tokens) + (delta.usage.prompt_tokens if delta.usage else 0)
                    yield index, delta
            finally:
                await deltas.aclose()
                self.gate.settle(tenant, spent)

    async def _collect(self, answer: Answer, deltas: Deltas) -> None:
        try:
            async for index, delta in deltas:
                answer.take(index, delta)
        finally:
            await deltas.aclose()

    async def _stream(self, request: Request, answer: Answer, deltas: Deltas) -> Response:
        """The first delta is awaited before the status line goes out, so that a refusal is a refusal."""
        try:
            first = await while_connected(request, anext(deltas))
        except BaseException:
            await deltas.aclose()
            raise
        return EventStream(_events(answer, first, deltas))


async def _events(answer: Answer, first: tuple[int, Delta], deltas: Deltas) -> AsyncGenerator[bytes, None]:
    try:
        try:
            yield _event(answer.chunks(*first))
            async for index, delta in deltas:
                chunks = answer.chunks(index, delta)
                if chunks:
                    yield _event(chunks)
            yield _event(answer.usage_chunk()) + DONE
        except Exception as error:
            if not isinstance(error, OutriderError):
                error_responses.logger.error("a stream failed", exc_info=error)
            yield _event([error_responses.error_body(error)]) + DONE
    finally:
        await deltas.aclose()


def _event(chunks: list[dict[str, object]]) -> bytes:
    """Chunks of one delta as one write."""
    return b"".join(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks)


@contextlib.contextmanager
def _naming_messages() -> Iterator[None]:
    """What is wrong with the prompt of a conversation is wrong with its messages."""
    try:
        yield
    except PromptError as error:
        raise type(error)(error.message, "messages") from error


def _options(body: Common, per_prompt: int, kept: int | None = None) -> Options:
    return Options(
        logprobs=body.wanted_logprobs(),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        speculation=body.speculation,
        per_prompt=per_prompt,
        kept=kept if kept is not None else per_prompt,
    )


@functools.cache
def _page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
