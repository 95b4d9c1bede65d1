"""What `outrider status` says of what replicas and Serve tell."""

from __future__ import annotations

import pytest

from actors.messages import VerificationResult
from actors.replica.pass_metrics import PassMetrics, StepMetrics
from actors.settings import TargetSettings
from actors.target.pass_report import PassReport
from actors.telemetry import MemoryRecorder
from deployments.cli.explain import status_rows


class Held:
    active, queued, cached_positions = 2, 1, 205


def test_a_replica_tells_what_its_controllers_do() -> None:
    """One pass of two sequences: 4 of 6 draft tokens accepted, 6 committed; a fifth of the time held."""
    accounts = PassMetrics(MemoryRecorder(), TargetSettings(slots=4, context=1024))
    results = [VerificationResult("a", 0, (1, 2, 3), 3, 2), VerificationResult("b", 0, (1, 2, 3), 3, 2)]
    accounts.pass_done(PassReport({"o": results}, seconds=0.08, hold_seconds=0.02), Held())
    facts = accounts.facts(Held())
    assert facts["lookahead"] == 3
    assert facts["acceptance_rate"] == 4 / 6
    assert facts["acceptance_length"] == 3
    assert facts["held"] == pytest.approx(0.2)
    (row,) = (row for row in status_rows({"target": {"replicas": {"t": {"sequences": 2, **facts}}}}) if row[1] == "t")
    assert row[2] == "2 sequences, 2 of 4 slots, 1 waiting, cache 5%"
    assert row[3] == "lookahead 3.0, 67% accepted, 3.00 tokens per pass, 20% of the time held for drafts"


def test_a_draft_tells_its_steps() -> None:
    accounts = StepMetrics(MemoryRecorder(), 8)
    assert accounts.facts() == {}
    accounts.step_done(seconds=0.003, drafted=4, sequences=1)
    told = {"replicas": {"d": {"sequences": 1, "sessions": 1.0, "slots": 8.0, **accounts.facts()}}}
    (row,) = (row for row in status_rows({"draft": told}) if row[1] == "d")
    assert row == ("draft", "d", "1 sequence, 1 of 8 slots", "4.0 draft tokens per step, steps of 3.0 ms")


def test_tiers_without_replicas_and_refused_ones() -> None:
    rows = status_rows({"target": {"replicas": {}, "refused": {}}, "draft": {"refused": {"d": "another vocabulary"}}})
    assert rows == [
        ("target", "-", "no replica", ""),
        ("draft", "d", "not used: another vocabulary", ""),
        ("draft", "-", "no replica", ""),
    ]


def test_what_a_tier_waits_for() -> None:
    serve = {
        "states": {"RUNNING": 1, "STARTING": 1},
        "status": "UPSCALING",
        "message": "",
        "obstacle": "no GPU is free",
    }
    rows = status_rows({"target": {"replicas": {"t": {"sequences": 0}}, "serve": serve}})
    assert ("target", "-", "1 starting; no GPU is free", "") in rows
