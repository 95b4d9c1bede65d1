"""A Service at the other end of HTTP: what a client needs to treat a URL and a Serve handle alike."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from actors import errors
from actors.errors import ConfigError, EngineError, InvalidSettingError, OutriderError, RequestError, UnavailableError
from actors.messages import Alternatives, Delta, GenerationRequest, Usage
from deployments.client.http_connection import connection, header_value, server_root
from deployments.client.results import usage_from

CONNECT_LIMIT_S = 10.0
RETRY_S = 0.2


class HttpService:
    """Generates through the `/v1` routes of an Outrider server.

    url: the server's root, with or without `/v1`. limit_s bounds the wait for the next piece of an answer, and for a
    whole one; it should not be below the server's orchestrator.settings.request_timeout_s. Raises ConfigError for an
    address or a key that cannot be used.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        limit_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = server_root(url)
        self._key = header_value(key) if key else None
        self._limit_s = limit_s
        self._timeout = httpx.Timeout(limit_s, connect=CONNECT_LIMIT_S, pool=None)
        self._transport = transport
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    @property
    def _http(self) -> httpx.AsyncClient:
        """Connections belong to an event loop: each loop has its own."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = connection(
                self.url,
                self._key,
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                transport=self._transport,
            )
        return self._clients[loop]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of one answer. Raises the errors of actors/errors.py; UnavailableError when nothing answers."""
        try:
            async with self._http.stream("POST", _route(request), json=_body(request)) as response:
                if response.status_code != 200:
                    raise error_from(response.status_code, await response.aread(), response.headers)
                held = _Held()
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for delta in held.take(json.loads(line[6:])):
                            yield delta
                if not held.ended:
                    raise UnavailableError("the connection ended in the middle of an answer")
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error

    async def answer(self, request: GenerationRequest) -> Delta:
        """The whole answer at once, which costs the server less than its steps. Raises like `generate`."""
        body = _body(request) | {"stream": False, "stream_options": None}
        try:
            response = await self._http.post(_route(request), json=body, timeout=self._patience(request))
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise error_from(response.status_code, response.content, response.headers)
        try:
            return _whole(response.json())
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{self.url} sent something that is no answer of Outrider's") from error

    def _patience(self, request: GenerationRequest) -> httpx.Timeout:
        """A whole answer is waited for a little longer than the server's own deadline lets it take."""
        limit_s = self._limit_s if request.timeout_s is None else request.timeout_s
        return httpx.Timeout(limit_s + CONNECT_LIMIT_S, connect=CONNECT_LIMIT_S, pool=None)

    async def status(self) -> dict[str, object]:
        """The server's /status. Raises UnavailableError."""
        status: dict[str, object] = (await self._get("/status")).json()
        return status

    async def ready(self) -> bool:
        """Whether both tiers can serve."""
        try:
            return (await self._get("/ready")).status_code == 200
        except UnavailableError:
            return False

    async def close(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._http.get(path)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error


class _Held:
    """Puts chunks together to deltas; the last one waits for the usage that follows it."""

    def __init__(self) -> None:
        self.ended = False
        self._finish: Any = None
        self._stop: Any = None
        self._usage = Usage()

    def take(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        if "error" in chunk:
            raise error_from(500, json.dumps(chunk).encode(), httpx.Headers())
        for choice in chunk.get("choices", []):
            told = choice.get("speculation", {})
            tokens = told.get("tokens", [])
            if tokens:
                yield _delta(tokens)
            if choice.get("finish_reason"):
                self._finish = "length" if choice["finish_reason"] == "length" else "stop"
                self._stop = choice.get("stop_reason")
                self._usage = Usage(passes=told.get("passes", 0))
        if chunk.get("usage"):
            self.ended = True
            yield Delta(finish=self._finish, stop=self._stop, usage=usage_from(chunk["usage"], self._usage.passes))


def error_from(status: int, body: bytes, headers: httpx.Headers) -> OutriderError:
    """The typed error that an error response stands for."""
    told = None
    try:
        told = json.loads(body)["error"]
        message, param, code = str(told["message"]), told.get("param"), told.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = f"HTTP {status}: {body[:200].decode(errors='replace')}", None, None
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)]
    exact = [kind for kind in kinds if code is not None and kind.code == code]
    # A server error that is not told in our form comes from the proxy: the replica behind it went.
    fallback = {429: errors.OverloadedError, 503: UnavailableError, 504: errors.DeadlineError, 500: EngineError}
    if told is None and status in (500, 502):
        fallback[status] = UnavailableError
    kind = exact[0] if exact else fallback.get(status, RequestError if 400 <= status < 500 else EngineError)
    error: OutriderError = kind(message, param)
    if headers.get("retry-after", "").isdecimal():
        error.retry_after = float(headers["retry-after"])  # type: ignore[attr-defined]  # of the retriable kinds
    return error


