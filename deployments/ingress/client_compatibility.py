"""What older and plainer clients need of HTTP itself: HEAD, and answers to HTTP/1.0. Knows no route."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """HEAD is GET without the body (RFC 9110, section 9.3.2), on every route that has a GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        scope.setdefault("state", {})  # shared with the copy; the server must go on to know that it was HEAD
        await self._app({**scope, "method": "GET"}, receive, without_body)


class Http10Middleware:
    """Answers to HTTP/1.0 come in one piece of stated length.

    A client of that version does not know chunks (RFC 9112, section 7.1), which the server would send where no length
    is stated. So streams are collected; they are as long as an answer at most.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("http_version") != "1.0":
            await self._app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = bytearray()

        async def collected(message: Message) -> None:
            if message["type"] == "http.response.start" and "content-length" not in MutableHeaders(scope=message):
                start.update(message)
            elif message["type"] == "http.response.body" and start:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    MutableHeaders(scope=start)["content-length"] = str(len(body))
                    await send(start)
                    await send({"type": "http.response.body", "body": bytes(body)})
            else:
                await send(message)

        await self._app(scope, receive, collected)
