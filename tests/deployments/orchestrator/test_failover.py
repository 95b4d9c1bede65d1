"""An answer whose orchestrator was lost goes on at the first one that shows a sign of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from actors.messages import Delta
from deployments.orchestrator.failover import leave_alone, take_over
from deployments.orchestrator.heartbeat import BEAT, SilenceError, listening

Script = list[Delta | Exception]


class Lost(Exception):
    """As Ray's error of an actor that died."""


class Orchestrator:
    """Says its script, and is silent after it. One without a script stands still until it is woken."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.awake = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncGenerator[Delta]:
        if not self._script:
            await self.awake.wait()
            yield BEAT
        for one in self._script:
            if isinstance(one, Exception):
                raise one
            yield one
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled.set()


def asking(*scripts: Script) -> tuple[list[Orchestrator], Callable[[], Orchestrator]]:
    """Orchestrators in the order in which they are asked, as far as they were."""
    waiting, asked = iter(scripts), list[Orchestrator]()

    def ask() -> Orchestrator:
        asked.append(Orchestrator(next(waiting)))
        return asked[-1]

    return asked, ask


@pytest.mark.parametrize("sign", [BEAT, Delta((7,))])
async def test_one_that_stands_still_is_passed_over(sign: Delta) -> None:
    asked, ask = asking([], [sign, Delta((8,))], [])
    response, deltas, first = await take_over(ask, 3, Lost, 0.01, 0.01, 0.01)
    assert response is asked[1]
    assert first == sign
    assert await anext(deltas) == Delta((8,))
    assert not asked[0].cancelled.is_set()  # it would seem to have nothing to do
    asked[0].awake.set()
    await asyncio.wait_for(asked[0].cancelled.wait(), 10.0)
    assert not asked[1].cancelled.is_set()


async def test_one_that_fell_silent_is_cancelled_when_it_speaks_again() -> None:
    orchestrator = Orchestrator([])
    leave_alone(orchestrator, aiter(orchestrator))
    await asyncio.sleep(0)
    assert not orchestrator.cancelled.is_set()
    orchestrator.awake.set()
    await asyncio.wait_for(orchestrator.cancelled.wait(), 10.0)


async def test_the_last_one_has_more_time_than_those_before() -> None:
    asked, ask = asking([], [])
    answer = asyncio.create_task(take_over(ask, 2, Lost, 0.01, 60.0))
    while len(asked) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)  # several times what the first had
    asked[1].awake.set()
    response, _, _ = await answer
    assert response is asked[1]


async def test_after_a_dead_one_the_next_is_asked_at_once() -> None:
    asked, ask = asking([Lost()], [Lost()], [BEAT])
    response, _, _ = await take_over(ask, 4, Lost, 60.0, 60.0)
    assert response is asked[2]


async def test_when_all_are_lost_that_is_the_error() -> None:
    _, ask = asking([Lost()], [Lost()])
    with pytest.raises(Lost):
        await take_over(ask, 2, Lost, 60.0, 60.0)
    _, ask = asking([Lost()], [], [])
    with pytest.raises(SilenceError):
        await take_over(ask, 3, Lost, 0.01, 0.01, 0.01)


async def test_what_an_orchestrator_says_of_the_request_is_raised() -> None:
    _, ask = asking([], [ValueError("no such thing")])
    with pytest.raises(ValueError, match="no such thing"):
        await take_over(ask, 3, Lost, 0.01, 0.01, 0.01)


async def test_a_first_delta_is_not_lost_on_the_way() -> None:
    async def rest() -> AsyncGenerator[Delta]:
        yield Delta((2,))

    assert [delta async for delta in listening(rest(), first=Delta((1,)))] == [Delta((1,)), Delta((2,))]
    assert [delta async for delta in listening(rest())] == [Delta((2,))]


async def test_who_loses_one_after_the_other_waits_for_news_of_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second at once; before the third and the fourth twice as long each time."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asked, ask = asking([Lost()], [Lost()], [Lost()], [BEAT])
    response, _, first = await take_over(ask, 4, Lost, 1.0, 1.0, 0.3)
    assert (response, first, pauses) == (asked[3], BEAT, [0.3, 0.6])
