"""Who gives an answer, or goes on with one whose orchestrator was lost: the first of several that shows a sign of life.

Serve's router cannot be told whom to avoid. Until Serve itself has found out, it may choose the very replica that
stands still, and that more than once; so the next one is asked before the last one has been given up. All of them
would say the same, and only one is listened to.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from actors.messages import Delta
from deployments.beats import BEAT_S, SilenceError

PATIENCE_S = 1.5 * BEAT_S
"""Who lives beats within `BEAT_S`; where one was lost, the next one is asked after this."""
MOST_THREADS = 32
"""Made when they are needed: each cancellation of a call to a node that stands still takes one for a while."""


class Response(Protocol):
    """What a call of an orchestrator returns at once (Serve's DeploymentResponseGenerator)."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self) -> None: ...


async def take_over(
    ask: Callable[[], Response], most: int, lost: type[Exception], patience_s: float
) -> tuple[Response, AsyncIterator[Delta], Delta]:
    """The response of whoever spoke first, the rest of its deltas, and the one that it spoke.

    The others are let go as soon as they speak. Not before: Serve's router waits for a call to be accepted in the same
    thread that would have to wait for its cancellation.

    ask: calls one more orchestrator, of `most` in all; after `patience_s`, or at once when one dies, which is what
    `lost` means.
    Raises what an orchestrator raised; SilenceError when all are silent.
    """
    asked: dict[asyncio.Future[Delta], tuple[Response, AsyncIterator[Delta]]] = {}
    calls, failure = 0, Exception("nobody was asked")
    try:
        while calls < most or asked:
            if calls < most:
                response, calls = ask(), calls + 1
                deltas = aiter(response)
                asked[asyncio.ensure_future(anext(deltas))] = response, deltas
            done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and calls == most:
                raise SilenceError(f"{most} orchestrators were asked, and none of those that are left has spoken")
            for future in done:
                response, deltas = asked.pop(future)
                try:
                    return response, deltas, future.result()
                except (lost, StopAsyncIteration) as error:
                    failure = error
        raise failure
    finally:
        for future, (response, _) in asked.items():
            _left_alone.add(future)
            future.add_done_callback(functools.partial(_spoke_too_late, response))


_left_alone: set[asyncio.Future[Delta]] = set()
"""Whoever was asked, and has not spoken; the event loop itself would forget them."""


def _spoke_too_late(response: Response, future: asyncio.Future[Delta]) -> None:
    _left_alone.discard(future)
    if not future.cancelled() and future.exception() is None:
        let_go(response)


_letting_go = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="letting-go")


def let_go(response: Response) -> None:
    """Cancel a call, without waiting for it: Ray (2.60) returns from the cancellation of a call to a node that stands
    still when it has given that node up, half a minute later."""
    _letting_go.submit(response.cancel)
