"""One tier as an orchestrator sees it: the replicas that exist now, and which of them takes the next sequence."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from actors.errors import EngineError
from actors.settings import OrchestratorSettings
from actors.transport.connection import Connection, ConnectionListener
from actors.transport.links import Peer

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


FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
"""A replica that is lost again and again is met again ever more rarely, up to this."""
GOOD_CONDUCT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Probation:
    """Of a replica that was lost: when it may be met again, and the progress at which it stood still with work."""

    until: float = float("-inf")
    pause: float = FIRST_PAUSE_S / 2
    stands_at: int = -1


_NONE = _Probation()


class PoolListener(ConnectionListener[Mail, Result], Protocol[Mail, Result]):
    """Who uses the replicas of a tier. Of connections, it hears of those that were ready."""

    def check(self, connection: Connection[Mail, Result]) -> str | None:
        """Why a new replica cannot be used, going by its card, or None."""

    def on_ready(self, connection: Connection[Mail, Result]) -> None:
        """A connection has come."""


class ReplicaPool(Generic[Mail, Result]):
    """Keeps a connection to every member of a directory. owner: begins the names of its links."""

    def __init__(
        self,
        directory: Directory,
        *,
        owner: str,
        settings: OrchestratorSettings,
        clock: Callable[[], float],
        listener: PoolListener[Mail, Result],
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._listener = listener
        self._numbers = itertools.count()
        self._since: dict[str, float] = {}
        """When each of `ready` came."""
        self.ready: dict[str, Connection[Mail, Result]] = {}
        self.refused: dict[str, str] = {}
        """Replicas that cannot be used, with the reason."""
        self._unreachable: dict[str, str] = {}
        """Why the last attempt to meet a replica failed."""
        self._probation: dict[str, _Probation] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.messages_of_lost = 0

    def pick(self) -> Connection[Mail, Result] | None:
        """The replica with the fewest sequences, one that is to go only where there is no other. None if none is."""
        return min(self.ready.values(), key=lambda c: (c.draining, len(c.load)), default=None)

    async def refresh(self) -> None:
        """Meet new members and forget those that left."""
        members = await self._directory.members()
        for name, peer in members.items():
            known = name in self.ready or name in self._starting or name in self.refused
            if not known and self._probation.get(name, _NONE).until <= self._clock():
                self._starting[name] = asyncio.create_task(self._meet(name, peer))
        for name in [n for n in self.ready if n not in members]:
            self.on_lost(self.ready[name], LookupError("left the tier"))
        for name in [n for n in self._starting if n not in members]:
            self._starting.pop(name).cancel()
        for name in [n for n in self._unreachable if n not in members]:
            del self._unreachable[name]
        for name in [n for n in self.refused if n not in members]:
            del self.refused[name]
        for name in [n for n in self._probation if n not in members]:
            del self._probation[name]

    async def _meet(self, name: str, peer: Peer) -> None:
        link = f"{self._owner}/{next(self._numbers)}"
        connection: Connection[Mail, Result] = Connection(
            name,
            link=link,
            peer=peer,
            stall_timeout_s=self._settings.stall_timeout_s,
            clock=self._clock,
            listener=self,
        )
        try:
            await connection.start()
            if self._probation.get(name, _NONE).stands_at == connection.pulse.progress and connection.pulse.busy:
                raise EngineError("it still stands where it stood when it was lost")
            problem = self._listener.check(connection)
        except Exception as error:  # it may be on its way up or down: the next refresh tries again
            reason = str(error) or type(error).__name__
            if self._unreachable.get(name) != reason:
                logger.warning("%s cannot be reached: %s", name, reason)
            self._unreachable[name] = reason
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
        self._since[name] = self._clock()
        self._listener.on_ready(connection)
        if connection.pulse.draining:
            connection.draining = True
            self._listener.on_draining(connection)

    # -- what connections say --------------------------------------------------------------------------------------

    def on_results(self, connection: Connection[Mail, Result], results: list[Result]) -> None:
        """Hand results on."""
        self._listener.on_results(connection, results)

    def on_draining(self, connection: Connection[Mail, Result]) -> None:
        """Hand on that a replica is to go."""
        self._listener.on_draining(connection)

    def on_lost(self, connection: Connection[Mail, Result], error: BaseException) -> None:
        """Close a connection and put its replica on probation; ignored for one that is not ready."""
        if self.ready.get(connection.name) is not connection:
            return
        logger.warning("lost %s: %s", connection.name, str(error) or type(error).__name__)
        del self.ready[connection.name]
        self._put_on_probation(connection)
        self.messages_of_lost += connection.messages
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._listener.on_lost(connection, error)

    def _put_on_probation(self, connection: Connection[Mail, Result]) -> None:
        """It may still be a member: one that was cut off, or that stands still. It is met again after a pause."""
        now, former = self._clock(), self._probation.get(connection.name, _NONE)
        lasted = now - self._since.pop(connection.name)
        pause = FIRST_PAUSE_S if lasted > GOOD_CONDUCT_S else min(2 * former.pause, LONGEST_PAUSE_S)
        stands_at = connection.pulse.progress if connection.pulse.busy else -1
        self._probation[connection.name] = _Probation(now + pause, pause, stands_at)

    async def close(self) -> None:
        """Close all connections."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self.ready.values()), *self._closing)
        self.ready.clear()
