"""An orchestrator's end of one link: mail out, results in, life signs, and the news when the other end is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from actors.engines.protocol import ModelCard
from actors.errors import EngineError
from actors.messages import Pulse
from actors.transport.links import Outbox, Peer

Mail = TypeVar("Mail")
Result = TypeVar("Result")

PULSE_PERIOD_S = 1.0


class ConnectionListener(Protocol[Mail, Result]):
    """Who hears what happens on connections."""

    def on_results(self, connection: Connection[Mail, Result], results: list[Result]) -> None:
        """The replica has sent something."""

    def on_draining(self, connection: Connection[Mail, Result]) -> None:
        """The replica says that it is to go. Called once."""

    def on_lost(self, connection: Connection[Mail, Result], error: BaseException) -> None:
        """The connection is never used again. Called once, with the reason."""


class Connection(Generic[Mail, Result]):
    """One replica as this orchestrator sees it.

    `link` names the pair and is new for every connection, so that nothing meant for an earlier one is ever taken.
    """

    def __init__(
        self,
        name: str,
        *,
        link: str,
        peer: Peer,
        stall_timeout_s: float,
        clock: Callable[[], float],
        listener: ConnectionListener[Mail, Result],
    ) -> None:
        self.name = name
        self.link = link
        self.load: set[str] = set()
        """Sequences that this orchestrator has put there."""
        self._peer = peer
        self._stall = stall_timeout_s
        self._clock = clock
        self._listener = listener
        self.draining = False
        self.pulse = Pulse(False, 0)
        """The last one heard."""
        self._card: ModelCard | None = None
        self._lost = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._outbox: Outbox[Mail] = Outbox(self._send, self._lose)

    @property
    def card(self) -> ModelCard:
        """The replica's model; known once `start` has returned."""
        if self._card is None:
            raise EngineError(f"{self.name} has not started")
        return self._card

    async def start(self) -> None:
        """Wait until the replica has its model, then open the link. Raises what building the model raised.

        Raises TimeoutError when the replica does not answer at all.
        """
        self.pulse = await asyncio.wait_for(self._peer.call("meet", self.link), self._stall)
        self._card = await self._peer.call("card")
        self._outbox.start()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def post(self, item: Mail) -> None:
        """Send something; it is coalesced with what else is on its way."""
        if not self._lost:
            self._outbox.post(item)

    @property
    def messages(self) -> int:
        """Calls made so far."""
        return self._outbox.messages

    async def close(self) -> None:
        """End the link, and give back what carried it."""
        self._lost = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outbox.close()
        self._peer.close(self.link)

    async def _send(self, items: list[Mail]) -> None:
        await asyncio.wait_for(self._peer.call("deliver", self.link, items), self._stall)

    async def _read(self) -> None:
        try:
            async for items in self._peer.stream("results", self.link):
                self._listener.on_results(self, items)
        except Exception as error:
            self._lose(error)
        else:
            self._lose(EngineError(f"{self.name} ended its stream"))

    async def _watch(self) -> None:
        """Tell a replica that stands still from one that has nothing to do."""
        moved = self._clock()
        while not self._lost:  # a cancellation can be lost in wait_for, when the answer comes in the same turn
            await asyncio.sleep(PULSE_PERIOD_S)
            try:
                pulse: Pulse = await asyncio.wait_for(self._peer.call("pulse", self.link), self._stall)
            except Exception as error:
                self._lose(error)
                return
            if not pulse.busy or pulse.progress != self.pulse.progress:
                moved = self._clock()
            self.pulse = pulse
            if pulse.draining and not self.draining:
                self.draining = True
                self._listener.on_draining(self)
            if self._clock() - moved > self._stall:
                self._lose(EngineError(f"{self.name} has work and has made no progress for {self._stall:g} s"))
                return

    def _lose(self, error: BaseException) -> None:
        if not self._lost:
            self._lost = True
            self._listener.on_lost(self, error)
