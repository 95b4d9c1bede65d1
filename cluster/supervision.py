"""When a model actor that died is placed again: at once, then after ever longer pauses, and at some point no more.

Pure: times are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WINDOW_S = 600.0
"""Deaths longer ago than this are forgotten."""
MOST_DEATHS = 6
"""So many within the window, and this place is given up: Ray Serve looks for another one."""


@dataclass(slots=True)
class Supervision:
    """The deaths of one replica's actors."""

    deaths: list[float] = field(default_factory=list)

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next one is placed; None: give this place up."""
        self.deaths = [death for death in self.deaths if now - death < WINDOW_S]
        self.deaths.append(now)
        before = len(self.deaths) - 1
        if before == MOST_DEATHS - 1:
            return None
        return 0.0 if before == 0 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (before - 1))
