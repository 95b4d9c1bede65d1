"""What each HTTP route does. Knows no Ray; what generates, and who may ask, is handed in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from actors.errors import InvalidSettingError, PromptError, PromptTooLongError, UnavailableError
from actors.messages import Delta, GenerationRequest
from actors.orchestrator.admission import Admission
from deployments.ingress.answer_events import events
from deployments.ingress.auth import Tenant
from deployments.ingress.choice import Choice
from deployments.ingress.grammars.grammar_check import GrammarCheck
from deployments.ingress.grammars.structured_output import forced_tools, tool_grammar
from deployments.ingress.middleware import BODY_LIMIT_S, read_body
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.request_body import Body, parse, validated
from deployments.ingress.responses import Answer, ChatAnswer, CompletionAnswer, Options
from deployments.ingress.schema import ChatRequest, Common, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deployments.ingress.service import Codec, Served, Service
from deployments.ingress.streams import EventStream, merged, while_connected, with_pauses
from deployments.ingress.tools.tool_calls import ToolCallReader
from deployments.ingress.translate import chat_requests, check_messages, check_model, completion_requests, grammar_param
from deployments.ingress.waves import LONGEST_S, Waves

BATCH_PRIORITY = -10
"""Of requests of a batch that name none: what people wait for goes first."""
MOST_TOOLS_TRIED = 64
"""When one of many tools cannot be followed, so many are tried one by one to say which."""
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
    at_once: so many answers of one request are generated at a time, the others after them; None generates all.
    comment_s: a stream in which nothing was said for so long says so in a comment.
    guards_browsers: refuse pages of other sites; is_loopback: and names that are not this machine's.
    """

    body_bytes: int = 4 * 1024 * 1024
    body_s: float = BODY_LIMIT_S
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False
    at_once: int | None = None
    comment_s: float = 5.0
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
        choices = [
            Choice(i, piece=self.codec.piece, echo=echoes[i // candidates], stop_text=self._stop_text(body))
            for i in range(len(asked))
        ]
        options = _options(body, candidates, kept=body.n)
        return CompletionAnswer(id_, int(self.clock()), self.served, self.codec, choices, options), asked

    async def _conversation(self, body: ChatRequest) -> tuple[Answer, list[GenerationRequest]]:
        id_ = f"chatcmpl-{secrets.token_hex(16)}"
        asked = await asyncio.to_thread(chat_requests, body, id_, self.codec, self.served)
        await self._check_grammar(body, asked[0])
        names = [tool["function"]["name"] for tool in body.tools]
        if body.tool_choice == "none" or (asked[0].sampling.grammar and grammar_param(body) != "tools"):
            names = []  # what a grammar of its own shapes is the answer, whatever it looks like
        reader = partial(ToolCallReader, names, body.parallel_tool_calls)
        choices = [
            Choice(i, piece=self.codec.piece, reader=reader(), stop_text=self._stop_text(body))
            for i in range(len(asked))
        ]
        return ChatAnswer(id_, int(self.clock()), self.served, self.codec, choices, _options(body, body.n)), asked

    async def _check_grammar(self, body: Common, request: GenerationRequest) -> None:
        """All choices of a request share one grammar. Raises InvalidSettingError that names the tool at fault."""
        if request.sampling.grammar is None:
            return
        param = grammar_param(body)
        try:
            await self.grammars.check(request.sampling.grammar, param)
        except InvalidSettingError as error:
            if isinstance(body, ChatRequest) and param == "tools":
                await self._name_tool(body)
            raise error

    async def _name_tool(self, body: ChatRequest) -> None:
        """Raises InvalidSettingError for the first tool whose parameters by themselves cannot be followed."""
        for function in forced_tools(body.tools, body.tool_choice)[:MOST_TOOLS_TRIED]:
            tool = {"type": "function", "function": function}
            alone = tool_grammar([tool], "required", self.served.closed_schemas)
            assert alone is not None
            try:
                await self.grammars.check(alone, "tools")
            except InvalidSettingError as error:
                raise InvalidSettingError(f"tool {function['name']!r}: {error.message}", "tools") from error

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
                tokens = await asyncio.to_thread(
                    self.codec.encode_chat, messages, body.tools or None, self.limits.body_bytes
                )
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
        return JSONResponse({"prompt": await asyncio.to_thread(self.codec.decode, body.tokens, True)})

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
        return [prompt if isinstance(prompt, str) else self.codec.decode(prompt, True) for prompt in body.prompt]

    def _stop_text(self, body: Common) -> Callable[[str | int], str] | None:
        """How an answer's end is shown: not at all, unless asked for."""
        if not body.include_stop_str_in_output:
            return None
        special = not body.skip_special_tokens
        return lambda stop: stop if isinstance(stop, str) else self.codec.decode((stop,), special)

    async def _respond(
        self, request: Request, body: Common, answer: Answer, asked: list[GenerationRequest]
    ) -> Response:
        deltas = self._deltas(request.state.tenant, body, asked)
        if body.stream:
            return await self._stream(request, answer, deltas, asked)
        await while_connected(request, self._collect(answer, deltas))
        return JSONResponse(answer.whole())

    async def _deltas(self, tenant: Tenant, body: Common, asked: list[GenerationRequest]) -> Deltas:
        """What the service says, once the request's turn has come; the turn ends with the answer."""
        spent, at_once = 0, self.limits.at_once
        weight = len(asked) if at_once is None else min(len(asked), at_once)
        async with self.gate.admit(tenant, body.priority, weight, body.timeout_s):
            waves = Waves(self.service, LONGEST_S if body.timeout_s is None else body.timeout_s)
            streams = [waves.generate(replace(one, owner=tenant.name)) for one in asked]
            deltas = merged(streams, at_once)
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

    async def _stream(
        self, request: Request, answer: Answer, deltas: Deltas, asked: list[GenerationRequest]
    ) -> Response:
        """The first delta is awaited before the status line goes out, so that a refusal is a refusal.

        Where that takes long, comments keep the connection in use; what would be refused later is then found out here.
        """
        source = with_pauses(deltas, self.limits.comment_s)
        try:
            first = await while_connected(request, anext(source))
            if first is None:
                await self._check_prompts(asked)
        except BaseException:
            await source.aclose()
            raise
        return EventStream(events(answer, first, source))

    async def _check_prompts(self, asked: list[GenerationRequest]) -> None:
        """Raises RequestError for what the orchestrator would refuse when its turn has come."""
        admission = Admission(self.codec, self.served.ids, self.served.context)
        distinct = (
            asked[:1] if asked[0].messages is not None else {(one.text, one.tokens): one for one in asked}.values()
        )
        for one in distinct:
            await admission.admit(one)


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
