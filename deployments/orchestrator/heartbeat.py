"""Life signs in a stream of deltas: silence means death, so who is alive but has nothing to say says so.

A process that stands still closes no connection; its stream merely stops. Between processes every stream therefore
carries an empty delta at its beginning and at least every `BEAT_S`, and whoever reads one gives up after `SILENCE_S`
without any.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from actors.messages import Delta

BEAT_S = 1.0
SILENCE_S = 10.0
BEAT = Delta()


class SilenceError(Exception):
    """The other end of a stream gave no sign of life."""


async def with_heartbeats(deltas: AsyncGenerator[Delta], period_s: float = BEAT_S) -> AsyncGenerator[Delta]:
    """`deltas`, with an empty one at once and wherever there was none for `period_s`. Closing it closes `deltas`."""
    waiting = asyncio.ensure_future(anext(deltas))
    try:
        yield BEAT
        while True:
            await asyncio.wait({waiting}, timeout=period_s)
            if not waiting.done():
                yield BEAT
                continue
            try:
                delta = waiting.result()
            except StopAsyncIteration:
                return
            yield delta
            waiting = asyncio.ensure_future(anext(deltas))
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await deltas.aclose()


async def listening(
    deltas: AsyncIterator[Delta], silence_s: float = SILENCE_S, first: Delta = BEAT
) -> AsyncGenerator[Delta]:
    """`first` and `deltas` without the empty ones. Raises SilenceError after `silence_s` without any."""
    if first != BEAT:
        yield first
    while True:
        try:
            delta = await asyncio.wait_for(anext(deltas), silence_s)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise SilenceError(f"an orchestrator has been silent for {silence_s:g} s") from None
        if delta != BEAT:
            yield delta
