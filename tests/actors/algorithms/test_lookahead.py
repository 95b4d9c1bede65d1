"""The lookahead controller: optimal, monotone, zero at saturation, steady, and recovering."""

from __future__ import annotations

import statistics
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.algorithms.control.cost import PassCost
from actors.algorithms.control.lookahead import OFF_BELOW, PROBE, LookaheadController, choose, expected_gain
from actors.settings import LookaheadSettings

probability = st.floats(0.0, 1.0)
path = st.lists(probability, max_size=5)


def cost_of(base: float, slope: float) -> PassCost:
    cost = PassCost()
    cost.base, cost.slope = base, slope
    return cost


def rate(paths, lookahead, cost, plain_tokens) -> float:
    committed = 0.0
    for confidences, k in zip(paths, lookahead, strict=True):
        reach = 1.0
        committed += 1.0
        for confidence in confidences[:k]:
            reach *= confidence
            committed += reach
    return committed / cost(plain_tokens + sum(lookahead))


# -- the fit -----------------------------------------------------------------------------------------------------


def test_the_fit_finds_a_line():
    cost = PassCost()
    for tokens in (1, 4, 9, 30, 80) * 20:
        cost.observe(tokens, 0.020 + 0.0005 * tokens)
    assert cost.base == pytest.approx(0.020, rel=0.01)
    assert cost.slope == pytest.approx(0.0005, rel=0.01)


def test_one_slow_pass_moves_it_little():
    """A pass of a hundred times the cost counts as half as slow again, one among the last 67 or so: under 2 % at its
    own size."""
    cost = PassCost()
    for tokens in (1, 4, 9, 30, 80) * 40:
        cost.observe(tokens, 0.020)
    cost.observe(9, 2.0)
    assert cost(9) == pytest.approx(0.020, rel=0.02)


def test_what_a_larger_pass_explains_is_no_outlier():
    """The second pass is seven times as slow as the first, for eight times the tokens: it tells the price of one."""
    cost = PassCost()
    cost.observe(32, 0.037)
    cost.observe(250, 0.255)
    assert cost.slope == pytest.approx(0.001, rel=0.01)
    assert cost.base == pytest.approx(0.005, rel=0.1)


def test_a_change_of_pace_is_followed():
    cost = PassCost()
    for factor in (1.0, 3.0):
        for tokens in (1, 4, 9, 30, 80) * 60:
            cost.observe(tokens, factor * (0.020 + 0.0005 * tokens))
    assert cost(30) == pytest.approx(0.105, rel=0.03)


def test_a_probe_in_64_passes_is_enough_to_tell_what_a_token_costs():
    cost = PassCost()
    for i in range(640):
        tokens = 80 if i % 64 == 63 else 144
        cost.observe(tokens, 0.010 + 0.001 * tokens)
    assert cost.slope == pytest.approx(0.001, rel=0.1)


def test_prompts_have_a_price_of_their_own():
    """Fitted as one, 256 cheap prompt tokens in every third pass would make a token look cheap by an order of
    magnitude."""
    cost = PassCost()
    for i, tokens in enumerate((8, 32, 20, 24) * 40):
        prompt = 256 if i % 3 == 0 else 0
        cost.observe(tokens, 0.010 + 0.003 * tokens + 0.00002 * prompt, prompt)
    assert cost.slope == pytest.approx(0.003, rel=0.01)
    assert cost.prompt_slope == pytest.approx(0.00002, rel=0.05)
    assert cost(10, 100) == pytest.approx(0.042, rel=0.01)


def test_one_pass_with_a_prompt_does_not_move_the_price_of_a_token():
    cost = PassCost()
    for tokens in (8, 32, 20, 24) * 40:
        cost.observe(tokens, 0.010 + 0.003 * tokens)
    cost.observe(8, 0.050, 256)
    assert cost.slope == pytest.approx(0.003, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-4, 10), st.integers(0, 5000)), min_size=1, max_size=60),
    st.booleans(),
)
def test_no_part_of_a_cost_is_negative(passes, with_prompts):
    cost = PassCost()
    for tokens, seconds, prompt in passes:
        cost.observe(tokens, seconds, prompt if with_prompts else 0)
        assert cost.slope >= 0.0
        assert cost.prompt_slope >= 0.0
        assert cost.base >= -1e-9


