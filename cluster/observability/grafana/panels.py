"""Builds Grafana's dashboard model (schema version 39, Grafana 10 and later) from a few words per panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Model = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` may hold {{label}}s."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is one of Grafana's: s, reqps, percentunit, short. `width` is of 24."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "bargauge"] = "timeseries"
    width: int = 8
    stacked: bool = False

    def model(self, number: int, x: int, y: int) -> Model:
        height = 4 if self.kind == "stat" else 8
        custom = {"fillOpacity": 10, "showPoints": "never", "stacking": {"mode": "normal" if self.stacked else "none"}}
        defaults: Model = {"unit": self.unit}
        if self.unit == "percentunit":
            defaults |= {"min": 0, "max": 1}
        if self.kind == "timeseries":
            defaults["custom"] = custom
        instant = self.kind != "timeseries"
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}}
            if instant
            else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [
                {
                    "refId": chr(ord("A") + i),
                    "datasource": SOURCE,
                    "expr": query.expression,
                    "legendFormat": query.legend or "__auto",
                    "instant": instant,
                    "range": not instant,
                }
                for i, query in enumerate(self.queries)
            ],
        }


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and the panels under it."""

    title: str
    panels: tuple[Panel, ...]


def variable(name: str, label: str, query: str) -> Model:
    """A choice among the values of a label; all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(uid: str, title: str, description: str, rows: Sequence[Row], variables: Sequence[Model]) -> Model:
    """The whole model. Panels flow from left to right within their row."""
    panels: list[Model] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > 24:
                x, y, tallest = 0, y + tallest, 0
            panels.append(panel.model(len(panels) + 1, x, y))
            x += panel.width
            tallest = max(tallest, panels[-1]["gridPos"]["h"])
        y += tallest
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["outrider"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source, *variables]},
        "links": [{"type": "dashboards", "title": "Outrider", "tags": ["outrider"], "asDropdown": True}],
        "annotations": {"list": []},
        "panels": panels,
    }
