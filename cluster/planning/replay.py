"""Traffic through the real autoscaling policies: how many replica-hours a day takes, and how often objectives are met.

A fluid model on a clock that ticks: requests arrive (Poisson around a curve), wait in order, run at the speed that
the hardware's times and the draft tier's coverage allow, and end (lengths are memoryless). Every tick the policies of
cluster.scaling.policies see what replicas would report, averaged over Serve's look-back, and `Pace` applies what
they say; replicas come after their cold start, and leave after draining. Deterministic: a function of its input.

What it leaves out: prefill, unequal load between replicas, and everything that tests with real processes are for.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.planning.fleet import Fleet
from cluster.planning.planner import expected_tokens
from cluster.planning.traffic import TrafficInput
from cluster.scaling.policies import DraftLoad, Memory, TargetLoad, draft_replicas, target_replicas

GUESSES_PER_TOKEN = 3.0
"""Nodes that a draft expands for each draft token that is verified: the outcome tree's alternatives."""


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


@dataclass(frozen=True, slots=True)
class Speed:
    """What one running sequence gets. `coverage` is the share of sequences with proposals."""

    tokens_per_s: float
    plain_tokens_per_s: float
    coverage: float
    busy: float
    """Share of the time in which drafts work."""
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
        return Speed(1e3 / plain, 1e3 / plain, 0.0, 0.0, declined=True)
    step = given.draft_hardware.step_ms + given.draft_hardware.row_ms * given.width
    nodes = given.width * plain / step
    followed = min(float(given.draft.slots), nodes / (GUESSES_PER_TOKEN * best))
    followed_by_all = max(drafts * followed, 1e-9)
    coverage = min(1.0, followed_by_all / max(sequences, 1e-9))
    each_s = 1e3 * (coverage * rate(best) + (1 - coverage) / plain)
    busy = min(1.0, sequences / followed_by_all)
    return Speed(each_s, 1e3 / plain, coverage, busy, declined=False)


class _Means:
    """Mean of what was reported within the look-back of a tier, in seconds."""

    def __init__(self, look_back_s: float) -> None:
        self._look_back_s = look_back_s
        self._kept: deque[tuple[float, tuple[float, ...]]] = deque()

    def add(self, now: float, *values: float) -> tuple[float, ...]:
        self._kept.append((now, values))
        while self._kept[0][0] <= now - self._look_back_s:
            self._kept.popleft()
        return tuple(sum(column) / len(self._kept) for column in zip(*(v for _, v in self._kept), strict=True))


class _Traffic:
    def __init__(self, given: TrafficInput) -> None:
        self.given = given
        self._chance = random.Random(given.seed)
        self.targets = Fleet(given.target, self._chance)
        self.drafts = Fleet(given.draft, self._chance)
        self._queue: deque[list[float]] = deque()  # [when they came, how many]
        self._running = 0.0
        self._of_targets = _Means(given.target.scaling.look_back_s)
        self._of_drafts = _Means(given.draft.scaling.look_back_s)
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
            load, busy = self._serve(now)
            self._scale(now, load, busy)
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

    def _serve(self, now: float) -> tuple[TargetLoad, float]:
        """A tick of decoding; returns what the mean target reports, and how busy the mean draft is."""
        given, running = self.given, self._running
        now_speed = speed(given, running, self.targets.running, self.drafts.running)
        served = running if self.targets.running else 0.0
        ended = served * -math.expm1(-now_speed.tokens_per_s * given.tick_s / given.tokens)
        self._running -= ended
        self.result.tokens += ended * given.tokens
        self._plain_tokens += ended * given.tokens * now_speed.plain_tokens_per_s / now_speed.tokens_per_s
        count = max(1, self.targets.running)
        waiting = sum(cohort[1] for cohort in self._queue)
        active, queued, gap, residence, starved, declined = self._of_targets.add(
            now,
            running / count,
            waiting / count,
            1 / now_speed.tokens_per_s if running else 0.0,
            given.tokens / now_speed.tokens_per_s,
            0.0 if now_speed.declined or not running else 1 - now_speed.coverage,
            float(now_speed.declined),
        )
        (busy,) = self._of_drafts.add(now, now_speed.busy if running else 0.0)
        slots = given.target.slots
        return TargetLoad(active, queued, slots, active / slots, gap, residence, starved, declined), busy

    def _scale(self, now: float, load: TargetLoad, busy: float) -> None:
        given, targets, drafts = self.given, self.targets, self.drafts
        loads = [load] * targets.running
        waiting = sum(cohort[1] for cohort in self._queue)
        outside = 0.0 if targets.running else waiting
        of_targets, of_drafts = self._memories
        wanted = target_replicas(
            loads,
            targets.running,
            targets.starting,
            outside,
            given.target_goals,
            of_targets,
            now,
            given.target.scaling.look_back_s,
        )
        sessions = min(float(given.draft.slots), self._running / max(1, drafts.running))
        followers = [DraftLoad(sessions, given.draft.slots, busy)] * drafts.running
        drafting = draft_replicas(
            followers,
            loads,
            drafts.running,
            drafts.starting,
            given.draft_goals,
            of_drafts,
            now,
            given.draft.scaling.look_back_s,
        )
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