def _route(request: GenerationRequest) -> str:
    return "/v1/completions" if request.messages is None else "/v1/chat/completions"


def _whole(told: dict[str, Any]) -> Delta:
    """A complete response as one step."""
    choice = told["choices"][0]
    report = choice["speculation"]
    return replace(
        _delta(report["tokens"]),
        finish="length" if choice["finish_reason"] == "length" else "stop",
        stop=choice["stop_reason"],
        usage=usage_from(told["usage"], report["passes"]),
    )


def _body(request: GenerationRequest) -> dict[str, Any]:
    if request.committed:
        raise RequestError("an answer cannot be resumed over HTTP")
    sampling = request.sampling.model_dump(mode="json", exclude_unset=True)
    for name in ("margins", "speculation"):  # said below
        sampling.pop(name, None)
    for name in ("grammar", "prediction", "bad_words"):
        if sampling.pop(name, None):
            raise InvalidSettingError(f"{name} cannot be sent over HTTP as tokens; connect through Ray", name)
    logprobs = sampling.pop("logprobs", None)
    body: dict[str, Any] = {
        **sampling,
        "max_tokens": request.sampling.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": request.sampling.speculation, "tokens": True},
        "priority": request.priority,
    }
    if request.timeout_s is not None:
        body["timeout_s"] = request.timeout_s
    if request.messages is not None:
        scores = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        return {**body, **scores, "messages": list(request.messages), "tools": list(request.tools or ()) or None}
    prompt = request.text if request.text is not None else list(request.tokens or ())
    return {**body, "prompt": prompt, "logprobs": logprobs}


def _delta(tokens: list[dict[str, Any]]) -> Delta:
    scored = [token for token in tokens if "logprob" in token]
    return Delta(
        tokens=tuple(token["id"] for token in tokens),
        texts=tuple(token["text"] for token in tokens),
        origins=tuple(token["origin"] for token in tokens),
        alternatives=tuple(
            Alternatives(token["logprob"], tuple((other, score) for other, score in token["top"])) for token in scored
        ),
        margins=tuple(token["margin"] for token in tokens if "margin" in token),
        rejected=tuple(tuple(draft["id"] for draft in token.get("rejected", ())) for token in tokens),
    )


def check_ray_address(address: str, patience_s: float = 0.0) -> None:
    """Raises ConfigError where HOST:PORT is no Ray cluster's: Ray itself would try for a quarter of an hour.

    patience_s: a cluster that is starting is given so long to listen.
    """
    if address in ("auto", "local") or "://" in address:
        return
    deadline = time.monotonic() + patience_s
    while True:
        try:
            httpx.get(f"http://{address}/", timeout=CONNECT_LIMIT_S, trust_env=False)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{address} cannot be reached: {error}") from error
            time.sleep(RETRY_S)
            continue
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{address!r} is neither a URL (http://...) nor a Ray address (auto, HOST:PORT)"
            ) from error
        except httpx.TransportError:  # it listens, and does not speak HTTP/1: Ray may say what it is
            return
        raise ConfigError(f"{address} speaks HTTP: say http://{address}")
