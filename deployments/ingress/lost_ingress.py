"""The end of a response whose ingress replica was lost: an error that a client understands, not a broken connection.

Runs around Ray Serve's own HTTP proxy, which stops in the middle of a chunk when the replica behind it dies, and
answers a bare 500 when the response had not begun. Serve finds it through its environment (serve_environment.py).

Knows nothing of models or answers: only whether a response that began has ended. With HAProxy there is no Python
process between client and replica that could say anything.
"""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import IngressLostError
from deployments.ingress.error_responses import error_body, error_response


def middlewares() -> list[Middleware]:
    """What Ray Serve's callback is to return."""
    return [Middleware(LostIngressMiddleware)]


class LostIngressMiddleware:
    """Ends what the application inside leaves without an end, unless the client went first.

    A stream of events gets an error event; a response that had not begun is a 503 with Retry-After. A response of
    another kind that breaks off stays broken off: its client must not take it for whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _Response(send)
        try:
            await self._app(scope, response.watching(receive), response.send)
        finally:  # also when it raised: that goes on to the server, which logs it
            if response.abandoned:
                await self._end(response, scope, receive, send)

    async def _end(self, response: _Response, scope: Scope, receive: Receive, send: Send) -> None:
        lost = IngressLostError("the server process that answered this request was lost; asking again is safe")
        if not response.started:
            answer = error_response(lost)
            if (request_id := Headers(scope=scope).get("x-request-id")) is not None:  # Serve gave it one on the way in
                answer.headers["x-request-id"] = request_id
            await answer(scope, receive, send)
        elif response.events:
            event = f"data: {json.dumps(error_body(lost), separators=(',', ':'))}\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": event.encode()})


class _Response:
    """How far a response has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._ended = False
        self._client_gone = False
        self.started = False
        self.events = False

    @property
    def abandoned(self) -> bool:
        """It has no end, and somebody is waiting for it."""
        return not self._ended and not self._client_gone

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.events = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    def watching(self, receive: Receive) -> Receive:
        """`receive`, which also learns that the client has gone."""

        async def watched() -> Message:
            message = await receive()
            self._client_gone |= message["type"] == "http.disconnect"
            return message

        return watched
