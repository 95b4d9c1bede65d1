"""The policies as Ray Serve calls them: what is read from its context, what is recorded, and that nothing is raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors import telemetry
from actors.telemetry import MemoryRecorder
from cluster.scaling import controller_state
from deployments.tiers.autoscaling_policies import DraftPolicy, TargetPolicy

SLOTS = 10


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> MemoryRecorder:
    shared = MemoryRecorder()
    monkeypatch.setattr(controller_state, "_recorder", lambda application, deployment: shared)
    for table in ("_targets", "_last", "_recorders"):
        monkeypatch.setattr(controller_state, table, {})
    return shared


def context(running: float, **more: Any) -> Any:
    """One target replica of ten slots with so many sequences, in a tier of one to three."""
    load = {
        "running": running,
        "waiting": 0.0,
        "slots": SLOTS,
        "kv_share": 0.0,
        "inter_token_s": 0.0,
        "residence_s": 0.0,
    }
    load |= {"starved": 0.0, "declined": 0.0}
    facts = {
        "app_name": "a",
        "deployment_name": "TargetTier",
        "running_replicas": ["r1"],
        "target_num_replicas": 1,
        "aggregated_metrics": {name: {"r1": value} for name, value in load.items()},
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 3,
        "current_time": 100.0,
        "policy_state": {},
    }
    return SimpleNamespace(**facts | more)


def desired(recorder: MemoryRecorder) -> list[float]:
    return [value for (name, _), value in recorder.values.items() if name == telemetry.DESIRED_REPLICAS.name]


def test_changes_are_recorded_with_direction_and_reason(recorder: MemoryRecorder) -> None:
    """At 80 % of ten slots, 4 sequences want one replica and 12 want two; the figures stay out of the label."""
    policy = TargetPolicy({}, 15.0)
    for running in (4, 4, 12, 12, 4):
        policy(context(running))
    counted = {dict(tags)["direction"]: (value, dict(tags)["reason"]) for (_, tags), value in recorder.sums.items()}
    reason = "N sequences for N slots a replica"
    assert counted == {"up": (1, reason), "down": (1, reason)}
    assert desired(recorder) == [1]


def test_what_is_asked_for_is_within_bounds(recorder: MemoryRecorder) -> None:
    """Or a tier at its maximum would look as if replicas failed to come."""
    TargetPolicy({}, 15.0)(context(100, capacity_adjusted_max_replicas=1))
    assert desired(recorder) == [1]
    TargetPolicy({}, 15.0)(context(0, capacity_adjusted_min_replicas=2))
    assert desired(recorder) == [2]


@pytest.mark.parametrize("policy", [TargetPolicy({}, 15.0), DraftPolicy({}, 15.0)])
def test_nothing_is_raised_into_the_controller(recorder: MemoryRecorder, policy: Any) -> None:
    """It would stop the scaling of every application; as many replicas stay as there are."""
    broken = context(4, aggregated_metrics=7, target_num_replicas=2)
    assert policy(broken)[0] == 2
    assert desired(recorder) == [2]
