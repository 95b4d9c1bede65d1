"""Wires: what a link's mail and results travel on between processes, a TCP connection of their own.

Ray makes the introduction: a replica tells its endpoint, and a secret that admits to it, through an actor call. Mail
and results then go over the wire; everything rare (cards, pulses, pings) stays with Ray. Per message a wire takes a
fifth of the processor time of Ray's calls and streams and a tenth of their latency (benchmarks/LOG.md), and its
buffer is bounded, so that a receiver that falls behind gets fewer and larger messages instead of older ones.

Frames are pickles, as in Ray's own messages, and are read from no one who has not shown the secret first. Where
Ray's traffic is encrypted (RAY_USE_TLS), and where no wire can be had, links stay on Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import pickle
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.errors import EngineError
from actors.transport.links import Peer

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<IB")
_ITEMS, _ERROR, _HELLO = 0, 1, 2
_LONGEST = 1 << 28
_BUFFER = 1 << 16
"""Bytes that may wait to be sent before a sender has to wait, and coalesces."""
_PATIENCE_S = 5.0
_SILENCE_S = 6
"""A wire whose other end acknowledges nothing for this long is cut: the link between two nodes is down."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica listens, and what admits to it."""

    host: str
    port: int
    secret: bytes


def node_address() -> str:
    """The address by which Ray knows this node; the loopback address outside Ray."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


class Replica(Protocol):
    """What is needed of a replica."""

    async def deliver(self, link: str, mail: Sequence[Any]) -> None: ...

    def results(self, link: str) -> AsyncIterator[list[Any]]: ...

    async def leave(self, link: str) -> None: ...


class SocketServer:
    """A replica's end of all its wires. Lives on the replica's event loop."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._secret = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()

    async def endpoint(self, host: str) -> Endpoint:
        """Where to connect; listens from the first call on, at a port of the system's choice."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, host, 0, limit=_BUFFER)
        listening: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return Endpoint(listening[0], listening[1], self._secret)

    async def close(self) -> None:
        """End all wires."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # called by asyncio's server, as a task
        self._open.add(task)
        try:
            shown = await asyncio.wait_for(reader.readexactly(len(self._secret)), _PATIENCE_S)
            if not hmac.compare_digest(shown, self._secret):
                return
            link = await asyncio.wait_for(_read(reader), _PATIENCE_S)
            await _write(writer, _HELLO, None)
            _guard(writer)
            try:
                await self._carry(link, reader, writer)
            finally:
                await self._replica.leave(link)  # a link has one wire, and ends with it
        except (OSError, EOFError, TimeoutError):
            pass  # the other end is gone
        except asyncio.CancelledError:
            pass  # closed here
        finally:
            self._open.discard(task)
            writer.close()

    async def _carry(self, link: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sending = asyncio.create_task(self._send(link, writer))
        try:
            while True:
                await self._replica.deliver(link, await _read(reader))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send(self, link: str, writer: asyncio.StreamWriter) -> None:
        try:
            async for items in self._replica.results(link):
                await _write(writer, _ITEMS, items)
        except OSError:
            pass
        except Exception as error:  # the replica's own end: the orchestrator shall know the reason
            with contextlib.suppress(OSError):
                await _write(writer, _ERROR, error)
        writer.close()


class SocketPeer:
    """A Ray actor reached over a wire, with `behind` (a RayPeer) for the rest. One wire for each link name."""

    def __init__(self, behind: Peer) -> None:
        self._behind = behind
        self._wires: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None] = {}
        self._connecting = asyncio.Lock()

    async def call(self, method: str, *args: Any) -> Any:
        if method != "deliver":
            return await self._behind.call(method, *args)
        link, mail = args
        wire = await self._wire(link)
        if wire is None:
            return await self._behind.call(method, link, mail)
        return await _write(wire[1], _ITEMS, mail)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        wire = await self._wire(args[0]) if method == "results" else None
        if wire is None:
            async for items in self._behind.stream(method, *args):
                yield items
            return
        reader, writer = wire
        try:
            while True:
                try:
                    yield await _read(reader)
                except (OSError, EOFError):
                    return
        finally:
            writer.close()
            self._wires.pop(args[0], None)

    def close(self, link: str | None = None) -> None:
        """Hang up: the wire of `link`, or all."""
        for name in [link] if link is not None else list(self._wires):
            wire = self._wires.pop(name, None)
            if wire is not None:
                wire[1].close()

    async def _wire(self, link: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The wire of `link`, made on first use. None when the link stays on Ray."""
        async with self._connecting:
            if link not in self._wires:
                self._wires[link] = await self._connect(link)
            return self._wires[link]

    async def _connect(self, link: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return None
        endpoint: Endpoint = await self._behind.call("wire")
        try:
            return await asyncio.wait_for(_introduce(endpoint, link), _PATIENCE_S)
        except (OSError, EOFError, TimeoutError) as error:
            logger.warning("no wire to %s:%d, its link stays on Ray: %s", endpoint.host, endpoint.port, error)
            return None


async def _introduce(endpoint: Endpoint, link: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=_BUFFER)
    try:
        writer.write(endpoint.secret)
        await _write(writer, _ITEMS, link)
        await _read(reader)
    except BaseException:
        writer.close()
        raise
    _guard(writer)
    return reader, writer


def _guard(writer: asyncio.StreamWriter) -> None:
    """Have the system find out when the other end cannot be reached, whether or not there is something to send.

    A process that stands still acknowledges all the same: that is for pulses to find.
    """
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


async def _write(writer: asyncio.StreamWriter, kind: int, value: Any) -> None:
    body = pickle.dumps(value, protocol=5)
    if writer.is_closing():
        raise ConnectionResetError("the wire is closed")
    writer.writelines((_HEADER.pack(len(body), kind), body))
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Any:
    length, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > _LONGEST:
        raise EngineError(f"a frame of {length} bytes on a wire")
    value = pickle.loads(await reader.readexactly(length))  # only from who has shown the secret
    if kind == _ERROR:
        raise value if isinstance(value, Exception) else EngineError(str(value))
    return value
