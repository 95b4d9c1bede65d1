"""Many whole answers in one call: what a batch costs on its way between processes does not grow with its requests.

Requests that are made in the same turn of the event loop travel together, and answers that are complete in the same
turn come back together. Nothing is waited for: one request alone is a bundle of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from actors.errors import EngineError, OutriderError
from actors.messages import Delta, GenerationRequest, joined
from deployments.orchestrator.heartbeat import BEAT_S, SILENCE_S, SilenceError

Outcome = tuple[int, Delta | OutriderError]
"""A request's place in its bundle, and its whole answer, or what went wrong."""
Call = Callable[[list[GenerationRequest]], AsyncIterator[list[Outcome]]]

LARGEST = 256


async def answered(
    generate: Callable[[GenerationRequest], AsyncGenerator[Delta]],
    requests: Sequence[GenerationRequest],
    period_s: float = BEAT_S,
) -> AsyncGenerator[list[Outcome]]:
    """Outcomes as they come, all that are there at once; an empty list after `period_s` without any is a life sign.

    Closing it ends every answer that is not complete.
    """
    ready: list[Outcome] = []
    some = asyncio.Event()

    async def one(place: int, request: GenerationRequest) -> None:
        outcome: Delta | OutriderError
        try:
            async with aclosing(generate(request)) as deltas:
                outcome = joined([delta async for delta in deltas])
        except OutriderError as error:
            outcome = error
        except Exception as error:
            outcome = EngineError(f"generation failed: {type(error).__name__}")
        ready.append((place, outcome))
        some.set()

    tasks = [asyncio.create_task(one(place, request)) for place, request in enumerate(requests)]
    left = len(tasks)
    try:
        while left:
            try:
                async with asyncio.timeout(period_s):
                    await some.wait()
            except TimeoutError:
                pass
            some.clear()
            found, ready[:] = ready[:], []
            left -= len(found)
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RequestBatcher:
    """The caller's end. Lives on one event loop.

    call: sends a bundle and streams its outcomes; closing the stream cancels what is left of it.
    translate: makes an error of the call one of actors/errors.py; all requests that are left get it.
    """

    def __init__(self, call: Call, translate: Callable[[Exception], Exception], silence_s: float = SILENCE_S) -> None:
        self._call = call
        self._translate = translate
        self._silence = silence_s
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Delta]]] = []
        self._carrying: set[asyncio.Task[None]] = set()

    async def answer(self, request: GenerationRequest) -> Delta:
        """The whole answer. Raises the errors of actors/errors.py."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Delta] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((request, future))
        return await future

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), LARGEST):
            task = asyncio.create_task(self._carry(waiting[start : start + LARGEST]))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, bundle: list[tuple[GenerationRequest, asyncio.Future[Delta]]]) -> None:
        futures = [future for _, future in bundle]
        me = asyncio.current_task()
        assert me is not None  # runs as a task

        def settled(_: asyncio.Future[Delta]) -> None:
            if all(future.done() for future in futures) and any(future.cancelled() for future in futures):
                me.cancel()  # nobody waits any more

        for future in futures:
            future.add_done_callback(settled)
        outcomes = self._call([request for request, _ in bundle])
        try:
            while not all(future.done() for future in futures):
                async with asyncio.timeout(self._silence):
                    found = await anext(outcomes)
                for place, outcome in found:
                    if futures[place].done():
                        continue
                    if isinstance(outcome, Delta):
                        futures[place].set_result(outcome)
                    else:
                        futures[place].set_exception(outcome)
        except Exception as error:
            kind = SilenceError("no sign of life") if isinstance(error, TimeoutError) else error
            for future in futures:
                if not future.done():
                    future.set_exception(self._translate(kind))
        finally:
            if isinstance(outcomes, AsyncGenerator):
                await outcomes.aclose()
