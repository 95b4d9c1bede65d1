"""What comes and what serves it: the input of a replay through the autoscaling policies
(cluster/planning/replay.py)."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.settings import Settings
from cluster.config.deployment import Autoscaling
from cluster.scaling.policies import DraftGoals, TargetGoals

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DAY_S = 86_400.0


class Burst(Settings):
    """For a while, `factor` times as many requests."""

    at_s: NotNegative
    seconds: Positive
    factor: Positive


class TierTraffic(Settings):
    """One tier: bounds and pace, how it starts and ends, and how often spot machines are taken away."""

    scaling: Autoscaling = Autoscaling(max_replicas=64)
    slots: Annotated[int, Field(ge=1)] = 32
    cold_start_s: NotNegative = 60.0
    drain_s: NotNegative = 30.0
    losses_per_hour: NotNegative = 0.0
    """Of each replica: spot machines that are taken back. Their sequences move at once."""


class TrafficInput(Settings):
    """What comes, and what serves it."""

    seconds: Annotated[float, Field(gt=0, le=14 * DAY_S)] = DAY_S
    tick_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    requests_per_s: Positive = 40.0
    """At the peak of the day."""
    night: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Requests at the quietest hour, as a share of the peak; 1: constant."""
    bursts: tuple[Burst, ...] = ()
    tokens: Positive = 300.0
    """Mean length of an answer."""
    target_hardware: TargetSpec = TargetSpec(pass_ms=25, token_ms=0.1)
    draft_hardware: DraftSpec = DraftSpec(step_ms=3, row_ms=0.02)
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.8
    lookahead: Annotated[int, Field(ge=0, le=64)] = 8
    width: Annotated[int, Field(ge=1)] = 32
    """Nodes that a draft expands in a step."""
    target: TierTraffic = TierTraffic()
    draft: TierTraffic = TierTraffic(scaling=Autoscaling(min_replicas=0, max_replicas=256), slots=64, cold_start_s=30.0)
    target_goals: TargetGoals = TargetGoals()
    draft_goals: DraftGoals = DraftGoals()
    most_wait_s: Positive = 2.0
    """Objective for the wait of a request before it runs."""
    patience_s: Positive = 30.0
    """A request that has waited this long is turned away."""
    seed: Annotated[int, Field(ge=0)] = 0

    def rate(self, now: float) -> float:
        """Requests per second at `now`: quietest at 0 h and 24 h, most at 12 h, times what bursts are on."""
        day = self.night + (1 - self.night) * (0.5 - 0.5 * math.cos(2 * math.pi * now / DAY_S))
        burst = math.prod(b.factor for b in self.bursts if b.at_s <= now < b.at_s + b.seconds)
        return self.requests_per_s * day * burst


PRESETS: dict[str, TrafficInput] = {
    "constant": TrafficInput(night=1.0, seconds=4 * 3600),
    "day": TrafficInput(),
    "burst": TrafficInput(
        night=1.0, seconds=4 * 3600, requests_per_s=20.0, bursts=(Burst(at_s=3600, seconds=900, factor=5),)
    ),
    "spot": TrafficInput(draft=TrafficInput().draft.model_copy(update={"losses_per_hour": 0.5})),
    "internet": TrafficInput(
        requests_per_s=4000.0,
        tick_s=10.0,
        target=TierTraffic(scaling=Autoscaling(min_replicas=100, max_replicas=1000), slots=64, cold_start_s=120.0),
        draft=TierTraffic(
            scaling=Autoscaling(min_replicas=0, max_replicas=4000), slots=64, cold_start_s=60.0, losses_per_hour=0.1
        ),
    ),
}
"""For `outrider plan --traffic NAME`."""
