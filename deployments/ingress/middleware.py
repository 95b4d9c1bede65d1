"""The first and last thing that touches a request: its id, and the reading of its body within bounds."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.datastructures import MutableHeaders, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import InvalidSettingError, RequestError
from deployments.ingress.error_responses import BodyTooLargeError, MediaTypeError, SlowBodyError
from deployments.ingress.packed_body import unpacker
from deployments.ingress.request_body import MalformedError

access_log = logging.getLogger("outrider.access")

BODY_LIMIT_S = 60.0
UPLOAD_LIMIT_S = 900.0
_HEADER = "x-request-id"
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Gives every request an id, the client's own if it sent a sane one, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER.encode()), "")
        id_ = sent if _SANE_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = id_

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = id_
            await send(message)

        await self._app(scope, receive, stamped)


class AccessLogMiddleware:
    """One line of JSON per request: when, who, what, how it ended and how long it took. No key, no prompt."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock()
        told: dict[str, Any] = {"status": 499, "bytes": 0}  # 499 stands if the client is gone before any answer

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
                told["id"] = MutableHeaders(scope=message).get(_HEADER, "")
            elif message["type"] == "http.response.body":
                told["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            tenant = scope.get("state", {}).get("tenant")
            line = {
                "method": scope["method"],
                "path": scope["path"],
                **told,
                "seconds": round(self._clock() - started, 4),
                "tenant": tenant.name if tenant is not None else None,
            }
            access_log.info("%s", json.dumps(line))


async def read_body(request: Request, limit: int, limit_s: float = BODY_LIMIT_S) -> bytes:
    """The JSON body.

    Raises MediaTypeError if it is declared as something else, BodyTooLargeError past `limit` bytes, SlowBodyError when
    it has not come within `limit_s`.
    """
    declared = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if declared != "application/json" and not declared.endswith("+json"):
        raise MediaTypeError(f"the body must be sent as application/json, not {declared}")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    received = bytearray()
    async for part in _bounded(request, limit, limit_s):
        received += part
    return bytes(received)


async def read_upload(request: Request, limit: int) -> tuple[dict[str, str], UploadFile]:
    """The fields and the one file of a multipart form; the caller closes the file.

    Raises MediaTypeError, MalformedError, BodyTooLargeError past `limit`, InvalidSettingError without a file.
    """
    declared = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if declared != "multipart/form-data":
        raise MediaTypeError(f"a file must be sent as multipart/form-data, not {declared or 'without a type'}")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    try:
        form = await MultiPartParser(
            request.headers, _bounded(request, limit, UPLOAD_LIMIT_S), max_files=1, max_fields=16
        ).parse()
    except MultiPartException as error:
        raise MalformedError(error.message) from error
    content = form.get("file")
    if not isinstance(content, UploadFile):
        await form.close()
        raise InvalidSettingError("send a file, with a name, in the field 'file'", "file")
    return {name: value for name, value in form.items() if isinstance(value, str)}, content


async def _bounded(request: Request, limit: int, limit_s: float) -> AsyncGenerator[bytes, None]:
    """The body's parts, unpacked, as long as they are few enough and in time."""
    packed = unpacker(request.headers.get("content-encoding", ""))
    arrived, received, parts = 0, 0, request.stream()
    deadline = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                part = await anext(parts, None)
        except TimeoutError as error:
            raise SlowBodyError(f"the body did not arrive within {limit_s:g} s") from error
        if part is None:
            break
        arrived += len(part)
        if packed is not None and part:
            part = packed.feed(part, limit - received)
        received += len(part)
        if received > limit or arrived > limit:
            raise _too_large(limit)
        yield part
    if not arrived and request.headers.get("content-length", "0") != "0" and "upgrade" in request.headers:
        raise _lost(request.headers["upgrade"])
    if packed is not None and arrived:
        packed.finish()


def _lost(protocol: str) -> RequestError:
    """The HTTP server (uvicorn with httptools) drops the body of a request that offers to change the protocol."""
    error = MalformedError(
        f"the body was lost, because the request offers an upgrade to {protocol}: send it without the header 'Upgrade' "
        "(in Java: HttpClient.Version.HTTP_1_1; curl: --http1.1)"
    )
    error.code = "upgrade_not_supported"
    return error


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is longer than {limit} bytes")
