"""One tier as an orchestrator sees it: the replicas that exist now, and which of them takes the next sequence."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from actors.connection import Connection
from actors.links import Peer
from actors.settings import OrchestratorSettings

Mail = TypeVar("Mail")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Directory(Protocol):
    """Who is in a tier now, by name. A replica that was restarted has a new name."""

    async def members(self) -> dict[str, Peer]: ...


class StaticDirectory:
    """A fixed set of replicas: for one process, and for tests."""

    def __init__(self, peers: dict[str, Peer]) -> None:
        self.peers = peers

    async def members(self) -> dict[str, Peer]:
        return dict(self.peers)


class Tier(Generic[Mail, Result]):
    """Keeps a connection to every member of a directory.

    check: looks at a new replica's card and returns why it cannot be used, or None.
    on_ready / on_lost: called when a connection comes and goes.
    """

    def __init__(
        self,
        directory: Directory,
        owner: str,
        settings: OrchestratorSettings,
        clock: Callable[[], float],
        check: Callable[[Connection[Mail, Result]], str | None],
        on_results: Callable[[Connection[Mail, Result], list[Result]], None],
        on_ready: Callable[[Connection[Mail, Result]], None],
        on_lost: Callable[[Connection[Mail, Result]], None],
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._check = check
        self._on_results = on_results
        self._on_ready = on_ready
        self._on_lost_connection = on_lost
        self._numbers = itertools.count()
        self.ready: dict[str, Connection[Mail, Result]] = {}
        self.refused: dict[str, str] = {}
        """Replicas that cannot be used, with the reason."""
        self._unreachable: dict[str, str] = {}
        """Why the last attempt to meet a replica failed."""
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.messages_of_lost = 0

    def pick(self, besides: Connection[Mail, Result] | None = None) -> Connection[Mail, Result] | None:
        """The replica with the fewest sequences and room for one more; None if there is none."""
        candidates = [c for c in self.ready.values() if c is not besides]
        return min(candidates, key=lambda c: len(c.load), default=None)

    async def refresh(self) -> None:
        """Meet new members and forget those that left."""
        members = await self._directory.members()
        for name, peer in members.items():
            if name not in self.ready and name not in self._starting and name not in self.refused:
                self._starting[name] = asyncio.create_task(self._meet(name, peer))
        for name in [n for n in self.ready if n not in members]:
            self._lost(self.ready[name], LookupError("left the tier"))
        for name in [n for n in self._starting if n not in members]:
            self._starting.pop(name).cancel()
        for name in [n for n in self._unreachable if n not in members]:
            del self._unreachable[name]
        for name in [n for n in self.refused if n not in members]:
            del self.refused[name]

    async def _meet(self, name: str, peer: Peer) -> None:
        link = f"{self._owner}/{next(self._numbers)}"
        connection: Connection[Mail, Result] = Connection(
            name, link, peer, self._settings.stall_timeout_s, self._clock, self._on_results, self._lost
        )
        try:
            await connection.start()
            problem = self._check(connection)
        except Exception as error:  # it may be on its way up or down: the next refresh tries again
            if self._unreachable.get(name) != str(error):
                logger.warning("%s cannot be reached: %s", name, error)
            self._unreachable[name] = str(error)
            await connection.close()
            return
        finally:
            self._starting.pop(name, None)
        self._unreachable.pop(name, None)
        if problem is not None:
            logger.error("%s is not used: %s", name, problem)
            self.refused[name] = problem
            await connection.close()
            return
        self.ready[name] = connection
        self._on_ready(connection)

    def _lost(self, connection: Connection[Mail, Result], error: BaseException) -> None:
        if self.ready.get(connection.name) is not connection:
            return
        logger.warning("lost %s: %s", connection.name, error)
        del self.ready[connection.name]
        self.messages_of_lost += connection.messages
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._on_lost_connection(connection)

    async def close(self) -> None:
        """Close all connections."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self.ready.values()), *self._closing)
        self.ready.clear()