# -- the choice --------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.lists(path, min_size=1, max_size=3), st.floats(1e-3, 1), st.floats(0, 0.2))
def test_the_choice_is_the_best_there_is(paths, base, slope):
    """Against trying every combination."""
    cost = cost_of(base, slope)
    chosen = choose(paths, cost, len(paths))
    best = max(rate(paths, k, cost, len(paths)) for k in product(*(range(len(p) + 1) for p in paths)))
    assert rate(paths, chosen, cost, len(paths)) == pytest.approx(best)


@given(st.lists(path, min_size=1, max_size=8), st.floats(1e-3, 1), st.floats(0, 0.2))
def test_the_expected_gain_is_over_the_same_pass_without_drafts(paths, base, slope):
    cost, none = cost_of(base, slope), [0] * len(paths)
    chosen = choose(paths, cost, len(paths))
    expected = rate(paths, chosen, cost, len(paths)) / rate(paths, none, cost, len(paths)) - 1
    assert expected_gain(paths, chosen, cost, len(paths)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=150)
@given(st.lists(path.filter(bool), min_size=1, max_size=4), st.floats(1e-3, 1), st.floats(0, 0.2), st.data())
def test_more_confidence_never_means_less_lookahead(paths, base, slope, data):
    cost = cost_of(base, slope)
    before = choose(paths, cost, len(paths))
    i = data.draw(st.integers(0, len(paths) - 1))
    j = data.draw(st.integers(0, len(paths[i]) - 1))
    raised = [list(p) for p in paths]
    raised[i][j] = data.draw(st.floats(raised[i][j], 1.0))
    assert choose(raised, cost, len(paths))[i] >= before[i]


@given(st.lists(st.lists(st.floats(0, 0.999), max_size=8), min_size=1, max_size=30), st.floats(1e-4, 1))
def test_zero_at_saturation(paths, slope):
    """Where a pass costs by the token alone, a guess is never worth more than a sure token."""
    assert choose(paths, cost_of(0.0, slope), len(paths)) == [0] * len(paths)


def test_lookahead_falls_with_load_and_comes_back():
    """25 ms a pass and 0.1 ms a token. One sequence: the eighth token adds .8^8 = .17 against a rate of about
    4.3 / 25.9 ms, that is .017 for its 0.1 ms: all eight. From n = a·A / (B (1 - a)) = 1000 sequences on, none."""
    cost = cost_of(0.025, 0.0001)
    by_load = [choose([[0.8] * 8] * n, cost, n)[0] for n in (1, 50, 200, 500, 990, 1010, 500, 1)]
    assert by_load[0] == by_load[-1] == 8
    assert by_load[:6] == sorted(by_load[:6], reverse=True)
    assert by_load[4] >= 1
    assert by_load[5] == 0


def test_free_tokens_are_all_taken_and_impossible_ones_never():
    assert choose([[0.5, 0.1, 0.0, 0.9]], cost_of(0.025, 0.0), 1) == [2]


# -- the controller ----------------------------------------------------------------------------------------------


def run(controller: LookaheadController, passes: int, sequences: int, base: float, slope: float, confidence=0.8):
    """Passes that cost base + slope · tokens and accept exactly what is expected, rounded. Returns mean lookahead."""
    seen = []
    for _ in range(passes):
        paths = {str(i): (confidence,) * 8 for i in range(sequences)}
        lookahead = controller.plan(paths, sequences)
        seen.append(sum(lookahead.values()) / sequences)
        controller.observe_pass(
            sequences + sum(lookahead.values()), sequences, base + slope * (sequences + sum(lookahead.values()))
        )
    return seen


def test_a_step_in_cost_settles_without_oscillation():
    """Tokens become dear at once. Lookahead falls to its new value and stays there: in the second half of the passes
    it moves for a probe alone, one pass in PROBE."""
    controller = LookaheadController(LookaheadSettings())
    assert run(controller, 50, 16, 0.025, 0.00002)[-1] == 8
    seen = run(controller, 600, 16, 0.025, 0.0016)
    settled = statistics.mode(seen[300:])
    assert sum(1 for k in seen[300:] if k != settled) <= 300 // PROBE + 1
    # What the exact costs would choose, give or take a token.
    assert settled == pytest.approx(choose([[0.8] * 8] * 16, cost_of(0.025, 0.0016), 16)[0], abs=1.0)


