"""A seeded chaos link: wraps what delivers messages between two parts, and delays, reorders, drops or repeats them.

For tests in one process, and to add a fixed hop to emulated hardware. It knows nothing of what it carries; what may
be lost is for the caller to say (a `droppable` predicate), because a link that loses an opening has a repair and one
that loses a verdict has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from actors.settings import Settings

T = TypeVar("T")
Probability = Annotated[float, Field(ge=0, le=1)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)]


class ChaosSettings(Settings):
    """What a link does to messages. All zero: it delivers at once, in order, each one once."""

    delay_ms: Milliseconds = 0.0
    """Every message takes this long."""
    jitter_ms: Milliseconds = 0.0
    """And up to this much more, uniformly."""
    reorder: Probability = 0.0
    """A message overtaken by those after it, if they are sent within its extra delay; else order is kept."""
    drop: Probability = 0.0
    duplicate: Probability = 0.0
    """Delivered a second time, later."""
    seed: int = 0


class Fates:
    """Decides what happens to each message: the delays, in seconds, after which it is delivered (none: lost).

    A function of the seed and of the order of calls alone.
    """

    def __init__(self, settings: ChaosSettings) -> None:
        self._settings = settings
        self._random = Random(settings.seed)
        self._latest = float("-inf")

    def next(self, now: float, *, droppable: bool = True) -> list[float]:
        """Delays of the message sent at `now`."""
        settings, random = self._settings, self._random
        # Always the same number of draws, so that one message's fate does not depend on another's kind.
        lost, late, twice, jitter, extra, again = (random.random() for _ in range(6))
        arrival = now + (settings.delay_ms + settings.jitter_ms * jitter) / 1e3
        longest = max(settings.jitter_ms, settings.delay_ms, 1.0) / 1e3
        if late < settings.reorder:
            arrival += longest * (1 + 2 * extra)
        else:
            if arrival <= self._latest and self._latest > now:
                arrival = self._latest + 1e-6  # timers set for the same instant may fire in any order
            self._latest = arrival
        if droppable and lost < settings.drop:
            return []
        arrivals = [arrival]
        if twice < settings.duplicate:
            arrivals.append(arrival + longest * 3 * again)
        return [at - now for at in arrivals]


class ChaosLink(Generic[T]):
    """Stands in for `deliver`: call it with a message, and `deliver` gets it when, and as often as, fate has it.

    schedule: how to call something later, `loop.call_later` of the running loop when None; clock goes with it.
    """

    def __init__(
        self,
        deliver: Callable[[T], object],
        settings: ChaosSettings,
        droppable: Callable[[T], bool] = lambda message: True,
        schedule: Callable[[float, Callable[[], Any]], Any] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._deliver = deliver
        self._droppable = droppable
        self._fates = Fates(settings)
        self._schedule = schedule
        self._clock = clock
        self.sent = 0
        self.dropped = 0
        self.delivered = 0

    def __call__(self, message: T) -> None:
        """Send one message."""
        if self._schedule is None or self._clock is None:
            loop = asyncio.get_running_loop()
            self._schedule = self._schedule or loop.call_later
            self._clock = self._clock or loop.time
        self.sent += 1
        delays = self._fates.next(self._clock(), droppable=self._droppable(message))
        self.dropped += not delays
        for delay in delays:
            if delay <= 0:
                self._arrive(message)
            else:
                self._schedule(delay, lambda: self._arrive(message))

    def _arrive(self, message: T) -> None:
        self.delivered += 1
        self._deliver(message)
