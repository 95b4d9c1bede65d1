"""What replicas report to the policies, by hand-derived values; and that the policies find all that they read."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from actors.messages import VerificationResult
from actors.replica.busy import BusyShare
from actors.replica.pass_metrics import PassMetrics
from actors.settings import TargetSettings
from actors.target.pass_report import PassReport
from actors.telemetry import MemoryRecorder
from cluster.scaling.policies import TargetLoad


class Held:
    active, queued, cached_positions = 4, 0, 100


def test_residence_is_time_in_passes_over_sequences_that_ended() -> None:
    """Four sequences in passes of 0.5 s, one of which ends in every other pass: one a second of four at once, 4 s each
    (Little's law). The last twenty or so count, so after a hundred it is known to a few percent."""
    accounts = PassMetrics(MemoryRecorder(), TargetSettings(slots=4, context=1024))
    assert accounts.load(Held())["residence_s"] == 0.0
    for number in range(200):
        ends = [VerificationResult("a", 0, (1,), finish="length" if number % 2 else None)]
        going = [VerificationResult(name, 0, (1,)) for name in "bcd"]
        report = PassReport({"o": ends + going}, seconds=0.4, commit_seconds=0.1)
        accounts.pass_done(report, Held())
    assert accounts.load(Held())["residence_s"] == pytest.approx(4.0, rel=0.05)
    assert accounts.load(Held()).keys() == {field.name for field in fields(TargetLoad)}


def test_a_thread_is_as_busy_as_it_was_of_late() -> None:
    busy = BusyShare()
    assert busy.at(100.0) == 0.0
    busy.worked(100.0, 100.0 + BusyShare.MEMORY_S)
    now = 100.0 + BusyShare.MEMORY_S
    assert busy.at(now) == pytest.approx(1 - math.exp(-1))
    assert busy.at(now + BusyShare.MEMORY_S) == pytest.approx((1 - math.exp(-1)) * math.exp(-1))
    for turn in range(4000):  # 30 ms of every 100 for ever
        busy.worked(now + 0.1 * turn, now + 0.1 * turn + 0.03)
    assert busy.at(now + 400.0) == pytest.approx(0.3, abs=0.01)
