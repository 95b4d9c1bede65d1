"""When a model actor that died is placed again, and when one that is being built is taken for dead.

Pure: times are handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from actors.errors import EngineError

T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WINDOW_S = 600.0
"""Deaths longer ago than this are forgotten."""
MOST_DEATHS = 6
"""So many within the window, and this place is given up: Ray Serve looks for another one."""


@dataclass(slots=True)
class Supervision:
    """The deaths of one replica's actors: placed again at once, then after ever longer pauses, at last no more."""

    deaths: list[float] = field(default_factory=list)

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next one is placed; None: give this place up."""
        self.deaths = [death for death in self.deaths if now - death < WINDOW_S]
        self.deaths.append(now)
        before = len(self.deaths) - 1
        if before == MOST_DEATHS - 1:
            return None
        return 0.0 if before == 0 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (before - 1))


@dataclass(slots=True)
class Construction:
    """A model actor from the moment it is placed until its model is built, which may take as long as it likes, but not
    in silence: the actor answers pings meanwhile.

    began: when it was placed. first_sign_s: until its first answer, which waits for a place and for a process;
    silence_s: between answers after that.
    """

    began: float
    first_sign_s: float
    silence_s: float
    heard: float | None = None

    def overdue(self, now: float) -> str | None:
        """Why it is taken for dead; None while it is not."""
        if self.heard is None:
            late = now - self.began > self.first_sign_s
            return f"it gave no sign of life within {self.first_sign_s:g} s" if late else None
        silent = now - self.heard > self.silence_s
        return f"it has been silent for {self.silence_s:g} s while its model was built" if silent else None


async def built(
    model: Awaitable[T],
    ping: Callable[[], Awaitable[object]],
    construction: Construction,
    clock: Callable[[], float],
    period_s: float,
) -> T:
    """The result of `model`, while its actor answers pings.

    ping: raises TimeoutError when there is no answer in time, and something else when the actor cannot be built any
    more, which is raised here. Raises EngineError when the construction is overdue.
    """
    waiting = asyncio.ensure_future(model)
    try:
        while True:
            await asyncio.wait({waiting}, timeout=period_s)
            if waiting.done():
                return waiting.result()
            try:
                await ping()
                construction.heard = clock()
            except TimeoutError:
                if (reason := construction.overdue(clock())) is not None:
                    raise EngineError(reason) from None
    finally:
        waiting.cancel()
