"""What target and draft actors have in common: a model thread, links, life signs and an end.

The model is built and driven on one thread of its own; the event loop only takes mail in and hands results out, so
that a long pass never delays a health check and a flood of calls never delays a pass.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from actors.engines.protocol import ModelCard
from actors.errors import EngineError, OutriderError
from actors.messages import Pulse
from actors.replica.busy import BusyShare
from actors.transport.links import LinkTable
from actors.transport.socket import Endpoint, SocketServer, node_address

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Mail = TypeVar("Mail")

LINK_LIMIT_S = 15.0
"""An orchestrator that has not been heard of for this long is dead; what its sequences hold is given back."""


class Replica(ABC, Generic[Mail, Result]):
    """Base of the two actors. Subclasses say what a turn of the model thread is."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._inbox: list[tuple[str, Sequence[Mail]]] = []
        self._lost_links: list[str] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._nudged = False
        self._draining = False
        self._report_empty: Callable[[], object] | None = None
        self._failure: BaseException | None = None
        self._card: ModelCard | None = None
        self._built = threading.Event()
        self._progress = 0
        self._moved_at = clock()
        self._busy_share = BusyShare()
        """Of the model thread."""
        self._links: LinkTable[Result] | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._wires: SocketServer | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-model", daemon=True)

    def start(self) -> None:
        """Begin to build the model; returns at once. Called once, by whoever places the replica."""
        self._thread.start()

    # -- called by orchestrators ---------------------------------------------------------------------------------

    async def card(self) -> ModelCard:
        """The model's card, once it is built. Raises what building it raised."""
        await asyncio.to_thread(self._built.wait)
        if self._card is None:
            raise self._failed()
        return self._card

    async def meet(self, link: str) -> Pulse:
        """A new link begins; the first thing that an orchestrator says. Answers at once, also while building."""
        self._require_links().meet(link)
        return self._pulse()

    async def deliver(self, link: str, mail: Sequence[Mail]) -> None:
        """Take mail from the orchestrator behind `link`, in order. Mail over a link that has ended is ignored."""
        if not self._require_links().touch(link):
            return
        with self._wake:
            self._inbox.append((link, mail))
            self._wake.notify()

    async def results(self, link: str) -> AsyncIterator[list[Result]]:
        """The one long-lived stream of results for `link`. Ends with an error when the model thread dies."""
        async for items in self._require_links().stream(link):
            yield items
        if self._failure is not None:
            raise self._failed()

    async def wire(self, host: str | None = None) -> Endpoint:
        """Where mail and results can go over a wire. host: the address to listen at; this node's when None."""
        if self._wires is None:
            self._wires = SocketServer(self)
        return await self._wires.endpoint(host or node_address())

    async def pulse(self, link: str) -> Pulse:
        """Keepalive of a link. Raises EngineError when the link has ended here: its sequences are gone."""
        if not self._require_links().touch(link):
            raise EngineError(f"{self._name} has not heard of this orchestrator for too long and ended the link")
        return self._pulse()

    def _pulse(self) -> Pulse:
        if self._failure is not None:
            raise self._failed()
        return Pulse(self._busy(), self._progress, self._draining, self._facts() if self._card is not None else {})

    async def leave(self, link: str) -> None:
        """The orchestrator behind `link` is gone: give back what its sequences hold."""
        self._require_links().forget(link)
        self._lose_links([link])

    async def drain(self) -> None:
        """Ask for no new sequences, and return when none is left. The caller bounds the wait."""
        loop, empty = asyncio.get_running_loop(), asyncio.Event()
        with self._wake:
            self._draining = True
            self._report_empty = lambda: loop.call_soon_threadsafe(empty.set)
            self._nudged = True  # it may be about to wait
            self._wake.notify()
        await empty.wait()

    async def facts(self) -> dict[str, float]:
        """Its load and what its controllers do, for people; empty until the model is built."""
        return self._facts() if self._card is not None else {}

    async def ping(self, stuck_after_s: float = 60.0) -> str:
        """Health: raises EngineError when the model thread died, or has work and made no progress for that long."""
        if self._failure is not None:
            raise self._failed()
        still = self._clock() - self._moved_at
        if self._built.is_set() and self._busy() and still > stuck_after_s:
            raise EngineError(f"{self._name}: the model thread has work and has not moved for {still:.0f} s")
        return self._name

    async def stop(self) -> None:
        """End the model thread and all streams."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 10.0)
        if self._reaper is not None:
            self._reaper.cancel()
        if self._wires is not None:
            await self._wires.close()
        if self._links is not None:
            self._links.end()

    # -- for subclasses; all but the last two run on the model thread ----------------------------------------------

    @abstractmethod
    def _prepare(self) -> ModelCard:
        """Build the model."""

    @abstractmethod
    def _take(self, link: str, mail: Sequence[Mail]) -> None:
        """Take one delivery."""

    @abstractmethod
    def _pause(self) -> float | None:
        """Seconds until the next `_work` is due: 0 for now, None for not before there is mail."""

    @abstractmethod
    def _work(self) -> dict[str, Result]:
        """One pass or step. Returns what is to be sent, per link."""

    @abstractmethod
    def _drop_link(self, link: str) -> None:
        """Give back what the sequences of a dead orchestrator hold."""

    def _facts(self) -> dict[str, float]:
        """Load and what the controllers do. Callable from any thread, once the model is built."""
        return {}

    @abstractmethod
    def _busy(self) -> bool:
        """Is there work to do? Callable from any thread."""

    def _nudge(self) -> None:
        """`_pause` has a new answer. Callable from any thread."""
        with self._wake:
            self._nudged = True
            self._wake.notify()

    @abstractmethod
    def _holding(self) -> bool:
        """Is any sequence here? Callable from any thread."""

    # -- the model thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._card = self._prepare()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._built.set()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            logger.error("the model thread of %s ended", self._name, exc_info=error)
            self._failure = error
            if self._links is not None:
                self._links.end()
            if self._report_empty is not None:
                self._report_empty()

    def _turn(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
            lost, self._lost_links = self._lost_links, []
            self._nudged = False
        self._moved_at = self._clock()
        for link, mail in inbox:
            self._take(link, mail)
        for link in lost:
            self._drop_link(link)
        pause = self._pause()  # decided on all that has come, so that old mail is not taken for new
        if self._report_empty is not None and not self._holding():
            self._report_empty()
        if pause == 0.0:
            results = self._work()
            self._progress += 1
            self._busy_share.worked(self._moved_at, self._clock())
            if self._links is not None:
                self._links.publish(results)
            return
        with self._wake:
            if not (self._inbox or self._lost_links or self._stopping or self._nudged):
                self._wake.wait(pause)

    # -- links ---------------------------------------------------------------------------------------------------

    def _require_links(self) -> LinkTable[Result]:
        if self._links is None:
            self._links = LinkTable(asyncio.get_running_loop(), self._clock)
            self._reaper = asyncio.create_task(self._reap())
        return self._links

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(LINK_LIMIT_S / 5)
            self._lose_links(self._require_links().expired(LINK_LIMIT_S))

    def _lose_links(self, links: Sequence[str]) -> None:
        if links:
            with self._wake:
                self._lost_links.extend(links)
                self._wake.notify()

    def _failed(self) -> Exception:
        if isinstance(self._failure, OutriderError):
            return self._failure
        return EngineError(f"{self._name}: {type(self._failure).__name__}: {self._failure}")
