"""The policies: bounds, direction, no flapping, cold starts; by hand-derived values, properties and simulation."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

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

GOALS = TargetGoals(utilisation=0.8, slack=0.15, growth=2.0)
DRAFT = DraftGoals()


def loads(n: int, total: float, slots: float = 16.0) -> list[TargetLoad]:
    return [TargetLoad(running=min(total / n, slots), waiting=max(0.0, total / n - slots), slots=slots)] * n


def test_target_size_follows_demand() -> None:
    # 64 sequences at 16 slots and 0.8 use need 64 / 12.8 = 5 replicas; from 4 that is within doubling.
    assert target_replicas(loads(4, 64), 4, 0, 0, GOALS).replicas == 5
    # 100 need 7.8, that is 8; from 2 at most 4 are asked for at once.
    assert target_replicas(loads(2, 100), 2, 0, 0, GOALS).replicas == 4
    # Two of them already starting: no more are asked for until those have come.
    assert target_replicas(loads(2, 100), 2, 2, 0, GOALS).replicas == 4
    assert target_replicas(loads(4, 100), 4, 0, 0, GOALS).replicas == 8


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
    # As many as `outrider plan` advised: half a draft for each of three targets is two.
    assert draft_replicas([], targets * 3, 0, 0, DraftGoals(per_target=0.5)).replicas == 2


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
    assert 0 <= replicas <= max(held, current + 1, math.floor(current * goals.growth))


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


def draft_history(history: list[tuple[float, int, float, float]]) -> list[int]:
    """Answers to (time, drafts, sequences on one target, starved share), with one memory throughout."""
    memory, answers = Memory(), []
    for now, current, running, starved in history:
        targets = [TargetLoad(running=running, slots=64, starved=starved)]
        decision = draft_replicas([DraftLoad(1, 64)] * current, targets, current, 0, DRAFT, memory, now)
        memory = decision.memory
        answers.append(decision.replicas)
    return answers


def test_a_draft_tier_remembers_at_which_load_it_starved() -> None:
    # 20 sequences starve two drafts (10 each): a third is asked for. It serves well; fewer is not tried again, since
    # below 9 each (10 % margin) 20 need 2.2, and with 30 % to spare 3.2. At 12 sequences 1.3, with slack 1.9: two do.
    assert draft_history([(0, 2, 20, 0.4), (100, 3, 20, 0.0), (200, 3, 20, 0.0), (300, 3, 12, 0.0)]) == [3, 3, 3, 2]
    # After an hour it may be otherwise: one less is tried.
    assert draft_history([(0, 2, 20, 0.4), (100, 3, 20, 0.0), (3700, 3, 20, 0.0)]) == [3, 3, 2]


def test_what_is_reported_about_the_size_before_asks_for_nothing() -> None:
    # Just grown to 3, the half minute's mean still says 40 % starved: not for 45 s; then 3 * 1.4 = 4.2 are wanted.
    assert draft_history([(0, 2, 20, 0.4), (10, 3, 20, 0.4), (30, 3, 20, 0.4), (70, 3, 20, 0.4)]) == [3, 3, 3, 5]


def test_drafts_stay_away_from_a_load_at_which_they_did_not_pay() -> None:
    def targets(running: float, declined: float) -> list[TargetLoad]:
        return [TargetLoad(running=running, slots=64, declined=declined)]

    first = draft_replicas([DraftLoad(8, 64)], targets(40, 0.95), 1, 0, DRAFT, Memory(), 0.0)
    assert first.replicas == 0
    # Gone, they cannot be turned down any more; at the same load they are still not asked for, at half of it they are.
    assert draft_replicas([], targets(40, 0.0), 0, 0, DRAFT, first.memory, 200.0).replicas == 0
    assert draft_replicas([], targets(20, 0.0), 0, 0, DRAFT, first.memory, 200.0).replicas == 1
    assert draft_replicas([], targets(40, 0.0), 0, 0, DRAFT, first.memory, 3700.0).replicas == 1


def test_what_piled_up_while_replicas_started_is_left_to_them() -> None:
    """Two replicas of 16 slots, and 60 sequences wait: 92 need 7.2 of 12.8 each, 4 are within doubling. When they have
    come, what still waits asks for nothing for 45 s; what waits then does."""
    memory = target_replicas(loads(2, 32), 2, 0, 0, GOALS, Memory(), 0.0).memory
    asked = target_replicas(loads(2, 92), 2, 0, 0, GOALS, memory, 60.0)
    assert asked.replicas == 4
    come = target_replicas(loads(4, 92), 4, 0, 0, GOALS, asked.memory, 120.0)
    assert come.replicas == 4
    assert target_replicas(loads(4, 92), 4, 0, 0, GOALS, come.memory, 164.0).replicas == 4
    assert target_replicas(loads(4, 92), 4, 0, 0, GOALS, come.memory, 165.0).replicas == 8
