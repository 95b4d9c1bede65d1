"""The chaos link: what it promises about order, loss and repetition, on a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.chaos_link import ChaosLink, ChaosSettings

PROBABILITY = st.floats(0, 1)


class Timeline:
    """Runs what was scheduled, in order of time, when told to."""

    def __init__(self) -> None:
        self.now = 50.0
        self._queue: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    def schedule(self, delay: float, call: Callable[[], Any]) -> None:
        # Ties run last-in first-out: an order that a link must not rely on.
        heapq.heappush(self._queue, (self.now + delay, -next(self._order), call))

    def run(self, until: float = float("inf")) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = max(self.now, until) if until != float("inf") else self.now


def send(settings: ChaosSettings, messages: int, spacing: float = 0.0, droppable: bool = True) -> list[int]:
    """Send 0, 1, 2, ... `spacing` seconds apart; returns them as they arrived."""
    timeline, arrived = Timeline(), list[int]()
    link = ChaosLink[int](arrived.append, settings, lambda _: droppable, timeline.schedule, timeline.clock)
    for message in range(messages):
        timeline.run(50.0 + message * spacing)
        link(message)
    timeline.run()
    assert link.sent == messages
    assert link.delivered == len(arrived)
    assert link.dropped == messages - len(set(arrived))
    return arrived


def test_a_calm_link_delivers_at_once() -> None:
    arrived: list[int] = []
    timeline = Timeline()
    link = ChaosLink[int](arrived.append, ChaosSettings(), schedule=timeline.schedule, clock=timeline.clock)
    link(1)
    link(2)
    assert arrived == [1, 2]


def test_a_fixed_delay_is_kept_to() -> None:
    timeline, times = Timeline(), list[float]()
    link = ChaosLink[int](
        lambda _: times.append(timeline.now),
        ChaosSettings(delay_ms=2),
        schedule=timeline.schedule,
        clock=timeline.clock,
    )
    for second in range(5):
        timeline.run(50.0 + second)
        link(second)
    timeline.run()
    assert times == pytest.approx([50.002, 51.002, 52.002, 53.002, 54.002])


@given(delay=st.floats(0, 20), jitter=st.floats(0, 20), spacing=st.floats(0, 0.01), seed=st.integers())
def test_delay_and_jitter_alone_keep_order(delay: float, jitter: float, spacing: float, seed: int) -> None:
    settings = ChaosSettings(delay_ms=delay, jitter_ms=jitter, seed=seed)
    assert send(settings, 40, spacing) == list(range(40))


@given(reorder=PROBABILITY, drop=PROBABILITY, duplicate=PROBABILITY, jitter=st.floats(0, 20), seed=st.integers())
def test_what_may_not_be_dropped_arrives_once_or_twice(
    reorder: float, drop: float, duplicate: float, jitter: float, seed: int
) -> None:
    settings = ChaosSettings(jitter_ms=jitter, reorder=reorder, drop=drop, duplicate=duplicate, seed=seed)
    arrived = send(settings, 40, droppable=False)
    assert set(arrived) == set(range(40))
    assert max(Counter(arrived).values()) <= 2


@given(seed=st.integers())
def test_fate_is_a_function_of_the_seed(seed: int) -> None:
    settings = ChaosSettings(delay_ms=1, jitter_ms=5, reorder=0.3, drop=0.3, duplicate=0.3, seed=seed)
    assert send(settings, 30, 0.001) == send(settings, 30, 0.001)


def test_loss_and_repetition_are_as_frequent_as_asked() -> None:
    """Odds of a false alarm 4e-9 (two tests at six standard deviations), for the fixed seed none."""
    arrived = Counter(send(ChaosSettings(drop=0.2, duplicate=0.1, seed=3), 10_000))
    assert abs(len(arrived) - 8000) < 6 * sqrt(10_000 * 0.2 * 0.8)
    twice = sum(times == 2 for times in arrived.values())
    assert abs(twice - 800) < 6 * sqrt(8_000 * 0.1 * 0.9)


def test_reordered_messages_are_overtaken() -> None:
    """A tenth of 1,000 messages is held back past several others; the rest keep their order among themselves."""
    arrived = send(ChaosSettings(delay_ms=2, reorder=0.1, seed=1), 1000, 0.0005)
    assert sorted(arrived) == list(range(1000))
    overtaken = {message for place, message in enumerate(arrived) if message < max(arrived[: place + 1])}
    assert 40 < len(overtaken) < 160
    rest = [message for message in arrived if message not in overtaken]
    assert rest == sorted(rest)


async def test_the_running_loop_is_used_by_default() -> None:
    done = asyncio.get_running_loop().create_future()
    ChaosLink[int](done.set_result, ChaosSettings(delay_ms=1))(7)
    assert await asyncio.wait_for(done, 10) == 7