def test_a_start_at_saturation_is_found_out():
    """From the first pass on all proposals are long and all passes alike; the probe tells what they cost."""
    controller = LookaheadController(LookaheadSettings())
    seen = run(controller, 200, 400, 0.025, 0.001)
    assert statistics.mode(seen) == 0.0
    assert sum(seen[10:]) <= 2.0


def test_saturation_is_found_and_left_again():
    controller = LookaheadController(LookaheadSettings())
    assert statistics.mode(run(controller, 100, 4, 0.025, 0.001)) > 0
    assert (
        statistics.mode(run(controller, 300, 400, 0.025, 0.001)) == 0.0
    )  # break-even: .8 · 25 / (1 · .2) = 100 sequences
    assert statistics.mode(run(controller, 100, 4, 0.025, 0.001)) > 0


def test_a_gain_of_one_percent_is_not_worth_it():
    """A draft of .8 for each of 16 sequences, at 4.46 ms a pass and 1 ms a token: 1.8 · 20.46 / 36.46 = 1.01. With one
    sequence it is 1.8 · 5.46 / 6.46 = 1.52."""
    controller = LookaheadController(LookaheadSettings(maximum=1))
    assert expected_gain([[0.8]] * 16, [1] * 16, cost_of(0.00446, 0.001), 16) == pytest.approx(0.01, abs=1e-4)
    run(controller, 10, 1, 0.00446, 0.001)
    assert not controller.is_off
    seen = run(controller, 200, 16, 0.00446, 0.001)
    assert controller.is_off
    assert sum(1 for k in seen[40:] if k) <= 160 // PROBE + 1  # probes alone
    assert run(controller, 5, 1, 0.00446, 0.001)[-1] == 1
    assert not controller.is_off
    assert OFF_BELOW == 0.02


def test_a_sequence_that_disappoints_loses_its_lookahead_and_gets_it_back():
    controller = LookaheadController(LookaheadSettings())
    for tokens in (2, 6, 18) * 5:  # of every size, so that no probe is due
        controller.observe_pass(tokens, 2, 0.020 + 0.003 * tokens)
    paths = {"good": (0.9,) * 4, "bad": (0.9,) * 4}
    first = controller.plan(paths, 2)
    assert first["good"] == first["bad"] > 1
    for _ in range(30):
        lookahead = controller.plan(paths, 2)
        for name, k in lookahead.items():
            if k:
                controller.observe_block(name, paths[name][:k], k if name == "good" else 0)
    after = controller.plan(paths, 2)
    assert after["good"] >= first["good"]
    assert after["bad"] < first["bad"]
    for _ in range(200):  # without proposals that could be judged, the bad memory fades
        back = controller.plan(paths, 2)
    assert back["bad"] == first["bad"]


def test_fixed_and_scheduled_modes():
    fixed = LookaheadController(LookaheadSettings(mode="fixed", maximum=3))
    assert fixed.plan({"a": (0.1,) * 8, "b": (0.1,)}, 2) == {"a": 3, "b": 1}
    scheduled = LookaheadController(LookaheadSettings(mode="scheduled", schedule={1: 5, 4: 2, 8: 0}))
    for n, k in ((1, 5), (3, 5), (4, 2), (7, 2), (8, 0), (20, 0)):
        assert set(scheduled.plan({str(i): (0.9,) * 8 for i in range(n)}, n).values()) == {k}


def test_nothing_to_plan():
    controller = LookaheadController(LookaheadSettings())
    assert controller.plan({}, 100) == {}
    assert controller.plan({"a": ()}, 1) == {"a": 0}
    controller.forget("a")


def test_a_first_pass_may_be_over_a_part_of_a_prompt_alone():
    controller = LookaheadController(LookaheadSettings())
    controller.observe_pass(0, 1, 0.01, prompt_tokens=256)
    controller.observe_pass(4, 4, 0.01)
    assert controller.cost(4) > 0
