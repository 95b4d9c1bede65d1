"""The lookahead controller: optimal, monotone, zero at saturation, steady, and recovering."""

from __future__ import annotations

import statistics
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.algorithms.control import lookahead
from actors.algorithms.control.cost import PassCost
from actors.algorithms.control.lookahead import OFF_BELOW, PROBE, LookaheadController
from actors.algorithms.draft_path import DraftPath
from actors.settings import LookaheadSettings

probability = st.floats(0.0, 1.0)
path = st.lists(probability, max_size=5)


def cost_of(base: float, slope: float) -> PassCost:
    cost = PassCost()
    cost.base, cost.slope = base, slope
    return cost


def choose(paths, cost, plain_tokens, most=None) -> list[int]:
    views = [DraftPath(confidences) for confidences in paths]
    lookahead.choose(views, cost, plain_tokens, most)
    return [view.taken for view in views]


def rate(paths, lookahead, cost, plain_tokens) -> float:
    committed = float(plain_tokens)
    for confidences, k in zip(paths, lookahead, strict=True):
        reach = 1.0
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
@given(st.lists(path, min_size=1, max_size=3), st.integers(0, 9), st.floats(1e-3, 1), st.floats(0, 0.2))
def test_the_choice_is_the_best_there_is(paths, alone, base, slope):
    """Against trying every combination. alone: sequences without speculation in the pass."""
    cost, rows = cost_of(base, slope), len(paths) + alone
    chosen = choose(paths, cost, rows)
    best = max(rate(paths, k, cost, rows) for k in product(*(range(len(p) + 1) for p in paths)))
    assert rate(paths, chosen, cost, rows) == pytest.approx(best)


@given(st.lists(path, min_size=1, max_size=8), st.integers(0, 9), st.floats(1e-3, 1), st.floats(0, 0.2))
def test_the_expected_gain_is_over_the_same_pass_without_drafts(paths, alone, base, slope):
    cost, none, rows = cost_of(base, slope), [0] * len(paths), len(paths) + alone
    views = [DraftPath(confidences) for confidences in paths]
    gain = lookahead.choose(views, cost, rows)
    expected = rate(paths, [view.taken for view in views], cost, rows) / rate(paths, none, cost, rows) - 1
    assert gain == pytest.approx(expected, abs=1e-9)


def test_neighbours_without_drafts_commit_a_token_each():
    """One drafting sequence among 12 at 1 s a pass and 0.142 s a token. 12 tokens in 1 + 12 · 0.142 = 2.704 s are 0.63
    in the 0.142 s of a draft token: one of 0.64 is worth it, one of 0.62 is not. Counted as one sequence in the time of
    twelve, the bar would be 0.0525."""
    cost = cost_of(1.0, 0.142)
    assert round(12 * 0.142 / 2.704, 3) == 0.63
    assert [choose([[confidence]], cost, 12) for confidence in (0.64, 0.62, 0.06)] == [[1], [0], [0]]


@given(st.lists(path, min_size=1, max_size=4), st.integers(0, 9), st.floats(0, 0.2), st.integers(0, 6), st.data())
def test_nothing_behind_a_token_decides_whether_it_is_taken(paths, alone, slope, most, data):
    """The tokens of one path from the j-th on are changed: whether it is taken j deep stays, whatever else changes."""
    cost, rows = cost_of(0.025, slope), len(paths) + alone
    i = data.draw(st.integers(0, len(paths) - 1))
    j = data.draw(st.integers(0, len(paths[i])))
    changed = [list(p) for p in paths]
    changed[i][j:] = data.draw(path)
    before, after = choose(paths, cost, rows, most)[i], choose(changed, cost, rows, most)[i]
    assert min(before, j) == min(after, j)


@given(st.lists(path, min_size=1, max_size=5), st.floats(0, 0.2), st.integers(0, 12))
def test_a_limited_pass_takes_the_most_likely_tokens(paths, slope, most):
    cost = cost_of(0.025, slope)
    free, limited = choose(paths, cost, len(paths)), choose(paths, cost, len(paths), most)
    assert sum(limited) == min(sum(free), most)
    assert all(few <= many for few, many in zip(limited, free, strict=True))


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
        planned = controller.plan(paths, sequences)
        seen.append(sum(planned.values()) / sequences)
        controller.observe_pass(
            sequences + sum(planned.values()), sequences, base + slope * (sequences + sum(planned.values()))
        )
    return seen


