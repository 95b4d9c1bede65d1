"""How a client tries again what may pass: overload, lost replicas, lost connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LONGEST_PAUSE_S = 20.0


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `most` attempts after the first, with doubling pauses and full jitter.

    pause_s: longest pause before the second attempt. No pause is shorter than the server asked for, which an error
    says as `retry_after`, in seconds.
    """

    most: int
    pause_s: float = 0.5

    async def run(self, attempt: Callable[[], Awaitable[T]], passing: tuple[type[Exception], ...]) -> T:
        """What the first attempt that succeeds returns. Raises the last error, or at once one that is not `passing`."""
        for number in range(self.most):
            try:
                return await attempt()
            except passing as error:
                await asyncio.sleep(self.pause(number, getattr(error, "retry_after", 0.0), random.uniform(0, 1)))
        return await attempt()

    def pause(self, number: int, least_s: float, share: float) -> float:
        """Seconds after attempt `number` (from 0) has failed; `share`, of [0, 1], is the jitter."""
        longest_s = min(LONGEST_PAUSE_S, self.pause_s * 2.0**number)
        return max(least_s, share * longest_s)
