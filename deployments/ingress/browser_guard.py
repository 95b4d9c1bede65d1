"""Keeps pages of other sites away from a server without keys: anybody's browser could reach it otherwise.

A page may send a request anywhere, with a body of any text; and a name that its owner points to 127.0.0.1 makes a
loopback server one of the page's own (DNS rebinding). Browsers say where a request comes from (Origin,
Sec-Fetch-Site) and what it was addressed to (Host); other clients send no Origin and are not concerned.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.errors import RequestError
from deployments.ingress.error_responses import error_response


class ForeignPageError(RequestError):
    """A browser's request for a page of another site, or to a name that is not this server's."""

    status = 403
    code = "foreign_page"


class BrowserGuardMiddleware:
    """Refuses such requests with 403, before a byte of their body is read.

    origins: pages that may call all the same (`ingress.cors_origins`). is_loopback: the server listens to this machine
    alone, so that any other name in Host is a rebound one.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = (), is_loopback: bool = False) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._fault(Headers(scope=scope)) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
        else:
            await error_response(ForeignPageError(fault))(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._is_loopback and host and not names_this_machine(host):
            return f"this server listens to this machine alone and is not called {_shown(host)}"
        if origin is None:
            # A link that is followed is a navigation, which reads nothing; what a script asks for names its origin.
            return None
        if origin in self._origins or "*" in self._origins or _authority(origin) == host.lower():
            return None
        return (
            f"pages of {_shown(origin)} may not call: name the origin in ingress.cors_origins, or set ingress.keys_file"
        )


def names_this_machine(host: str) -> bool:
    """Whether a Host header, with or without a port, means loopback."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") and host.count(":") != 0 else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _authority(origin: str) -> str:
    """host:port of an origin as Host has it: default ports are left out."""
    return origin.partition("://")[2].lower()


def _shown(text: str) -> str:
    return repr(text[:100])
