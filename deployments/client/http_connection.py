"""Connections to a server, made alike for every command and client: its address, the key, and the way through proxies.

Knows nothing of what is asked over them.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import httpx

from actors.errors import ConfigError


def connection(url: str, key: str | None = None, **options: Any) -> httpx.AsyncClient:
    """An HTTP client of the server at `url`, its root with or without `/v1`. options: as httpx.AsyncClient takes them.

    Raises ConfigError for an address or a key that cannot be used, and for a proxy of the environment that cannot.
    """
    root = server_root(url)
    headers = {"authorization": f"Bearer {header_value(key)}"} if key else {}
    direct = is_loopback(root)
    if direct and root.startswith("https:"):  # without the environment's proxies, but with its certificates
        options.setdefault("verify", httpx.create_ssl_context())
    try:
        return httpx.AsyncClient(base_url=root, headers=headers, trust_env=not direct, **options)
    except (ValueError, ImportError, httpx.InvalidURL) as error:  # httpx reads HTTP_PROXY and its like here
        raise ConfigError(f"the proxy that the environment names for {root} cannot be used: {error}") from error


def server_root(url: str) -> str:
    """Where a server's routes begin. Raises ConfigError for what is no http:// or https:// address."""
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise ConfigError(f"{url!r} is no address of a server: say http://HOST:PORT", "url")
    return url.rstrip("/").removesuffix("/v1")


def header_value(key: str) -> str:
    """An API key as a header may carry it: files end in a line break, which is no part of it.

    Raises ConfigError, without showing the key, for one with other characters that no header may carry.
    """
    stripped = key.strip()
    if not stripped or not stripped.isascii() or not stripped.isprintable():
        raise ConfigError("the API key is empty, or has characters that no HTTP header may carry", "key")
    return stripped


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine itself; no proxy knows the way there."""
    host = httpx.URL(url).host.rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
