"""The policies: bounds, direction, no flapping, cold starts; by hand-derived values, properties and simulation."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling import (
    DraftGoals,
    DraftLoad,
    Pace,
    TargetGoals,
    TargetLoad,
    draft_replicas,
    target_replicas,
)

GOALS = TargetGoals(utilisation=0.8, slack=0.15, growth=2.0)
DRAFT = DraftGoals()


def loads(n: int, total: float, slots: float = 16.0) -> list[TargetLoad]:
    return [TargetLoad(running=min(total / n, slots), waiting=max(0.0, total / n - slots), slots=slots)] * n


def test_target_size_follows_demand() -> None:
    # 64 sequences at 16 slots and 0.8 use need 64 / 12.8 = 5 replicas; from 4 that is within doubling.
    assert target_replicas(loads(4, 64), 4, 0, 0, GOALS).replicas == 5
    # 100 need 7.8, that is 8; from 2 at most 4 are asked for at once.
    assert target_replicas(loads(2, 100), 2, 0, 0, GOALS).replicas == 4
    # Two of them already starting: 4 held, 8 are within doubling.
    assert target_replicas(loads(2, 100), 2, 2, 0, GOALS).replicas == 8


def test_a_replica_goes_only_with_slack_to_spare() -> None:
    # 37 sequences need 2.9 of 12.8 each; with 15 % slack 3.4, so the fourth replica stays.
    assert target_replicas(loads(4, 37), 4, 0, 0, GOALS).replicas == 4
    # 32 need 2.5, with slack 2.94: three are enough.
    assert target_replicas(loads(4, 32), 4, 0, 0, GOALS).replicas == 3


def test_latency_asks_for_more_but_not_twice() -> None:
    goals = TargetGoals(inter_token_ms=40)
    slow = [TargetLoad(running=8, slots=16, inter_token_s=0.060)] * 4
    # 4 replicas at 60 ms against 40 ms: 4 * 1.5 = 6.
    assert target_replicas(slow, 4, 0, 0, goals).replicas == 6
    assert target_replicas(slow, 4, 2, 0, goals).replicas <= 6


def test_from_zero_a_waiting_request_brings_one() -> None:
    assert target_replicas([], 0, 0, 1, GOALS).replicas == 1
    assert target_replicas([], 0, 1, 1, GOALS).replicas == 1
    assert target_replicas([], 0, 0, 0, GOALS).replicas == 0


def test_drafts_follow_starvation_and_vanish_when_turned_down() -> None:
    def decide(starved: float, declined: float = 0.0, current: int = 4, running: float = 8) -> int:
        targets = [TargetLoad(running=running, slots=16, starved=starved, declined=declined)]
        return draft_replicas([DraftLoad(sessions=8, slots=32)] * current, targets, current, 0, DRAFT).replicas

    assert decide(starved=0.5) == 6
    assert decide(starved=0.10) == 4
    assert decide(starved=0.01) == 3
    assert decide(starved=0.01, declined=0.95) == 0
    assert decide(starved=0.0, running=0) == 0


def test_drafts_come_back_from_zero() -> None:
    targets = [TargetLoad(running=3, slots=16, starved=1.0)]
    assert draft_replicas([], targets, 0, 0, DRAFT).replicas == 1
    assert draft_replicas([], targets, 0, 1, DRAFT).replicas == 1
    assert draft_replicas([], [TargetLoad()], 0, 0, DRAFT).replicas == 0


@given(
    st.integers(1, 1000),
    st.floats(0, 1e5),
    st.integers(0, 50),
    st.floats(0, 1e3),
    st.floats(0, 1),
    st.floats(0, 10),
)
def test_never_negative_never_many_at_once(current, total, starting, outside, kv, latency) -> None:
    goals = TargetGoals(inter_token_ms=50)
    some = [TargetLoad(total / current, 0, 16, kv, latency)] * current
    replicas = target_replicas(some, current, starting, outside, goals).replicas
    held = current + starting
    assert 0 <= replicas <= max(held + 1, math.floor(held * goals.growth))


@given(st.floats(1, 2000), st.integers(1, 60))
def test_constant_demand_converges_and_stays(total: float, start: int) -> None:
    """Replicas start instantly here: the sequence of answers must reach a fixed point and never leave it."""
    current, seen = start, []
    for _ in range(60):
        current = max(1, target_replicas(loads(current, total), current, 0, 0, GOALS).replicas)
        seen.append(current)
    assert len(set(seen[-20:])) == 1
    assert total <= seen[-1] * 16 * 0.8 + 1e-6


def test_pace_waits_out_its_delay_and_starts_over_when_the_wish_changes() -> None:
    pace = Pace(upscale_delay_s=10, downscale_delay_s=100, minimum=1, maximum=8)
    current = 2
    for now, wanted, expected in [(0, 4, 2), (9, 4, 2), (10, 4, 4), (11, 1, 4), (60, 4, 4), (61, 1, 4), (160, 1, 4)]:
        current, pace = pace.apply(now, current, wanted)
        assert current == expected, now
    current, pace = pace.apply(161, current, 0)
    assert current == 1
    current, pace = pace.apply(200, current, 99)
    current, pace = pace.apply(210, current, 99)
    assert current == 8


def test_no_flapping_under_noisy_load_with_cold_starts() -> None:
    """Demand 60 ± 10 % at random, replicas take 60 s to start: after settling, the size moves by at most one."""
    import random

    rng = random.Random(1)
    pace = Pace(10, 120, 1, 20)
    running, starting, asked = 1, [], 1
    sizes = []
    for now in range(0, 4000, 5):
        starting = [t for t in starting if t > now] if starting else []
        running = asked - len(starting)
        demand = 60 * rng.uniform(0.9, 1.1)
        wanted = target_replicas(loads(max(running, 1), demand), running, len(starting), 0, GOALS).replicas
        new, pace = pace.apply(now, asked, wanted)
        starting += [now + 60] * max(0, new - asked)
        asked = new
        sizes.append(asked)
    settled = sizes[200:]
    assert max(settled) - min(settled) <= 1
    assert sum(a != b for a, b in itertools.pairwise(settled)) <= 2
