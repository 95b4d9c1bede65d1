"""The replicas of one tier over simulated time: those that run, those that start, and those that drain."""

from __future__ import annotations

import math
import random

from cluster.planning.traffic import TierTraffic
from cluster.scaling.policies import Pace


class Fleet:
    """They come after their cold start and leave after draining; `Pace` applies what the policy says.

    chance: which spot machines are taken away.
    """

    def __init__(self, given: TierTraffic, chance: random.Random) -> None:
        self._given = given
        self._chance = chance
        scaling = given.scaling
        self._pace = Pace(
            scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.min_replicas, scaling.max_replicas
        )
        self.running = scaling.min_replicas
        self._starting: list[float] = []
        self._draining: list[float] = []
        self.changes = 0
        self._last = -1

    @property
    def starting(self) -> int:
        return len(self._starting)

    @property
    def asked(self) -> int:
        """Running and on their way: what Serve calls the target number of replicas."""
        return self.running + len(self._starting)

    @property
    def held(self) -> int:
        """All that cost something."""
        return self.asked + len(self._draining)

    def advance(self, now: float, tick_s: float) -> int:
        """Replicas come, go, and are taken away; lost ones are asked for again at once. Returns how many were lost."""
        ready = [at for at in self._starting if at <= now]
        self._starting = [at for at in self._starting if at > now]
        self.running += len(ready)
        self._draining = [until for until in self._draining if until > now]
        odds = 1 - math.exp(-self._given.losses_per_hour * tick_s / 3600)
        lost = sum(self._chance.random() < odds for _ in range(self.running)) if odds else 0
        self.running -= lost
        self._starting += [now + self._given.cold_start_s] * lost
        return lost

    def resize(self, now: float, wanted: int) -> None:
        """What the policy says, at the pace that is allowed."""
        size, self._pace = self._pace.apply(now, self.asked, wanted)
        change = size - self.asked
        if change > 0:
            self._starting += [now + self._given.cold_start_s] * change
        while change < 0:  # those that have not come yet go first
            if self._starting:
                self._starting.pop()
            else:
                self.running -= 1
                self._draining.append(now + self._given.drain_s)
            change += 1
        self.changes += size != self._last
        self._last = size
