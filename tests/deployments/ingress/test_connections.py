"""Clients that do not behave, on real sockets: the server answers others and gives everything back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from tiny import Reciter, byte_codec

from deployments.ingress.http_app import HttpLimits, http_app
from deployments.ingress.service import Served
from deployments.runtime.local import free_port

CODEC = byte_codec()
Send = Callable[..., Awaitable[bytes]]


@pytest.fixture
async def server() -> AsyncIterator[tuple[Reciter, int]]:
    service, port = Reciter(CODEC), free_port()
    limits = HttpLimits(body_bytes=50_000, body_s=0.2)
    app = http_app(service, CODEC, Served("tiny", context=64), limits)
    running = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="critical", ws="none", lifespan="off", timeout_keep_alive=1)
    )
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    yield service, port
    running.should_exit = True
    await task


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", *headers]
    if not any(header.startswith("transfer-encoding") for header in headers):
        head.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def ask(**more: object) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 5, **more}).encode()


async def talk(port: int, *writes: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for data in writes:
        writer.write(data)
        await writer.drain()
    got = await reader.read()
    writer.close()
    return got


async def answers(port: int) -> bool:
    return b"200 OK" in await talk(port, post(ask(), "connection: close"))


async def test_pipelined_requests_are_answered_in_order(server: tuple[Reciter, int]) -> None:
    _, port = server
    got = await talk(port, post(ask(max_tokens=2)) + post(ask(max_tokens=4), "connection: close"))
    assert got.count(b"200 OK") == 2
    assert got.index(b'"text":"He"') < got.index(b'"text":"Hell"')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_that_does_not_come_is_not_waited_for(server: tuple[Reciter, int], stream: bool) -> None:
    service, port = server
    slow = asyncio.create_task(talk(port, post(ask(stream=stream)[:10], length=1000)))
    assert await answers(port)  # meanwhile
    got = await slow
    assert b" 408 " in got.splitlines()[0]
    assert b'"code":"request_timeout"' in got
    assert len(service.requests) == 1


async def test_a_body_cut_short_reaches_nobody(server: tuple[Reciter, int], caplog: pytest.LogCaptureFixture) -> None:
    service, port = server
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(ask()[:10], length=1000))
    await writer.drain()
    writer.transport.abort()
    assert await answers(port)
    assert len(service.requests) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # clients go, that is no failure


@pytest.mark.parametrize("count", [1, 20])
async def test_connections_reset_in_the_middle_of_streams_free_their_answers(
    server: tuple[Reciter, int], count: int
) -> None:
    service, port = server
    service.held = asyncio.Event()
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(ask(stream=True, max_tokens=50)))
        await reader.readuntil(b"data: ")
        assert service.open == 1
        writer.transport.abort()
        while service.open:  # bounded by the test's time limit
            await asyncio.sleep(0.005)
    service.held.set()
    assert await answers(port)


async def test_a_long_body_in_chunks_is_refused_before_it_ends(server: tuple[Reciter, int]) -> None:
    service, port = server
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    got = await talk(port, post(b"", "transfer-encoding: chunked", "connection: close"), *[chunk] * 8)
    assert b" 413 " in got.splitlines()[0]
    assert service.requests == []


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"BREW /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused(server: tuple[Reciter, int], junk: bytes) -> None:
    service, port = server
    got = await talk(port, junk)
    assert got.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), got[:200]
    assert service.requests == []
    assert await answers(port)


async def test_http_1_0_gets_no_chunks(server: tuple[Reciter, int]) -> None:
    """Whole and streamed; the connection is closed after the answer, as that version has it."""
    _, port = server
    for stream in (False, True):
        head, _, body = (await talk(port, post(ask(stream=stream)).replace(b"HTTP/1.1", b"HTTP/1.0"))).partition(
            b"\r\n\r\n"
        )
        assert b" 200 " in head.split(b"\r\n")[0]
        assert b"chunked" not in head.lower()
        assert f"content-length: {len(body)}".encode() in head.lower()
        assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"]


async def test_a_body_lost_to_an_offered_upgrade_is_explained(server: tuple[Reciter, int]) -> None:
    """As the JDK's client sends it, and curl --http2; GET loses nothing."""
    _, port = server
    offer = ("connection: close, Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA")
    got = await talk(port, post(ask(), *offer))
    assert b" 400 " in got.split(b"\r\n")[0]
    assert b"upgrade_not_supported" in got
    assert await answers(port)


async def test_head_on_a_connection_that_goes_on(server: tuple[Reciter, int]) -> None:
    _, port = server
    head = b"HEAD /health HTTP/1.1\r\nhost: x\r\n%s\r\n"
    got = await talk(port, head % b"" + head % b"connection: close\r\n")
    assert got.count(b" 200 OK") == 2
    assert got.count(b"content-length: 15") == 2  # {"status":"ok"}
    assert b"{" not in got
