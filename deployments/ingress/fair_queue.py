"""Who goes next when there is more to do than room: priorities first, then the tenant that has the least running.

Pure bookkeeping on one event loop: no clock, no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from actors.errors import OverloadedError


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    weight: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """Room for `running` answers at once; up to `queue` requests of each priority wait. None is room for all.

    A tenant with many requests waits behind its own: among those of equal priority, the next is always one of the
    tenant with the fewest answers running, and of several such tenants the one whose last turn is longest ago.
    """

    def __init__(self, running: int | None = None, queue: int = 1024) -> None:
        self._room = running
        self._most = queue
        self._running: dict[str, int] = {}
        self._waiting: dict[int, dict[str, deque[_Waiter]]] = {}
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}

    @property
    def running(self) -> int:
        """Answers running."""
        return sum(self._running.values())

    @property
    def waiting(self) -> int:
        """Requests waiting."""
        return sum(len(line) for lines in self._waiting.values() for line in lines.values())

    @asynccontextmanager
    async def place(self, tenant: str, priority: int = 0, weight: int = 1) -> AsyncIterator[None]:
        """Holds room for `weight` answers. Raises OverloadedError when too many wait already."""
        if self._room is not None:
            weight = min(weight, self._room)
        await self._enter(tenant, priority, weight)
        try:
            yield
        finally:
            self._leave(tenant, weight)

    async def _enter(self, tenant: str, priority: int, weight: int) -> None:
        if not self._waiting and self._fits(weight):
            self._take(tenant, weight)
            return
        lines = self._waiting.get(priority, {})
        if sum(map(len, lines.values())) >= self._most:
            raise OverloadedError(f"{self._most} requests of this priority are waiting already; try again later")
        waiter = _Waiter(tenant, weight)
        self._waiting.setdefault(priority, {}).setdefault(tenant, deque()).append(waiter)
        self._dispatch()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():  # its turn came just then
                self._leave(tenant, weight)
            else:
                self._forget(priority, waiter)
                self._dispatch()
            raise

    def _fits(self, weight: int) -> bool:
        return self._room is None or self.running + weight <= self._room

    def _take(self, tenant: str, weight: int) -> None:
        self._running[tenant] = self._running.get(tenant, 0) + weight

    def _leave(self, tenant: str, weight: int) -> None:
        self._running[tenant] -= weight
        if not self._running[tenant]:
            del self._running[tenant]
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            priority = max(self._waiting)
            lines = self._waiting[priority]
            tenant = min(lines, key=lambda name: (self._running.get(name, 0), self._last_turn.get(name, 0)))
            waiter = lines[tenant][0]
            if not self._fits(waiter.weight):
                return  # it is the next one: what is smaller does not overtake it for ever
            self._forget(priority, waiter)
            self._take(tenant, waiter.weight)
            self._last_turn[tenant] = next(self._turns)
            waiter.turn.set_result(None)

    def _forget(self, priority: int, waiter: _Waiter) -> None:
        lines = self._waiting[priority]
        line = lines[waiter.tenant]
        line.remove(waiter)
        if not line:
            del lines[waiter.tenant]
        if not lines:
            del self._waiting[priority]