def test_a_step_in_cost_settles_without_oscillation():
    """Tokens become dear at once. Lookahead falls to its new value and stays there: in the second half of the passes
    it moves for a probe alone, one pass in PROBE."""
    controller = LookaheadController(LookaheadSettings(), "coupled")
    assert run(controller, 50, 16, 0.025, 0.00002)[-1] == 8
    seen = run(controller, 600, 16, 0.025, 0.0016)
    settled = statistics.mode(seen[300:])
    assert sum(1 for k in seen[300:] if k != settled) <= 300 // PROBE + 1
    # What the exact costs would choose, give or take a token.
    assert settled == pytest.approx(choose([[0.8] * 8] * 16, cost_of(0.025, 0.0016), 16)[0], abs=1.0)


def test_a_start_at_saturation_is_found_out():
    """From the first pass on all proposals are long and all passes alike; the probe tells what they cost."""
    controller = LookaheadController(LookaheadSettings(), "coupled")
    seen = run(controller, 200, 400, 0.025, 0.001)
    assert statistics.mode(seen) == 0.0
    assert sum(seen[10:]) <= 2.0


def test_saturation_is_found_and_left_again():
    controller = LookaheadController(LookaheadSettings(), "coupled")
    assert statistics.mode(run(controller, 100, 4, 0.025, 0.001)) > 0
    assert (
        statistics.mode(run(controller, 300, 400, 0.025, 0.001)) == 0.0
    )  # break-even: .8 · 25 / (1 · .2) = 100 sequences
    assert statistics.mode(run(controller, 100, 4, 0.025, 0.001)) > 0


def test_a_gain_of_one_percent_is_not_worth_it():
    """A draft of .8 for each of 16 sequences, at 4.46 ms a pass and 1 ms a token: 1.8 · 20.46 / 36.46 = 1.01. With one
    sequence it is 1.8 · 5.46 / 6.46 = 1.52."""
    controller = LookaheadController(LookaheadSettings(maximum=1), "coupled")
    views = [DraftPath((0.8,)) for _ in range(16)]
    assert lookahead.choose(views, cost_of(0.00446, 0.001), 16) == pytest.approx(0.01, abs=1e-4)
    run(controller, 10, 1, 0.00446, 0.001)
    assert not controller.is_off
    seen = run(controller, 200, 16, 0.00446, 0.001)
    assert controller.is_off
    assert sum(1 for k in seen[40:] if k) <= 160 // PROBE + 1  # probes alone
    assert run(controller, 5, 1, 0.00446, 0.001)[-1] == 1
    assert not controller.is_off
    assert OFF_BELOW == 0.02


def test_a_sequence_that_disappoints_loses_its_lookahead_and_gets_it_back():
    controller = LookaheadController(LookaheadSettings(), "coupled")
    for tokens in (2, 6, 18) * 5:  # of every size, so that no probe is due
        controller.observe_pass(tokens, 2, 0.020 + 0.003 * tokens)
    paths = {"good": (0.9,) * 4, "bad": (0.9,) * 4}
    first = controller.plan(paths, 2)
    assert first["good"] == first["bad"] > 1
    for _ in range(30):
        planned = controller.plan(paths, 2)
        for name, k in planned.items():
            if k:
                controller.observe_block(name, paths[name][:k], k if name == "good" else 0)
    after = controller.plan(paths, 2)
    assert after["good"] >= first["good"]
    assert after["bad"] < first["bad"]
    for _ in range(200):  # without proposals that could be judged, the bad memory fades
        back = controller.plan(paths, 2)
    assert back["bad"] == first["bad"]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize(("drafting", "alone"), [(2, 8), (1, 15), (16, 0)])
def test_one_pass_in_so_many_is_a_probe(rule, drafting, alone):
    """Whether half the drafts are a large part of the pass or not: 2 drafting sequences among 10 take 16 of 26 tokens,
    and half of them changes it by less than a third; 1 among 16 takes 8 of 24. The first probe is the fifth pass, by
    PROBE - 4 to begin with, and after one come PROBE passes without: of 5 + 40 (PROBE + 1) passes, 41 are probes, and
    they are over half the tokens. Nothing else changes, as tokens are free."""
    controller = LookaheadController(LookaheadSettings(), rule)
    rows, seen = drafting + alone, []
    for _ in range(5 + 40 * (PROBE + 1)):
        planned = controller.plan({str(i): (0.9,) * 8 for i in range(drafting)}, rows)
        seen.append(sum(planned.values()))
        controller.observe_pass(rows + seen[-1], rows, 0.025)
    probes = [n for n, tokens in enumerate(seen) if tokens != 8 * drafting]
    assert probes == [4 + n * (PROBE + 1) for n in range(41)]
    assert {seen[n] for n in probes} == {4 * drafting}


