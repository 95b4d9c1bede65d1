"""Carries the tiers' loads from replicas to the policies of cluster.scaling.policies, inside Ray Serve's controller.

Serve calls a policy ten times a second in the controller, and an exception there would stop the scaling of every
application: so nothing here blocks or raises. Serve pickles *this* module by value; what the two policies must share
(drafts scale by what targets miss) lives in cluster.scaling.controller_state, which the controller imports like any
module.
"""

from __future__ import annotations

from typing import Any

from cluster.scaling import controller_state
from cluster.scaling.policies import (
    Decision,
    DraftGoals,
    DraftLoad,
    Memory,
    TargetGoals,
    TargetLoad,
    draft_replicas,
    target_replicas,
)


class TargetPolicy:
    """Ray Serve's policy for the target tier."""

    def __init__(self, goals: dict[str, Any], look_back_s: float) -> None:
        self._goals = TargetGoals.model_validate(goals)
        self._memory = Memory()
        self._look_back_s = look_back_s

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        def decide() -> Decision:
            loads = [TargetLoad(**load) for load in _loads(ctx, TargetLoad)]
            controller_state.post(ctx.app_name, loads)
            current, starting = _replicas(ctx)
            decision = target_replicas(
                loads, current, starting, 0.0, self._goals, self._memory, ctx.current_time, self._look_back_s
            )
            self._memory = decision.memory
            return decision

        return _answer(ctx, decide)


class DraftPolicy:
    """Ray Serve's policy for the draft tier."""

    def __init__(self, goals: dict[str, Any], look_back_s: float) -> None:
        self._goals = DraftGoals.model_validate(goals)
        self._memory = Memory()
        self._look_back_s = look_back_s

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        def decide() -> Decision:
            loads = [DraftLoad(**load) for load in _loads(ctx, DraftLoad)]
            current, starting = _replicas(ctx)
            targets = controller_state.read(ctx.app_name)
            decision = draft_replicas(
                loads, targets, current, starting, self._goals, self._memory, ctx.current_time, self._look_back_s
            )
            self._memory = decision.memory
            return decision

        return _answer(ctx, decide)


def _answer(ctx: Any, decide: Any) -> tuple[int, dict[str, Any]]:
    try:
        decision = decide()
    except Exception as error:  # never raise into the controller
        controller_state.explain(
            ctx.app_name, ctx.deployment_name, ctx.target_num_replicas, f"policy failed: {error!r}"
        )
        return ctx.target_num_replicas, {}
    # What Serve will make of it: a tier at its maximum is saturated, not short of replicas that were asked for.
    allowed = max(ctx.capacity_adjusted_min_replicas, min(ctx.capacity_adjusted_max_replicas, decision.replicas))
    controller_state.explain(ctx.app_name, ctx.deployment_name, allowed, decision.reason)
    return decision.replicas, {"reason": decision.reason}


def _replicas(ctx: Any) -> tuple[int, int]:
    current = len(ctx.running_replicas)
    return current, max(0, ctx.target_num_replicas - current)


def _loads(ctx: Any, kind: type) -> list[dict[str, float]]:
    """One mapping per running replica that has reported everything."""
    metrics: dict[str, dict[Any, float]] = ctx.aggregated_metrics or {}
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    found = []
    for replica in ctx.running_replicas:
        load = {name: metrics[name][replica] for name in names if replica in metrics.get(name, {})}
        if len(load) == len(names):
            found.append(load)
    return found
