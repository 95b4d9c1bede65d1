"""Who gives an answer, or goes on with one whose orchestrator was lost: the first of several that shows a sign of life.

Serve's router cannot be told whom to avoid. Until Serve itself has found out, it may choose the very replica that
stands still, and that more than once; so the next one is asked before the last one has been given up. All of them
would say the same, and only one is listened to.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from actors.messages import Delta
from deployments.orchestrator.heartbeat import SilenceError

PATIENCE_S = 0.3
"""Who lives says so at once; where several have been asked, the next one is after this, and twice that for each more:
where all are merely slow, it must not be for being asked too often."""


class Response(Protocol):
    """What a call of an orchestrator returns at once (handle.Call)."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self) -> None: ...


async def take_over(
    ask: Callable[[], Response],
    most: int,
    lost: type[Exception],
    first_s: float,
    silence_s: float,
    patience_s: float = PATIENCE_S,
) -> tuple[Response, AsyncIterator[Delta], Delta]:
    """The response of whoever spoke first, the rest of its deltas, and the one that it spoke.

    The others are left alone (see `leave_alone`).

    ask: calls one more orchestrator, of `most` in all; the next at once when one dies, which is what `lost` means, but
    not when one after the other does: whoever chooses them has yet to learn who is gone.
    first_s, patience_s, silence_s: how long the first one, the second one, and the last one have to speak.
    Raises what an orchestrator raised; SilenceError when all are silent.
    """
    asked: dict[asyncio.Future[Delta], tuple[Response, AsyncIterator[Delta]]] = {}
    calls, losses, failure = 0, 0, Exception("nobody was asked")
    try:
        while calls < most or asked:
            if losses > 1 and calls < most and not asked:
                await asyncio.sleep(patience_s * 2 ** (losses - 2))
            if calls < most:
                response, calls = ask(), calls + 1
                deltas = aiter(response)
                asked[asyncio.ensure_future(anext(deltas))] = response, deltas
            limit_s = silence_s if calls == most else first_s if calls == 1 else patience_s * 2 ** (calls - 2)
            done, _ = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and calls == most:
                raise SilenceError(f"{most} orchestrators were asked, and none of those that are left has spoken")
            for future in done:
                response, deltas = asked.pop(future)
                try:
                    return response, deltas, future.result()
                except (lost, StopAsyncIteration) as error:
                    losses, failure = losses + 1, error
        raise failure
    finally:
        for future, (response, _) in asked.items():
            _watch(future, response)


def leave_alone(response: Response, deltas: AsyncIterator[Delta]) -> None:
    """Nobody waits for this one any more. It is cancelled when it speaks again, if it ever does, and not before.

    Serve's router prefers whoever has the fewest calls under way. To cancel those of one that stands still would make
    it the first choice of all that is asked next.
    """
    _watch(asyncio.ensure_future(anext(deltas)), response)


_left_alone: set[asyncio.Future[Delta]] = set()
"""The event loop itself would forget them."""


def _watch(future: asyncio.Future[Delta], response: Response) -> None:
    _left_alone.add(future)
    future.add_done_callback(functools.partial(_spoke_too_late, response))


def _spoke_too_late(response: Response, future: asyncio.Future[Delta]) -> None:
    _left_alone.discard(future)
    if not future.cancelled() and future.exception() is None:
        response.cancel()