@pytest.mark.parametrize("drafting", [1, 6, 16])
def test_where_nothing_is_verified_a_probe_verifies_half_a_token_per_sequence(drafting):
    """16 sequences at 1 ms a token and nothing else: no draft is worth it. A probe takes 8 tokens, of as many sequences
    as have drafts: all 8 of one, 2 or 1 of each of six, 1 of each of eight."""
    controller = LookaheadController(LookaheadSettings(), "rejection")
    seen = []
    for _ in range(20 * (PROBE + 1)):
        planned = controller.plan({str(i): (0.9,) * 8 for i in range(drafting)}, 16)
        seen.append(sum(planned.values()))
        controller.observe_pass(16 + seen[-1], 16, 0.001 * (16 + seen[-1]))
    settled = seen[10 * (PROBE + 1) :]
    assert controller.is_off
    assert settled.count(0) == len(settled) - 10
    assert max(settled) == 8


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_drawn_decides_whether_it_is_verified(rule, data):
    """Two controllers with the same past, through probes and trials, see one path that differs from its j-th token on:
    they agree on whether it is verified up to there, and if it is not verified past there, on all that follows."""
    one, other = (LookaheadController(LookaheadSettings(), rule) for _ in range(2))
    rows = data.draw(st.integers(2, 16))
    slope = data.draw(st.sampled_from([0.0, 0.001, 0.003, 0.02]))
    for _ in range(data.draw(st.integers(0, 90))):
        plans = [it.plan({"a": (0.7, 0.9), "b": (0.5, 0.6, 0.9)}, rows) for it in (one, other)]
        assert plans[0] == plans[1]
        pass_over(one, plans[0], rows, slope)
        pass_over(other, plans[1], rows, slope)
    for _ in range(8):
        path_a = data.draw(st.lists(probability, max_size=6))
        j = data.draw(st.integers(1, max(1, len(path_a))))
        tail = data.draw(st.lists(probability, max_size=4)) if path_a else []
        plans = [
            it.plan({"a": seen, "b": (0.5, 0.6)}, rows) for it, seen in ((one, path_a), (other, path_a[:j] + tail))
        ]
        assert min(plans[0]["a"], j) == min(plans[1]["a"], j)
        if max(plans[0]["a"], plans[1]["a"]) >= j:
            return  # the drawn token was verified: from here on it is part of the past
        assert plans[0] == plans[1]
        assert one.is_off == other.is_off
        pass_over(one, plans[0], rows, slope)
        pass_over(other, plans[1], rows, slope)


def pass_over(controller, planned, rows, slope) -> None:
    tokens = rows + sum(planned.values())
    controller.observe_pass(tokens, rows, 0.025 + slope * tokens)
    controller.observe_progress(rows, rows, 0.025 + slope * tokens, full=True)


def test_fixed_and_scheduled_modes():
    fixed = LookaheadController(LookaheadSettings(mode="fixed", maximum=3), "coupled")
    assert fixed.plan({"a": (0.1,) * 8, "b": (0.1,)}, 2) == {"a": 3, "b": 1}
    scheduled = LookaheadController(LookaheadSettings(mode="scheduled", schedule={1: 5, 4: 2, 8: 0}), "coupled")
    for n, k in ((1, 5), (3, 5), (4, 2), (7, 2), (8, 0), (20, 0)):
        assert set(scheduled.plan({str(i): (0.9,) * 8 for i in range(n)}, n).values()) == {k}


def test_nothing_to_plan():
    controller = LookaheadController(LookaheadSettings(), "coupled")
    assert controller.plan({}, 100) == {}
    assert controller.plan({"a": ()}, 1) == {"a": 0}
    controller.forget("a")


def test_a_first_pass_may_be_over_a_part_of_a_prompt_alone():
    controller = LookaheadController(LookaheadSettings(), "coupled")
    controller.observe_pass(0, 1, 0.01, prompt_tokens=256)
    controller.observe_pass(4, 4, 0.01)
    assert controller.cost(4) > 0
