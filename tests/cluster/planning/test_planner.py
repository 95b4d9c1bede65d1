"""The planner and the simulation under it, against closed forms and bounds derived by hand."""

from __future__ import annotations

import pytest

from actors.engines.emulated.language import Agreement
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.settings import TreeSettings
from cluster.planning.planner import PlanInput, break_even, expected_row, expected_tokens, in_turn_speedup, plan
from cluster.planning.simulator import SimulationInput, plain_rate, simulate

TREE = TreeSettings(width=32, branching=9, depth=24, nodes=2048, min_reach=1e-3)


def given(
    acceptance: float = 0.8, corrections: tuple[float, ...] = (0.4, 0.55, 0.72, 0.85), **changes: object
) -> PlanInput:
    """The reference hardware: pass 25 ms, step 3 ms, hop 2 ms, one sequence."""
    agreement = Agreement.model_validate({"acceptance": acceptance, "spread": 0.0, "corrections": corrections})
    fields: dict[str, object] = {
        "target": TargetSpec(pass_ms=25.0),
        "draft": DraftSpec(step_ms=3.0),
        "hop_ms": 2.0,
        "agreements": {"coupled": agreement},
        "tree": TREE,
        "effort": 600,
    }
    return PlanInput.model_validate(fields | changes)


def test_tokens_of_a_pass_are_the_geometric_sum() -> None:
    assert expected_tokens(0.8, 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0


def test_taking_turns_pays_for_drafts_and_the_hop() -> None:
    # (1 - .8^6) / .2 = 3.68928 tokens in 25 + 5 · 3 + 2 = 42 ms, against one in 25.
    assert in_turn_speedup(given(), Agreement(acceptance=0.8, spread=0.0), 5) == pytest.approx(3.68928 * 25 / 42)


def test_break_even() -> None:
    # 25 ms + .1 ms a token: a · (A + B n) = n · B at n = .8 · 25 / (.1 · .2) = 1000.
    assert break_even(TargetSpec(pass_ms=25.0, token_ms=0.1), 0.8) == pytest.approx(1000.0)
    assert break_even(TargetSpec(pass_ms=25.0, token_ms=0.0), 0.8) is None


def test_plain_decoding_is_simulated_at_its_closed_form() -> None:
    # 4 sequences on 2 targets: two in a pass of 10 + 2 · 1 = 12 ms, on each: 4 / 12 ms.
    setup = SimulationInput(
        target=TargetSpec(pass_ms=10.0, token_ms=1.0), sequences=4, targets=2, drafts=0, seconds=6.0
    )
    assert plain_rate(setup) == pytest.approx(4 / 0.012)
    assert simulate(setup).tokens_per_second == pytest.approx(4 / 0.012, rel=0.01)


def test_a_draft_that_is_always_right_sets_the_pace() -> None:
    """One token in 3 ms, and at most 9 in a pass: no less than a draft step a token, no more than 9 in 25 ms."""
    row = expected_row(given(acceptance=1.0), "coupled", "chain", 8)
    assert 1 / 0.003 * 0.95 <= row.tokens_per_second <= 9 / 0.025


def test_a_draft_that_is_always_wrong_costs_next_to_nothing() -> None:
    row = expected_row(given(acceptance=0.0, corrections=(0.0, 0.0, 0.0, 0.0)), "coupled", "tree", 8)
    assert 0.95 <= row.speedup <= 1.0


def test_a_draft_whose_second_guess_is_always_right_is_as_good_as_one_whose_first_is() -> None:
    """A pass verifies alternatives beside the first guess. At most 9 tokens in 25 ms, and no less than one in 3 ms."""
    row = expected_row(given(acceptance=0.0, corrections=(1.0, 1.0, 1.0, 1.0)), "coupled", "tree", 8)
    assert 1 / 0.003 * 0.9 <= row.tokens_per_second <= 9 / 0.025


def test_the_reference_pipeline() -> None:
    """A model of rounds alone gives 2.5x for a chain and 3.4x to 3.6x for a tree. At 1,000
    passes the error of a mean is about 2.5 %, so 10 % is four of them."""
    chain = expected_row(given(effort=1000), "coupled", "chain", 12)
    tree = expected_row(given(effort=1000), "coupled", "tree", 12)
    assert chain.speedup == pytest.approx(2.5, rel=0.1)
    assert tree.speedup == pytest.approx(3.5, rel=0.1)
    assert tree.speedup < (1 - 0.8**13) / 0.2


def test_a_target_that_verifies_trees_commits_more() -> None:
    """At .5 the first guess, another .2 is the second one: a pass that verifies both goes on in .7 of the places. The
    pipeline's model (25/3/2 ms) has 1.62x for paths and 2.19x for trees; the real tree keeps what is left of
    the one before, and does better. A tenth is four errors of a mean."""
    path = expected_row(given(acceptance=0.5, effort=1000, verifies_trees=False), "coupled", "tree", 12)
    tree = expected_row(given(acceptance=0.5, effort=1000), "coupled", "tree", 12)
    assert tree.speedup > 1.2 * path.speedup
    assert path.speedup >= 1.62 * 0.9
    assert tree.speedup >= 2.19 * 0.9


def test_at_saturation_speculation_costs_nothing() -> None:
    """32 sequences, 5 ms + 1 ms a token: a draft token brings .8 for 1 ms, plain decoding 32 / 37."""
    heavy = given(target=TargetSpec(pass_ms=5.0, token_ms=1.0), sequences=32, effort=1600)
    row = expected_row(heavy, "coupled", "tree", 8)
    assert 0.98 <= row.speedup <= 1.02
    assert row.tokens_per_pass < 1.1


def test_the_same_input_gives_the_same_plan() -> None:
    quick = given(effort=60, lookaheads=(4,))
    assert plan(quick) == plan(quick)


def test_prices_decide_what_is_best() -> None:
    """A draft as dear as the target must more than double the speed to be the cheaper way."""
    dear = given(acceptance=0.3, effort=60, lookaheads=(4,), target_gpu_hour=2.0, draft_gpu_hour=8.0)
    free = given(acceptance=0.8, effort=60, lookaheads=(4,), target_gpu_hour=2.0, draft_gpu_hour=0.0)
    assert not plan(dear).pays
    assert plan(free).pays
    # Plain: 40 tokens a second at 2 an hour are 2 / (40 · 3600) a token.
    assert plan(free).rows[0].cost == pytest.approx(1e6 * 2 / (40 * 3600))
