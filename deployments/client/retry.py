"""How long to wait before a request that may yet succeed is sent again."""

from __future__ import annotations

import random
from collections.abc import Callable

LONGEST_PAUSE_S = 20.0
FIRST_PAUSE_S = 0.5


def backoff_s(
    attempt: int, asked_s: float = 0.0, first_s: float = FIRST_PAUSE_S, draw: Callable[[], float] = random.random
) -> float:
    """Seconds after try number `attempt` (from 0) failed: doubling, with full jitter, never shorter than `asked_s`.

    asked_s: what the server's Retry-After said. first_s: longest pause after the first try. draw: from [0, 1).
    Full jitter: Brooker, "Exponential Backoff And Jitter", 2015.
    """
    return max(asked_s, draw() * min(LONGEST_PAUSE_S, first_s * 2.0**attempt))
