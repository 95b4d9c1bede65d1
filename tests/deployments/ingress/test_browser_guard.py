"""Pages of other sites and rebound names are kept away from a server without keys; everybody else is let in."""

from __future__ import annotations

import httpx
import pytest
from tiny import Reciter, byte_codec

from deployments.ingress.browser_guard import names_this_machine
from deployments.ingress.http_app import http_app
from deployments.ingress.routes import HttpLimits
from deployments.ingress.service import Served

CODEC = byte_codec()
BODY = {"prompt": "a", "max_tokens": 2}


async def status(headers: dict[str, str], is_loopback: bool = True, origins: tuple[str, ...] = ()) -> int:
    limits = HttpLimits(guards_browsers=True, is_loopback=is_loopback, cors_origins=origins)
    app = http_app(Reciter(CODEC), CODEC, Served("tiny", context=64), limits)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        if answer.status_code == 403:
            assert answer.json()["error"]["code"] == "foreign_page"
        return answer.status_code


async def test_clients_that_are_no_browsers_are_let_in() -> None:
    assert await status({}) == 200
    assert await status({"host": "localhost:8000"}) == 200
    assert await status({"host": "[::1]:8000"}) == 200


async def test_the_servers_own_page_may_call() -> None:
    assert await status({"origin": "http://127.0.0.1:8000"}) == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9000"])
async def test_pages_of_other_sites_may_not(origin: str) -> None:
    assert await status({"origin": origin}) == 403
    assert await status({"origin": origin}, is_loopback=False) == 403


async def test_pages_that_were_named_may() -> None:
    assert await status({"origin": "https://ours.example"}, origins=("https://ours.example",)) == 200


async def test_a_name_that_was_rebound_to_loopback_gets_nothing() -> None:
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    assert await status(rebound) == 403
    assert await status({"host": "evil.example:8000"}) == 403


async def test_a_server_of_the_network_has_many_names() -> None:
    assert await status({"host": "llm.internal"}, is_loopback=False) == 200


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("app.localhost:3000", True),
        ("0.0.0.0:8000", False),
        ("example.com", False),
        ("127.0.0.1.example.com:8000", False),
    ],
)
def test_names_of_this_machine(host: str, here: bool) -> None:
    assert names_this_machine(host) is here
