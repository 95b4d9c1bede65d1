"""Traffic through the real autoscaling policies: how many replica-hours a day takes, and how often objectives are met.

A fluid model on a clock that ticks: requests arrive (Poisson around a curve), wait in order, run at the speed that
the hardware's times and the draft tier's coverage allow, and end (lengths are memoryless). Every tick the policies of
cluster.autoscaling see what replicas would report, averaged over Serve's look-back, and `Pace` applies what they say;
replicas come after their cold start, and leave after draining. Deterministic: a function of its input.

What it leaves out: prefill, unequal load between replicas, and everything that tests with real processes are for.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from actors.engines.emulated_presets import DraftSpec, TargetSpec
from actors.settings import Settings
from cluster.autoscaling import (
    DraftGoals,
    DraftLoad,
    Memory,
    Pace,
    TargetGoals,
    TargetLoad,
    draft_replicas,
    target_replicas,
)
from cluster.config import Autoscaling
from cluster.planner import expected_tokens

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LOOK_BACK_S = 30.0
"""Serve hands policies the mean of what was reported during this time."""
GUESSES_PER_TOKEN = 3.0
"""Nodes that a draft expands for each draft token that is verified: the outcome tree's alternatives."""
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


@dataclass(slots=True)
class TrafficResult:
    """Hours are of replicas, from being asked for until gone. `sizes` are (time, targets, drafts) held, per tick."""

    target_hours: float = 0.0
    draft_hours: float = 0.0
    target_peak: int = 0
    draft_peak: int = 0
    requests: float = 0.0
    on_time: float = 0.0
    """Requests that ran within the objective."""
    turned_away: float = 0.0
    tokens: float = 0.0
    lost_replicas: int = 0
    decisions: int = 0
    """Changes of either tier's size."""
    speedup: float = 0.0
    """Tokens served over what the same running sequences would have got by plain decoding."""
    sizes: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Share of requests that met the objective; 1 without any."""
        return self.on_time / self.requests if self.requests else 1.0


class _Fleet:
    """One tier's replicas: those that run, those that start, and those that drain."""

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

    _last = -1


@dataclass(frozen=True, slots=True)
class Speed:
    """What one running sequence gets. `coverage` is the share of sequences with proposals."""

    tokens_per_s: float
    plain_tokens_per_s: float
    coverage: float
    declined: bool
    """No draft token is worth verifying at this load."""


def speed(given: TrafficInput, sequences: float, targets: int, drafts: int) -> Speed:
    """Speed of each of `sequences` that run evenly on `targets`, with the lookahead that gives most."""
    hardware = given.target_hardware
    each = max(1.0, sequences / max(1, targets))
    plain = hardware.pass_ms + hardware.token_ms * each

    def rate(k: int) -> float:
        return expected_tokens(given.acceptance, k) / (hardware.pass_ms + hardware.token_ms * each * (1 + k))

    best = max(range(given.lookahead + 1), key=rate)
    if best == 0:
        return Speed(1e3 / plain, 1e3 / plain, 0.0, declined=True)
    step = given.draft_hardware.step_ms + given.draft_hardware.row_ms * given.width
    nodes = given.width * plain / step
    followed = min(float(given.draft.slots), nodes / (GUESSES_PER_TOKEN * best))
    coverage = min(1.0, drafts * followed / max(sequences, 1e-9))
    each_s = 1e3 * (coverage * rate(best) + (1 - coverage) / plain)
    return Speed(each_s, 1e3 / plain, coverage, declined=False)


