"""How busy a thread has been of late: what tells a tier that is short of replicas from one that waits for others."""

from __future__ import annotations

import math


class BusyShare:
    """Share of the last while (half a minute for the most part) that was spent at work. Times are of any clock."""

    MEMORY_S = 15.0

    def __init__(self) -> None:
        self._share = 0.0
        self._until = float("-inf")

    def worked(self, began: float, ended: float) -> None:
        """Work from `began` to `ended`; idle before it, since the last."""
        self._share = 1.0 - (1.0 - self.at(began)) * math.exp((began - ended) / self.MEMORY_S)
        self._until = ended

    def at(self, now: float) -> float:
        """The share, with nothing done since the last work."""
        return self._share * math.exp(min(0.0, self._until - now) / self.MEMORY_S)
