"""Figures of the bench against runs that were written down by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support import timeline
from benchmarks.support.actor_rig import Answer, Run
from benchmarks.support.figures import (
    Limits,
    against_bound,
    best_in_turn_k,
    expected_tokens_per_pass,
    figures,
    in_turn_speedup,
    inter_token,
    steady,
    summarise,
)
from benchmarks.support.goals import Goal
from benchmarks.support.provenance import provenance
from benchmarks.support.report import Row, Section, plot, to_json
from benchmarks.support.timed_actors import PassNote, ReplicaNotes, StepNote

REFERENCE = Limits(pass_s=0.025, step_s=0.003, acceptance=0.8)


def a_pass(
    started: float, ended: float, proposed: int, accepted: int, held: float = 0.0, position: int = 0
) -> PassNote:
    return PassNote(
        started=started,
        ended=ended,
        rows=1,
        tokens=1 + proposed,
        prompt_tokens=0,
        proposed=proposed,
        accepted=accepted,
        committed=accepted + 1,
        held_s=held,
        full=int(accepted == proposed),
        marks=[("s", position, 0)],
    )


def a_run() -> Run:
    """One sequence of nine tokens from 10.000 s on: a plain pass, one of 3 of 4 accepted, one of 3 of 3 accepted."""
    target = ReplicaNotes(
        "target-0",
        passes=[
            a_pass(10.000, 10.020, 0, 0, position=5),
            a_pass(10.022, 10.042, 4, 3, position=6),
            a_pass(10.050, 10.070, 3, 3, held=0.006, position=10),
        ],
        arrivals={("s", 6, 111): 10.006, ("s", 7, 222): 10.011},
        deliveries=4,
        streamed=3,
    )
    draft = ReplicaNotes(
        "draft-0",
        steps=[
            StepNote(10.002, 10.005, 4, ("s", 6, 111)),
            StepNote(10.005, 10.009, 2, ("s", 7, 222)),
            StepNote(10.009, 10.012, 3, ("s", 8, 333)),  # was lost on the way
        ],
        arrivals={("s", 5, 0): 10.021, ("s", 6, 0): 10.045},
        deliveries=2,
        streamed=3,
    )
    answer = Answer("s", (1, 2, 3, 4, 5), 0, 9.990, [(10.021, 1), (10.043, 4), (10.071, 4)], list(range(9)))
    return Run([answer], [target], [draft], 6)


def test_the_bound_is_the_geometric_sum() -> None:
    # 1 + .8 + .64 + .512 = 2.952
    assert expected_tokens_per_pass(0.8, 3) == pytest.approx(2.952)
    assert expected_tokens_per_pass(1.0, 3) == 4.0
    assert expected_tokens_per_pass(0.0, 3) == 1.0
    assert REFERENCE.lookahead == 8
    assert REFERENCE.tokens_per_pass == pytest.approx((1 - 0.8**9) / 0.2)


def test_taking_turns_pays_for_drafts_and_hop() -> None:
    # k = 5: (1 - .8^6)/.2 = 3.68928 tokens in 25 + 15 + 2 ms.
    assert in_turn_speedup(REFERENCE, 0.002, 5) == pytest.approx(3.68928 * 25 / 42)
    assert best_in_turn_k(REFERENCE, 0.002) == 5


def test_figures_of_a_run() -> None:
    found = figures(a_run())
    assert found["tokens"] == 9
    assert found["wall_s"] == pytest.approx(0.081)
    assert found["tokens_per_s"] == pytest.approx(9 / 0.081)
    assert found["ttft_p50_s"] == pytest.approx(0.031)
    assert found["acceptance_length"] == pytest.approx(9 / 3)
    assert found["acceptance_rate"] == pytest.approx(6 / 7)
    assert found["rejected_share"] == pytest.approx(1 / 10)
    assert found["pass_s"] == pytest.approx(0.020)
    assert found["target_busy_s_per_1000"] == pytest.approx(1000 * 0.060 / 9)
    assert found["draft_busy_s_per_1000"] == pytest.approx(1000 * 0.010 / 9)
    assert found["draft_rows_per_step"] == pytest.approx(3)


def test_steady_figures_leave_out_start_and_end() -> None:
    """Between the first answer's token at 10.021 and its last at 10.071 lie the second pass and the third."""
    found = figures(a_run())
    assert found["steady_tokens_per_s"] == pytest.approx(8 / 0.050)
    assert found["steady_tokens_in_pass"] == pytest.approx((5 + 4) / 2)
    assert found["steady_acceptance_length"] == pytest.approx(8 / 2)


