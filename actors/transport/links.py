"""Links: how an orchestrator and a replica of a tier talk.

One long-lived stream per pair brings results (verdicts or offers), ordinary calls carry mail the other way. Both ends
coalesce: what piles up while a message is under way leaves as one message, so that the number of messages does not
grow with the number of sequences.

`LinkTable` is the replica's end, `Outbox` the orchestrator's. `LocalPeer` and `RayPeer` carry calls and streams to a
plain object in this process or to a Ray actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from actors.errors import EngineError
from actors.transport.backlog import Backlog

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_RESULTS = 4096
"""Messages with results that wait for an orchestrator; beyond, its link ends, and its sequences are given back."""
MOST_MAIL = 1 << 18
"""Items of mail that wait for a replica; beyond, its connection is lost."""


class LinkTable(Generic[T]):
    """A replica's links, by the name of the orchestrator at the other end.

    A link begins with `meet` and lives while its orchestrator shows signs of life (`touch`) and reads its results; what
    it held is to be given back when it is among the `expired`, because an orchestrator that dies says no goodbye. A
    link that ended is never taken up again, so that one who was taken for dead and comes back is told so, and is not
    listened to. Results published before the stream is opened wait for it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: dict[str, Backlog[T]] = {}
        self._events: dict[str, asyncio.Event] = {}
        self._seen: dict[str, float] = {}
        self._overfull: list[str] = []
        """Links that ended because their results were not read."""
        self._closed = False

    def meet(self, link: str) -> None:
        """A link begins."""
        self._seen[link] = self._clock()
        self._waiting.setdefault(link, Backlog(MOST_RESULTS))

    def touch(self, link: str) -> bool:
        """The orchestrator behind `link` is alive. False: the link has ended, or never began."""
        if link not in self._seen:
            return False
        self._seen[link] = self._clock()
        return True

    def expired(self, limit_s: float) -> list[str]:
        """Links not touched for `limit_s` seconds, or whose results are not read; they are forgotten here."""
        horizon = self._clock() - limit_s
        silent = [link for link, seen in self._seen.items() if seen < horizon]
        for link in silent:
            self.forget(link)
        overfull, self._overfull = self._overfull, []
        return overfull + silent

    def forget(self, link: str) -> None:
        """A link ends; unknown ones are ignored."""
        self._seen.pop(link, None)
        self._waiting.pop(link, None)
        event = self._events.pop(link, None)
        if event is not None:
            event.set()  # its stream ends

    def publish(self, items: dict[str, T]) -> None:
        """Hand one item to each of the named links. Callable from any thread."""
        if items and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, items)

    def _put(self, items: dict[str, T]) -> None:
        for link, item in items.items():
            waiting = self._waiting.get(link)
            if waiting is None:
                continue
            if not waiting.put(item):
                logger.warning("the results for %s are not read: its link ends", link)
                self._overfull.append(link)
                self.forget(link)
            elif (event := self._events.get(link)) is not None:
                event.set()

    async def stream(self, link: str) -> AsyncIterator[list[T]]:
        """Items for `link` as they come, all that wait at once. A second stream of the same name ends the first.

        Ends at once for a link that never began, or has ended.
        """
        if not self.touch(link):
            return
        if (former := self._events.get(link)) is not None:
            former.set()
        event = self._events[link] = asyncio.Event()
        waiting = self._waiting[link]
        if len(waiting):
            event.set()
        while not self._closed:
            await event.wait()
            if self._events.get(link) is not event:
                return
            event.clear()
            if items := waiting.take():
                yield items

    def end(self) -> None:
        """End all streams. Callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._closed = True
        for event in self._events.values():
            event.set()


class Peer(Protocol):
    """The other end of a link, wherever it runs."""

    def call(self, method: str, *args: Any) -> Awaitable[Any]: ...

    def stream(self, method: str, *args: Any) -> AsyncIterator[Any]: ...

    def close(self, link: str | None = None) -> None:
        """Give back what carries `link`, or everything; it is not used again."""


class LocalPeer:
    """A plain object in this process."""

    def __init__(self, target: object) -> None:
        self._target = target

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._target, method)(*args)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        async for item in getattr(self._target, method)(*args):
            yield item

    def close(self, link: str | None = None) -> None:
        """There is nothing to give back."""


class RayPeer:
    """A Ray actor, by its handle. `ping` goes to a concurrency group of its own, so that work cannot starve it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *args: Any) -> Any:
        remote = getattr(self._handle, method)
        if method == "ping":
            remote = remote.options(concurrency_group="health")
        return await remote.remote(*args)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        references = getattr(self._handle, method).options(num_returns="streaming").remote(*args)
        async for reference in references:
            yield await reference

    def close(self, link: str | None = None) -> None:
        """There is nothing to give back: a stream ends with its reader."""


class Outbox(Generic[T]):
    """Mail to one replica: at most four calls under way, the rest waits and leaves together, in order.

    send: makes a call. failed: hears why a call failed, or that too much mail waits. Nothing leaves before `start`.
    """

    def __init__(self, send: Callable[[list[T]], Awaitable[None]], failed: Callable[[BaseException], None]) -> None:
        self._send = send
        self._failed = failed
        self._pending: Backlog[T] = Backlog(MOST_MAIL)
        self._event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._window = asyncio.Semaphore(4)
        self.messages = 0

    def start(self) -> None:
        """Begin to send, on the event loop that runs."""
        self._task = asyncio.create_task(self._run())

    def post(self, item: T) -> None:
        """Queue one item; it leaves as soon as the event loop turns."""
        if self._pending.put(item):
            self._event.set()
        else:
            self._failed(EngineError(f"{len(self._pending)} items of mail wait and are not taken"))

    async def _run(self) -> None:
        while True:
            await self._event.wait()
            await self._window.acquire()
            self._event.clear()
            items = self._pending.take()
            self.messages += 1
            task = asyncio.create_task(self._deliver(items))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _deliver(self, items: list[T]) -> None:
        try:
            await self._send(items)
        except Exception as error:  # the peer decides what a failed call means
            self._failed(error)
        finally:
            self._window.release()

    async def close(self) -> None:
        """Stop sending; what is under way is left to end by itself."""
        tasks = [*self._under_way] if self._task is None else [self._task, *self._under_way]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
