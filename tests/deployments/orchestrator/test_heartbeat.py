"""Life signs: whoever has nothing to say says so, and silence is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from actors.messages import Delta
from deployments.orchestrator.heartbeat import BEAT, SilenceError, listening, with_heartbeats


class Source:
    """Says a token whenever it is told to, and notes that it was closed."""

    def __init__(self) -> None:
        self.tokens: asyncio.Queue[int] = asyncio.Queue()
        self.closed = False

    async def deltas(self) -> AsyncGenerator[Delta]:
        try:
            while True:
                token = await self.tokens.get()
                if token < 0:
                    return
                yield Delta((token,))
        finally:
            self.closed = True


async def test_who_is_asked_says_at_once_that_it_lives() -> None:
    stream = with_heartbeats(Source().deltas(), period_s=60.0)
    assert await anext(stream) == BEAT
    await stream.aclose()


async def test_a_silent_stream_beats_and_loses_nothing() -> None:
    source = Source()
    stream = with_heartbeats(source.deltas(), period_s=0.01)
    assert [await anext(stream), await anext(stream)] == [BEAT, BEAT]
    for token in (1, 2, -1):
        source.tokens.put_nowait(token)
    assert [delta async for delta in listening(stream)] == [Delta((1,)), Delta((2,))]
    assert source.closed


async def test_closing_a_beating_stream_closes_its_source() -> None:
    source = Source()
    stream = with_heartbeats(source.deltas(), period_s=0.01)
    assert [await anext(stream), await anext(stream)] == [BEAT, BEAT]
    await stream.aclose()
    assert source.closed


async def test_silence_is_found() -> None:
    source = Source()
    source.tokens.put_nowait(5)
    stream = listening(source.deltas(), silence_s=0.05)
    assert await anext(stream) == Delta((5,))
    with pytest.raises(SilenceError, match=r"silent for 0\.05 s"):
        await anext(stream)
