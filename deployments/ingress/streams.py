"""Several generators as one stream, and answers that end when their client goes. Knows nothing of what is streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

T = TypeVar("T")


class GoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def merged(
    streams: Sequence[AsyncIterator[T]], at_once: int | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, with the stream's index. An error of one ends all.

    at_once: so many streams run; the next one begins when one of them has ended, in their order. None: all do.
    Closing the generator closes every stream, also those in the middle of waiting.
    """
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await _close(streams[0])
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

    turns = asyncio.Semaphore(at_once or len(streams))

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async with turns:
                async for item in stream:
                    await queue.put((index, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
        finally:
            await _close(stream)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, Exception):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_pauses(source: AsyncGenerator[T, None], period_s: float) -> AsyncGenerator[T | None, None]:
    """The items of `source`, and None whenever none has come for `period_s`. Closing the generator closes `source`."""
    task: asyncio.Future[T] | None = None
    try:
        while True:
            task = asyncio.ensure_future(anext(source))
            while not (await asyncio.wait({task}, timeout=period_s))[0]:
                yield None
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await source.aclose()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes first. Raises GoneError then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed whatever ends the response."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        super().__init__(source, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            with contextlib.suppress(RuntimeError):  # already being closed by the cancellation
                await self._source.aclose()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _close(stream: Any) -> None:
    if hasattr(stream, "aclose"):
        await stream.aclose()
