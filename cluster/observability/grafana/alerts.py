"""Alert rules. Each names what a person should look at first; the runbook (k8s/README.md) says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actors import telemetry as t
from cluster.observability.grafana import queries as q
from cluster.observability.grafana.queries import Scope

TTFT_SECONDS, TTFT_SHARE = 1.0, 0.05
"""Objective: 95 % of first tokens within a second."""
ITL_SECONDS, ITL_SHARE = 0.1, 0.01
"""Objective: 99 % of tokens within 100 ms of the one before."""
_APP = "application"


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule of Prometheus. `page` wakes somebody, `ticket` can wait for the morning."""

    name: str
    expression: str
    hold: str
    severity: Literal["page", "ticket"]
    summary: str

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"k8s/README.md#{self.name.lower()}"},
        }


def _burning(metric: t.Metric, limit: float, share: float, factor: float, short: str, long: str) -> str:
    """Both windows spend the error budget `factor` times too fast: the long one for weight, the short one so that
    the alert ends when the trouble does (Google's SRE workbook, chapter 5).
    """
    windows = (q.slower(Scope(window=window), metric, limit, _APP) for window in (long, short))
    return " and ".join(f"({window}) > {factor * share:g}" for window in windows)


def alerts() -> tuple[Alert, ...]:
    """All rules, the users' first."""
    five, quarter = Scope(window="5m"), Scope(window="15m")
    drafts_run = f"{q.rate(quarter, t.DRAFTED, _APP)} > 0"
    linked = {tier: q.highest(five, t.READY_REPLICAS, _APP, where=f'tier="{tier}"') for tier in ("target", "draft")}
    target = 'tier="target"'
    held = q.ratio(q.total(five, t.ACTIVE, _APP, where=target), q.total(five, t.SLOTS, _APP, where=target))
    wanted = q.highest(five, t.DESIRED_REPLICAS, _APP, "tier")
    return (
        Alert(
            "OutriderNoTarget",
            f"{linked['target']} == 0",
            "2m",
            "page",
            "{{ $labels.application }} has no target replica: nothing is served.",
        ),
        Alert(
            "OutriderErrors",
            f"{q.errors(five, _APP)} > 0.02",
            "5m",
            "page",
            "{{ $value | humanizePercentage }} of {{ $labels.application }}'s requests end with an error.",
        ),
        Alert(
            "OutriderTtftBurning",
            _burning(t.TTFT, TTFT_SECONDS, TTFT_SHARE, 6, "5m", "1h"),
            "2m",
            "page",
            "{{ $labels.application }}: first tokens later than 1 s spend the objective's budget six times too fast.",
        ),
        Alert(
            "OutriderItlBurning",
            _burning(t.ITL, ITL_SECONDS, ITL_SHARE, 10, "5m", "1h"),
            "2m",
            "page",
            "{{ $labels.application }}: gaps above 100 ms spend the objective's budget ten times too fast.",
        ),
        Alert(
            "OutriderTargetSaturated",
            f"{q.total(five, t.QUEUE, _APP, where=target)} > 0 and {held} > 0.95",
            "10m",
            "ticket",
            "{{ $labels.application }}: sequences wait, and all slots of the target tier are taken.",
        ),
        Alert(
            "OutriderRefusing",
            f"{q.refusals(five, _APP)} > 0.05",
            "5m",
            "ticket",
            "{{ $labels.application }} turns away {{ $value | humanizePercentage }} of its requests.",
        ),
        Alert(
            "OutriderScalingStuck",
            f"{wanted} > {q.highest(five, t.READY_REPLICAS, _APP, 'tier')}",
            "15m",
            "ticket",
            "{{ $labels.application }}: the {{ $labels.tier }} tier has fewer replicas than its policy asks for.",
        ),
        Alert(
            "OutriderCrashLoop",
            f"{q.rate(quarter, t.ACTOR_LOSSES, _APP, 'tier')} * 900 > 2.5",
            "1m",
            "ticket",
            "{{ $labels.application }}: {{ $value | humanize }} actors of the {{ $labels.tier }} tier were lost within "
            "fifteen minutes.",
        ),
        Alert(
            "OutriderNoDraft",
            f"{linked['draft']} == 0 and {linked['target']} > 0",
            "15m",
            "ticket",
            "{{ $labels.application }} decodes plainly: no draft replica is linked.",
        ),
        Alert(
            "OutriderSpeculationNotPaying",
            f"{q.acceptance_length(quarter, _APP)} < 1.1 and {drafts_run}",
            "15m",
            "ticket",
            "{{ $labels.application }}: drafts run, and a pass commits {{ $value | humanize }} tokens per sequence.",
        ),
        Alert(
            "OutriderDraftStarvation",
            f"{q.starvation(five, _APP)} > 0.5",
            "10m",
            "ticket",
            "{{ $labels.application }}: {{ $value | humanizePercentage }} of rows wanted drafts and found none.",
        ),
        Alert(
            "OutriderAcceptanceCollapsed",
            f"{q.acceptance_rate(quarter, _APP)} < 0.5 * ({q.acceptance_rate(Scope(window='6h'), _APP)})",
            "10m",
            "ticket",
            "{{ $labels.application }}: the acceptance rate is below half of what it was.",
        ),
    )


def rules_file() -> dict[str, Any]:
    """A rule file as Prometheus reads it, and the `spec` of a PrometheusRule."""
    return {"groups": [{"name": "outrider", "rules": [alert.rule() for alert in alerts()]}]}


def prometheus_rule() -> dict[str, Any]:
    """The rules as Prometheus Operator's resource."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "outrider",
            "labels": {"app.kubernetes.io/name": "outrider", "release": "prometheus"},
        },
        "spec": rules_file(),
    }
