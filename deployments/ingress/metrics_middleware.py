"""Counts HTTP responses by route and class of status, at the moment they begin."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors import telemetry
from actors.telemetry import Recorder

OTHER = "other"
"""The route of requests that match none: paths are clients' words, and never become a label."""


class MetricsMiddleware:
    """Pure ASGI, so that streams pass through as they are."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", OTHER)
                status = f"{message['status'] // 100}xx"
                self._recorder.add(telemetry.HTTP_RESPONSES, 1, route=route, status=status)
            await send(message)

        await self._app(scope, receive, counted)
