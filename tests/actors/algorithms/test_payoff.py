"""Whether verifying drafts pays: tried by the wall clock, with drafts, without, and with them again."""

from __future__ import annotations

from actors.algorithms.control.lookahead import PROBE, LookaheadController
from actors.algorithms.control.payoff import FORGET, LONGEST_REST, MEASURED, REST, SETTLE, Payoff
from actors.settings import LookaheadSettings

TRIAL = 3 * SETTLE + 4 * MEASURED
FIRST = 1 + SETTLE + TRIAL
"""From nothing: passes of one size until it begins, and the trial itself."""
PLAIN = (16, 0.050)
"""320 tokens per second."""


def run(payoff: Payoff, passes: int, drafted: tuple[int, float], rows: int = 16, doubtful: bool = True) -> list[bool]:
    """Passes that commit so many tokens in so many seconds where drafts are allowed, and PLAIN where not."""
    allowed = []
    for _ in range(passes):
        allowed.append(payoff.allows)
        tokens, seconds = drafted if payoff.allows else PLAIN
        payoff.observe(rows, tokens, seconds, doubtful)
    return allowed


def test_drafts_that_cost_more_than_they_gain_are_turned_off() -> None:
    payoff = Payoff(least=0.02)
    tried = run(payoff, FIRST, (17, 0.060))  # 6 % more tokens a pass, in 20 % more time
    assert tried.count(False) == SETTLE + 2 * MEASURED
    assert tried[-SETTLE - MEASURED :] == [True] * (SETTLE + MEASURED)
    assert abs(payoff.gain - (17 / 0.060 / 320 - 1)) < 1e-9
    assert run(payoff, REST, (17, 0.060)) == [False] * REST


def test_drafts_that_pay_stay() -> None:
    payoff = Payoff(least=0.02)
    run(payoff, FIRST, (17, 0.051))
    assert abs(payoff.gain - (17 / 0.051 / 320 - 1)) < 1e-9
    assert run(payoff, REST, (17, 0.051)) == [True] * REST


def test_a_gain_below_the_least_is_none() -> None:
    payoff = Payoff(least=0.02)
    run(payoff, FIRST, (17, 0.053))  # 0.2 % more
    assert not payoff.allows


def test_a_speed_that_drifts_favours_neither() -> None:
    """Passes get slower by the same amount each, drafts change nothing: both are measured around the same middle."""
    payoff = Payoff(least=-1.0)
    for number in range(FIRST):
        payoff.observe(16, 16, 0.05 + 1e-4 * number, doubtful=True)
    assert abs(payoff.gain) < 1e-9


def test_what_says_the_same_again_is_asked_less_often() -> None:
    payoff = Payoff(least=0.02)
    run(payoff, FIRST, (17, 0.060))
    rests = []
    for _ in range(6):
        off = 0
        while not payoff.is_trying:
            payoff.observe(16, *PLAIN, doubtful=True)
            off += 1
        rests.append(off - 1)
        run(payoff, TRIAL, (17, 0.060))
    assert rests == [REST, 2 * REST, 4 * REST, 8 * REST, LONGEST_REST, LONGEST_REST]


def test_another_load_is_another_question() -> None:
    payoff = Payoff(least=0.02)
    run(payoff, FIRST, (17, 0.060))
    assert not payoff.allows
    payoff.observe(11, *PLAIN, doubtful=True)  # within LIKE
    assert not payoff.allows
    for _ in range(FORGET):
        payoff.observe(1, *PLAIN, doubtful=True)
        assert payoff.allows
    payoff.observe(16, *PLAIN, doubtful=True)  # the batch has filled again
    assert not payoff.allows
    for _ in range(FORGET + 1):
        payoff.observe(1, *PLAIN, doubtful=True)
    payoff.observe(16, *PLAIN, doubtful=True)
    assert payoff.allows


def test_a_trial_goes_on_when_a_batch_has_drained_and_filled() -> None:
    payoff = Payoff(least=0.02)
    run(payoff, FIRST - TRIAL + SETTLE + MEASURED // 2, (17, 0.060))
    run(payoff, 10, (1, 0.9), rows=1)
    rest = run(payoff, SETTLE + MEASURED // 2 + 2 * SETTLE + 3 * MEASURED, (17, 0.060))
    assert rest.count(False) == SETTLE + 2 * MEASURED
    assert abs(payoff.gain - (17 / 0.060 / 320 - 1)) < 1e-9
    assert not payoff.is_trying


def test_nothing_is_tried_where_the_computed_gain_is_clear() -> None:
    payoff = Payoff(least=0.02)
    assert run(payoff, 2000, (17, 0.060), doubtful=False) == [True] * 2000
    run(payoff, FIRST - TRIAL + SETTLE + MEASURED, (17, 0.060))
    assert not payoff.allows
    payoff.observe(16, *PLAIN, doubtful=False)  # it has become clear meanwhile
    assert (payoff.allows, payoff.is_trying) == (True, False)


def test_the_controller_verifies_nothing_that_was_tried_in_vain() -> None:
    """By pass times alone, drafts of 16 sequences gain 20 %; around the passes more is lost."""
    controller = LookaheadController(LookaheadSettings(mode="adaptive", maximum=1), "coupled")
    paths = {str(n): (0.4,) for n in range(16)}
    on = []
    for number in range(FIRST + REST):
        chosen = sum(controller.plan(paths, 16).values())
        on.append(chosen > 0)
        controller.observe_pass(16 + chosen, 16, 0.050 + 0.0005 * (chosen + number % 2))
        controller.observe_progress(16, 16 + chosen // 2, 0.085 if chosen else 0.051, full=True)
    assert sum(on[-REST // 2 :]) <= REST // 2 // PROBE  # passes that find out what a token costs go on
    assert controller.is_off
    controller.observe_progress(1, 1, 0.01, full=False)  # one sequence alone is another matter
    assert sum(controller.plan({"0": (0.9,)}, 1).values()) == 1
