"""Wires between two ends in one process: order, loss, strangers, and the way back to Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from actors.errors import EngineError
from actors.transport.socket import Endpoint, SocketPeer, SocketServer


class Replica:
    """Takes mail, and streams what is put into `outgoing` (an exception ends the stream with it, None without)."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[Any]]] = []
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.arrived = asyncio.Event()
        self.streams = 0
        self.left: asyncio.Queue[str] = asyncio.Queue()

    async def deliver(self, link: str, mail: Sequence[Any]) -> None:
        self.taken.append((link, list(mail)))
        self.arrived.set()

    async def results(self, link: str) -> AsyncIterator[list[Any]]:
        self.streams += 1
        while (item := await self.outgoing.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield [item]

    async def leave(self, link: str) -> None:
        self.left.put_nowait(link)


class Behind:
    """What a SocketPeer has behind it: says where the wire is, and answers what does not go over it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        return self.endpoint if method == "wire" else f"{method} by call"

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        yield f"{method} by stream"

    def close(self, link: str | None = None) -> None:
        """There is nothing to give back."""


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Replica, SocketServer, SocketPeer, Behind]]:
    replica = Replica()
    server = SocketServer(replica)
    behind = Behind(await server.endpoint("127.0.0.1"))
    peer = SocketPeer(behind)
    yield replica, server, peer, behind
    peer.close()
    await server.close()


Pair = tuple[Replica, SocketServer, SocketPeer, Behind]


async def test_mail_and_results_arrive_in_order(pair: Pair) -> None:
    replica, _, peer, behind = pair
    stream = peer.stream("results", "a")
    for number in range(50):
        await peer.call("deliver", "a", [number])
        replica.outgoing.put_nowait(number)
    assert [await anext(stream) for _ in range(50)] == [[number] for number in range(50)]
    while len(replica.taken) < 50:
        replica.arrived.clear()
        await replica.arrived.wait()
    assert replica.taken == [("a", [number]) for number in range(50)]
    assert behind.calls == [("wire",)]
    await stream.aclose()


async def test_what_is_rare_stays_with_the_peer_behind(pair: Pair) -> None:
    _, _, peer, behind = pair
    assert await peer.call("pulse", "a") == "pulse by call"
    assert behind.calls == [("pulse", "a")]


async def test_an_error_of_the_replica_is_told(pair: Pair) -> None:
    replica, _, peer, _ = pair
    replica.outgoing.put_nowait(EngineError("the model thread died"))
    stream = peer.stream("results", "a")
    with pytest.raises(EngineError, match="the model thread died"):
        await anext(stream)


async def test_a_stream_that_ends_ends_here(pair: Pair) -> None:
    replica, _, peer, _ = pair
    replica.outgoing.put_nowait(1)
    replica.outgoing.put_nowait(None)
    assert [items async for items in peer.stream("results", "a")] == [[1]]


async def test_a_replica_that_is_gone_ends_the_stream_and_refuses_mail(pair: Pair) -> None:
    replica, server, peer, _ = pair
    stream = peer.stream("results", "a")
    replica.outgoing.put_nowait(1)
    assert await anext(stream) == [1]
    wire = await peer._wire("a")
    await server.close()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert wire is not None
    assert wire[1].is_closing()


async def test_strangers_are_shown_the_door_before_anything_is_read(pair: Pair) -> None:
    replica, server, _, _ = pair
    endpoint = await server.endpoint("127.0.0.1")

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return replica.taken.append, (("trap", []),)

    body = pickle.dumps("link")
    for secret in (b"\0" * 32, endpoint.secret[:-1] + bytes([endpoint.secret[-1] ^ 1])):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(secret + len(body).to_bytes(4, "little") + b"\0" + body)
        assert await reader.read() == b""
        writer.close()
    assert replica.streams == 0
    assert replica.taken == []


async def test_without_a_wire_the_link_stays_on_ray() -> None:
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()  # nobody listens there now
    peer = SocketPeer(Behind(Endpoint("127.0.0.1", port, b"\0" * 32)))
    assert await peer.call("deliver", "a", [1]) == "deliver by call"
    assert [items async for items in peer.stream("results", "a")] == ["results by stream"]


async def test_where_ray_encrypts_there_is_no_wire(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, peer, behind = pair
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert await peer.call("deliver", "a", [1]) == "deliver by call"
    assert ("wire",) not in behind.calls


async def test_links_do_not_share_a_wire(pair: Pair) -> None:
    replica, _, peer, _ = pair
    await asyncio.gather(peer.call("deliver", "a", [1]), peer.call("deliver", "b", [2]))
    while len(replica.taken) < 2:
        replica.arrived.clear()
        await replica.arrived.wait()
    assert sorted(replica.taken) == [("a", [1]), ("b", [2])]


async def test_a_wire_that_ends_is_told_to_the_replica(pair: Pair) -> None:
    replica, _, peer, _ = pair
    await peer.call("deliver", "a", [1])
    await replica.arrived.wait()
    peer.close()
    assert await replica.left.get() == "a"


async def test_hanging_up_one_link_leaves_the_others(pair: Pair) -> None:
    replica, _, peer, _ = pair
    await peer.call("deliver", "a", [1])
    await peer.call("deliver", "b", [2])
    peer.close("a")
    assert await replica.left.get() == "a"
    peer.close("never begun")
    await peer.call("deliver", "b", [3])
    while ("b", [3]) not in replica.taken:
        replica.arrived.clear()
        await replica.arrived.wait()