class _Means:
    """Mean of what was reported within the look-back."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, tuple[float, ...]]] = deque()

    def add(self, now: float, *values: float) -> tuple[float, ...]:
        self._kept.append((now, values))
        while self._kept[0][0] <= now - LOOK_BACK_S:
            self._kept.popleft()
        return tuple(sum(column) / len(self._kept) for column in zip(*(v for _, v in self._kept), strict=True))


class _Traffic:
    def __init__(self, given: TrafficInput) -> None:
        self.given = given
        self._chance = random.Random(given.seed)
        self.targets = _Fleet(given.target, self._chance)
        self.drafts = _Fleet(given.draft, self._chance)
        self._queue: deque[list[float]] = deque()  # [when they came, how many]
        self._running = 0.0
        self._means = _Means()
        self._memories = Memory(), Memory()
        self._plain_tokens = 0.0
        self.result = TrafficResult()

    def run(self, watch: Callable[[float, TargetLoad], None] | None) -> TrafficResult:
        given, result = self.given, self.result
        ticks = math.ceil(given.seconds / given.tick_s)
        for tick in range(ticks):
            now = tick * given.tick_s
            result.lost_replicas += self.targets.advance(now, given.tick_s) + self.drafts.advance(now, given.tick_s)
            self._arrive(now)
            self._admit(now)
            load = self._serve(now)
            self._scale(now, load)
            if watch is not None:
                watch(now, load)
            hours = given.tick_s / 3600
            result.target_hours += self.targets.held * hours
            result.draft_hours += self.drafts.held * hours
            result.target_peak = max(result.target_peak, self.targets.held)
            result.draft_peak = max(result.draft_peak, self.drafts.held)
            result.sizes.append((now, self.targets.asked, self.drafts.asked))
        result.decisions = self.targets.changes + self.drafts.changes
        result.speedup = result.tokens / self._plain_tokens if self._plain_tokens else 1.0
        return result

    def _arrive(self, now: float) -> None:
        mean = self.given.rate(now) * self.given.tick_s
        came = float(
            max(0, round(self._chance.gauss(mean, math.sqrt(mean)))) if mean > 50 else _poisson(mean, self._chance)
        )
        self.result.requests += came
        if came:
            self._queue.append([now, came])
        while self._queue and now - self._queue[0][0] > self.given.patience_s:
            self.result.turned_away += self._queue.popleft()[1]

    def _admit(self, now: float) -> None:
        room = self.targets.running * self.given.target.slots - self._running
        while self._queue and room > 0:
            came, count = self._queue[0]
            taken = min(count, room)
            room -= taken
            self._running += taken
            if now - came <= self.given.most_wait_s:
                self.result.on_time += taken
            if taken == count:
                self._queue.popleft()
            else:
                self._queue[0][1] = count - taken

    def _serve(self, now: float) -> TargetLoad:
        """A tick of decoding; returns what the mean target reports."""
        given, running = self.given, self._running
        now_speed = speed(given, running, self.targets.running, self.drafts.running)
        served = running if self.targets.running else 0.0
        ended = served * -math.expm1(-now_speed.tokens_per_s * given.tick_s / given.tokens)
        self._running -= ended
        self.result.tokens += ended * given.tokens
        self._plain_tokens += ended * given.tokens * now_speed.plain_tokens_per_s / now_speed.tokens_per_s
        count = max(1, self.targets.running)
        waiting = sum(cohort[1] for cohort in self._queue)
        active, queued, gap, starved, declined = self._means.add(
            now,
            running / count,
            waiting / count,
            1 / now_speed.tokens_per_s if running else 0.0,
            0.0 if now_speed.declined or not running else 1 - now_speed.coverage,
            float(now_speed.declined),
        )
        return TargetLoad(active, queued, given.target.slots, active / given.target.slots, gap, starved, declined)

    def _scale(self, now: float, load: TargetLoad) -> None:
        given, targets, drafts = self.given, self.targets, self.drafts
        loads = [load] * targets.running
        waiting = sum(cohort[1] for cohort in self._queue)
        outside = 0.0 if targets.running else waiting
        of_targets, of_drafts = self._memories
        wanted = target_replicas(loads, targets.running, targets.starting, outside, given.target_goals, of_targets, now)
        sessions = min(float(given.draft.slots), self._running / max(1, drafts.running))
        followers = [DraftLoad(sessions, given.draft.slots)] * drafts.running
        drafting = draft_replicas(followers, loads, drafts.running, drafts.starting, given.draft_goals, of_drafts, now)
        self._memories = wanted.memory, drafting.memory
        targets.resize(now, wanted.replicas)
        drafts.resize(now, drafting.replicas)


def _poisson(mean: float, chance: random.Random) -> int:
    """Knuth's method; for small means."""
    limit, product, count = math.exp(-mean), chance.random(), 0
    while product > limit:
        product *= chance.random()
        count += 1
    return count


def replay(given: TrafficInput, watch: Callable[[float, TargetLoad], None] | None = None) -> TrafficResult:
    """Run the traffic. watch: called every tick with the time and what the mean target reports."""
    return _Traffic(given).run(watch)


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
