"""The alert rules as Grafana's own, for a Grafana whose Prometheus is not ours to give rule files to.

The same expressions as in the rule file: what they return is what fires. Grafana keeps a query's result (A) apart from
the condition (B), and calls the value `$values.A.Value` where Prometheus says `$value`.
"""

from __future__ import annotations

from typing import Any

from cluster.observability.grafana.alerts import Alert, alerts

GROUP = "outrider"
INTERVAL_S = 60
EXPRESSION = "__expr__"
"""Grafana's name for what computes on the results of other queries."""


def rule_group(folder: str, source: str) -> dict[str, Any]:
    """All rules as one group, in the form of the alerting provisioning API. `folder` and `source` are uids."""
    return {
        "title": GROUP,
        "folderUid": folder,
        "interval": INTERVAL_S,
        "rules": [_rule(alert, folder, source) for alert in alerts()],
    }


def _rule(alert: Alert, folder: str, source: str) -> dict[str, Any]:
    rule = alert.rule()
    annotations = {name: text.replace("$value", "$values.A.Value") for name, text in rule["annotations"].items()}
    return {
        "uid": alert.name.lower(),
        "title": alert.name,
        "folderUID": folder,
        "ruleGroup": GROUP,
        "condition": "B",
        "data": [
            _data("A", source, {"expr": alert.expression, "instant": True, "range": False}),
            # Prometheus fires for each series that is there, whatever its value: for zero too.
            _data("B", EXPRESSION, {"type": "math", "expression": "is_number($A)"}),
        ],
        "for": alert.hold,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": rule["labels"],
        "annotations": annotations,
    }


def _data(reference: str, source: str, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "refId": reference,
        "datasourceUid": source,
        "relativeTimeRange": {"from": 600, "to": 0},
        "model": {"refId": reference, **model},
    }