def test_lost_time_is_split_without_rest() -> None:
    found = figures(a_run())
    # Of 81 ms: 60 in passes, 6 held, between passes 2 + (8 - 6); the rest is before the first and after the last.
    assert found["share_in_passes"] == pytest.approx(60 / 81)
    assert found["share_held_for_drafts"] == pytest.approx(6 / 81)
    assert found["share_between_passes"] == pytest.approx(4 / 81)
    assert found["share_idle"] == pytest.approx(11 / 81)


def test_hops_are_matched_end_to_end() -> None:
    found = figures(a_run())
    assert found["offer_hop_p50_s"] == pytest.approx(0.002)  # of 1 ms and 2 ms; the lost one does not count
    assert found["commit_hop_p50_s"] == pytest.approx(0.003)  # of 1 ms and 3 ms
    assert found["calls_per_pass"] == pytest.approx(6 / 3)
    assert found["stream_items_per_pass"] == pytest.approx(6 / 3)


def test_missing_drafts_are_told_from_rejected_ones() -> None:
    run = a_run()
    limits = Limits(pass_s=0.020, step_s=0.004, acceptance=0.5)  # five steps fit; the bound is 1.96875 tokens
    found = against_bound(run, figures(run), limits)
    bound = 1.96875
    assert found["bound_tokens_per_pass"] == pytest.approx(bound)
    assert found["share_at_bound"] == pytest.approx(9 / bound * 0.020 / 0.081)
    # The first pass had nothing of five, the last held three of five: .5+.25+.125+.0625+.03125 and .5+.25 tokens.
    assert found["share_drafts_not_ready"] == pytest.approx((0.96875 + 0.75) / bound * 0.020 / 0.081)
    parts = found["share_at_bound"] + found["share_drafts_not_ready"] + found["share_rest"]
    assert parts == pytest.approx(60 / 81)


def test_tokens_that_come_together_share_their_time() -> None:
    times = inter_token(a_run().answers[0])
    assert times == pytest.approx([0.022 / 4] * 4 + [0.028 / 4] * 4)


def test_the_steady_pace_leaves_out_start_and_end() -> None:
    early = Answer("a", (), 0, 0.0, [(1.0, 1), (2.0, 1), (3.0, 1)])
    late = Answer("b", (), 0, 0.0, [(1.5, 1), (2.5, 1), (9.0, 1)])
    # All were being answered from 1.5 to 3.0; then came the tokens at 2.0, 2.5 and 3.0.
    found = steady(Run([early, late], [], [], 0))
    assert found["steady_tokens_per_s"] == pytest.approx(3 / 1.5)


def test_summaries() -> None:
    summary = summarise([{"x": 1.0}, {"x": 5.0}, {"x": 2.0}])["x"]
    assert (summary.median, summary.least, summary.most) == (2.0, 1.0, 5.0)


def test_a_trace_has_every_pass_step_hop_and_arrival(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    timeline.write(a_run(), path)
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["name"] for event in events if event["ph"] == "X"}
    assert {"pass: no drafts", "pass: 3 of 4 accepted", "step: 4 nodes", "held for drafts", "offer", "commit"} <= named
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 3 + 1 + 3 + 2 + 2  # passes, a hold, steps, offers, commits
    [second] = [event for event in slices if event["name"] == "pass: 3 of 4 accepted"]
    assert second["ts"] == pytest.approx(32_000)
    assert second["dur"] == pytest.approx(20_000)
    starts = {event["id"] for event in events if event["ph"] == "s"}
    ends = {event["id"] for event in events if event["ph"] == "f"}
    assert starts == ends
    assert [event["name"] for event in events if event["ph"] == "i"] == ["1 tokens", "4 tokens", "4 tokens"]


def test_a_report_says_what_made_it(tmp_path: Path) -> None:
    summary = summarise([figures(a_run())])
    section = Section("one", {"pass": "20 ms"}, [Row("plain", summary, 1.0)], [Goal("speed", 2.0, 3.4)])
    written = json.loads(to_json([section]))
    assert {"commit", "argv", "packages", "cores", "processor", "time"} <= written["provenance"].keys()
    assert written["sections"][0]["goals"][0]["reached"] is False
    assert written["sections"][0]["rows"][0]["figures"]["tokens"] == {"median": 9, "least": 9, "most": 9}
    assert plot([section], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_versions_are_those_that_run() -> None:
    import pydantic

    assert provenance()["packages"]["pydantic"] == pydantic.VERSION


@pytest.mark.parametrize(("value", "at_least", "reached"), [(3.5, True, True), (3.3, True, False), (3.3, False, True)])
def test_goals_point_one_way(value: float, at_least: bool, reached: bool) -> None:
    assert Goal("", value, 3.4, at_least).reached is reached
