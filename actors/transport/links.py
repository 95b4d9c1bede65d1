"""Links: how an orchestrator and a replica of a tier talk.

One long-lived stream per pair brings results (verdicts or offers), ordinary calls carry mail the other way. Both ends
coalesce: what piles up while a message is under way leaves as one message, so that the number of messages does not
grow with the number of sequences.

`LinkTable` is the replica's end, `Outbox` the orchestrator's. `LocalPeer` and `RayPeer` carry calls and streams to a
plain object in this process or to a Ray actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class LinkTable(Generic[T]):
    """A replica's links, by the name of the orchestrator at the other end.

    A link begins with `meet` and lives while its orchestrator shows signs of life (`touch`); what it held is to be
    given back when it is among the `expired`, because an orchestrator that dies says no goodbye. A link that ended is
    never taken up again, so that one who was taken for dead and comes back is told so, and is not listened to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: dict[str, list[T]] = {}
        self._events: dict[str, asyncio.Event] = {}
        self._seen: dict[str, float] = {}
        self._closed = False

    def meet(self, link: str) -> None:
        """A link begins."""
        self._seen[link] = self._clock()

    def touch(self, link: str) -> bool:
        """The orchestrator behind `link` is alive. False: the link has ended, or never began."""
        if link not in self._seen:
            return False
        self._seen[link] = self._clock()
        return True

    def expired(self, limit_s: float) -> list[str]:
        """Links not touched for `limit_s` seconds; they are forgotten here."""
        horizon = self._clock() - limit_s
        gone = [link for link, seen in self._seen.items() if seen < horizon]
        for link in gone:
            self.forget(link)
        return gone

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
            event = self._events.get(link)
            if event is not None:
                self._waiting[link].append(item)
                event.set()

    async def stream(self, link: str) -> AsyncIterator[list[T]]:
        """Items for `link` as they come, all that wait at once. A second stream of the same name ends the first."""
        if (former := self._events.get(link)) is not None:
            former.set()
        event = self._events[link] = asyncio.Event()
        self._waiting[link] = []
        self.touch(link)
        while not self._closed:
            await event.wait()
            if self._events.get(link) is not event:
                return
            event.clear()
            items, self._waiting[link] = self._waiting[link], []
            if items:
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


class LocalPeer:
    """A plain object in this process."""

    def __init__(self, target: object) -> None:
        self._target = target

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._target, method)(*args)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        async for item in getattr(self._target, method)(*args):
            yield item


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


class Outbox(Generic[T]):
    """Mail to one replica: at most `window` calls under way, the rest waits and leaves together, in order."""

    def __init__(self, send: Callable[[list[T]], Awaitable[None]], failed: Callable[[BaseException], None]) -> None:
        self._send = send
        self._failed = failed
        self._pending: list[T] = []
        self._event = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._under_way: set[asyncio.Task[None]] = set()
        self._window = asyncio.Semaphore(4)
        self.messages = 0

    def post(self, item: T) -> None:
        """Queue one item; it leaves as soon as the event loop turns."""
        self._pending.append(item)
        self._event.set()

    async def _run(self) -> None:
        while True:
            await self._event.wait()
            await self._window.acquire()
            self._event.clear()
            items, self._pending = self._pending, []
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
        self._task.cancel()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(self._task, *self._under_way, return_exceptions=True)
