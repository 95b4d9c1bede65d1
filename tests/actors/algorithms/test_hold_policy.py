"""The waiting rule, driven by a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.algorithms.control.hold_policy import HoldPolicy
from actors.algorithms.control.lookahead import LookaheadController
from actors.settings import LookaheadSettings

TV = 0.025


class Bench:
    """One target whose draft answers `lag` after a pass ended, then every `gap`; passes cost the same whatever."""

    def __init__(self, lag: float, gap: float, acceptance: float, sequences: int = 1, **settings_of) -> None:
        self.controller = LookaheadController(LookaheadSettings(**settings_of), "coupled")
        self.lag, self.gap, self.acceptance = lag, gap, acceptance
        self.names = [str(i) for i in range(sequences)]
        self.now = 0.0

    def one_pass(self, starving: int = 1) -> float:
        """Hold as told, then run a pass; the first `starving` sequences begin with no draft. Returns the wait."""
        ended, wait = self.now, 1.0
        for name in self.names:
            self.controller.observe_offer(self.now, name)
        for _ in range(200):
            ready = {n: self._come(self.now - ended) if i < starving else 8 for i, n in enumerate(self.names)}
            wait = self.controller.hold(self.now, ready, 0)
            if wait == 0.0:
                break
            self.now = min(self.now + wait, self._next_arrival(ended))
        assert wait == 0.0, "held for ever"
        held = self.now - ended
        for name in self.names:
            accepted = round(8 * self.acceptance)
            self.controller.observe_block(name, (self.acceptance,) * 8, accepted)
        tokens = 9 * len(self.names)
        self.controller.observe_pass(tokens, len(self.names), TV)
        self.now += TV
        return held

    def _come(self, elapsed: float) -> int:
        if self.lag is None or elapsed < self.lag - 1e-9:
            return 0
        return min(8, 1 + int((elapsed - self.lag) / self.gap + 1e-6))

    def _next_arrival(self, ended: float) -> float:
        if self.lag is None:
            return float("inf")
        return ended + self.lag + max(0, self._come(self.now - ended)) * self.gap

    def settle(self, passes: int = 60, **kw) -> list[float]:
        return [self.one_pass(**kw) for _ in range(passes)]


def test_a_draft_that_is_almost_there_is_waited_for():
    """1 ms for a token that is accepted four times in five, against 1 ms of a target that commits under ten tokens
    in 25: 0.8 against less than 0.4."""
    waits = Bench(lag=0.001, gap=0.02, acceptance=0.8).settle()
    assert waits[-1] == pytest.approx(0.001, abs=1e-4)


def test_a_draft_that_takes_as_long_as_a_pass_is_not():
    waits = Bench(lag=0.024, gap=0.02, acceptance=0.8, max_wait_ms=100).settle(120)
    assert waits[10:] == [0.0] * 110


def test_a_dead_draft_is_given_up():
    """At most one trial in 128 passes, once the first few have failed."""
    bench = Bench(lag=0.001, gap=0.02, acceptance=0.8)
    bench.settle()
    bench.lag = None
    waits = bench.settle(300)
    assert sum(1 for w in waits[20:] if w > 0) <= 3


def test_a_draft_that_recovers_is_noticed():
    bench = Bench(lag=0.001, gap=0.02, acceptance=0.8)
    bench.lag = None
    bench.settle(100)
    bench.lag = 0.001
    assert bench.settle(300)[-1] == pytest.approx(0.001, abs=1e-4)


def test_many_do_not_wait_for_one():
    """1 ms of 32 sequences that commit together about ten tokens a millisecond, against 0.8 tokens."""
    waits = Bench(lag=0.001, gap=0.02, acceptance=0.8, sequences=32).settle(120)
    assert waits[10:110] == [0.0] * 100


def test_never_means_never():
    assert set(Bench(lag=0.001, gap=0.02, acceptance=0.8, wait="never").settle()) == {0.0}


def test_bounded_waits_for_the_first_token_and_full_for_all():
    assert Bench(lag=0.004, gap=0.001, acceptance=0.1, wait="bounded").settle()[-1] == pytest.approx(0.004)
    full = Bench(lag=0.004, gap=0.001, acceptance=0.1, wait="full", max_wait_ms=50).settle()
    assert full[-1] == pytest.approx(0.004 + 7 * 0.001)


def test_drafts_that_never_came_are_not_waited_for():
    controller = LookaheadController(LookaheadSettings(wait="bounded"), "coupled")
    assert controller.hold(0.0, {"a": 0}, 0) == 0.0


def test_without_a_cap_holds_are_bounded_by_what_a_pass_takes():
    """A draft of 16 ms steps under passes of 25 ms is waited for; one of 40 ms is not, whoever demands it."""
    near = Bench(lag=0.016, gap=0.002, acceptance=0.1, wait="bounded").settle()
    assert near[-1] == pytest.approx(0.016)
    assert max(Bench(lag=0.04, gap=0.002, acceptance=0.1, wait="bounded").settle()) == pytest.approx(TV)
    assert Bench(lag=0.016, gap=0.002, acceptance=0.1, wait="bounded").one_pass() == 0.0  # nobody knows yet


def test_a_pass_is_not_held_while_nothing_is_verified():
    controller = LookaheadController(LookaheadSettings(), "coupled")
    controller.observe_offer(0.0, "a")
    for _ in range(40):
        controller.plan({"a": (0.0,)}, 1)
        controller.observe_pass(1, 1, TV)
    assert controller.is_off
    assert controller.hold(1.0, {"a": 0}, 0) == 0.0


def test_of_a_second_token_only_the_first_guess_before_it_counts():
    """Nine places in ten are hit, by the first guess in three. A second token of the likely path is worth .3 · .9;
    8 ms of a target that commits 10 tokens in 225 ms cost .36, and a fifth more. Worth .9 · .9, it is waited for."""
    policy = HoldPolicy()
    policy.offer("a")
    for branches in (6, 0):
        for _ in range(200):
            policy.end_pass(1, 9, 10, 9 * TV, branches)
        for n in range(6):
            policy.hold(0.008 * n, {"a": n}, 8, 0.0, 8)
        policy.end_pass(1, 9, 10, 9 * TV, branches)
        held = policy.hold(1.0, {"a": 1}, 8, 0.0, 0)
        assert (held > 0) == (branches == 0)
        policy.end_pass(1, 9, 10, 9 * TV, branches)


@settings(max_examples=60, deadline=None)
@given(
    lag=st.one_of(st.none(), st.floats(1e-4, 0.05)),
    gap=st.floats(1e-4, 0.05),
    acceptance=st.floats(0.05, 0.95),
    sequences=st.integers(1, 6),
    wait=st.sampled_from(["adaptive", "bounded", "full"]),
    longest=st.floats(0, 30),
)
def test_holds_are_bounded(lag, gap, acceptance, sequences, wait, longest):
    """Whatever the draft does, all holds before a pass add up to no more than max_wait_ms."""
    bench = Bench(lag, gap, acceptance, sequences, wait=wait, max_wait_ms=longest)
    for held in bench.settle(12, starving=sequences):
        assert held <= longest / 1e3 + 1e-6
