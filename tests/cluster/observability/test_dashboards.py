"""Dashboards and alerts name only what exists, are stored as built, and everything in the table is shown somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors import telemetry
from actors.telemetry import METRICS, Metric
from cluster.observability.grafana import queries
from cluster.observability.grafana.alerts import alerts
from cluster.observability.grafana.artefacts import LIMIT, artefacts
from cluster.observability.grafana.dashboards import all_dashboards
from cluster.observability.grafana.queries import Scope

ROOT = Path(__file__).resolve().parents[3]
COMPONENT = ROOT / "k8s" / "components" / "monitoring"
SUFFIXES = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_count"}}
BY_SERIES = {f"ray_{metric.name}{suffix}": metric for metric in METRICS for suffix in SUFFIXES[metric.kind]}


def expressions() -> list[tuple[str, str]]:
    """Where it stands, and what it is: every PromQL expression of the project."""
    found = [
        (f"{model['title']} / {panel['title']}", target["expr"])
        for model in all_dashboards()
        for panel in model["panels"]
        for target in panel.get("targets", ())
    ]
    variables = [(m["title"], v["definition"]) for m in all_dashboards() for v in m["templating"]["list"][1:]]
    return found + variables + [(alert.name, alert.expression) for alert in alerts()]


@pytest.mark.parametrize(("place", "expression"), expressions())
def test_every_metric_and_label_exists(place: str, expression: str) -> None:
    """Series are in the table, of the kind that their suffix says; labels are ones that the series has."""
    names = re.findall(r"\bray_\w+", expression)
    assert names
    for name in names:
        assert name in BY_SERIES, place
    common = {*telemetry.COMMON_TAGS, "le"}
    for name, selector in re.findall(r"\b(ray_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)=~?\"", selector))
        assert labels <= common | set(BY_SERIES[name].tags), place
    for labels_text, name in re.findall(r"by \(([^)]*)\) \((?:rate\()?(ray_\w+)", expression):
        assert set(labels_text.split(", ")) <= common | set(BY_SERIES[name].tags), place
    assert "_sum" not in expression  # see cluster/observability/grafana/queries.py


def test_every_metric_is_shown() -> None:
    shown = {BY_SERIES[name] for _, expression in expressions() for name in re.findall(r"\bray_\w+", expression)}
    assert set(METRICS) - shown == set()


def test_table() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"outrider_[a-z_]+", metric.name)
        assert not metric.name.endswith("_total")  # Ray adds it
        assert bool(metric.boundaries) == (metric.kind == "histogram")
        assert all(0 < a < b for a, b in zip(metric.boundaries, metric.boundaries[1:], strict=False))
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
        for tag in metric.tags:
            assert tag in telemetry.TAG_VALUES


def test_cardinality_is_bounded() -> None:
    """At most 1,000 series per replica for all that it can record, whatever clients send."""
    listed = 20  # the most values that a tag has whose values are listed by the code that records it

    def series(metric: Metric) -> int:
        count = len(metric.boundaries) + 3 if metric.kind == "histogram" else 1
        for tag in metric.tags:
            count *= len(telemetry.TAG_VALUES[tag]) or listed
        return count

    target_or_draft = [m for m in METRICS if not {"route", "reason"} & set(m.tags)]
    assert sum(series(metric) for metric in target_or_draft) < 1000
    assert {m.name for m in METRICS if series(m) > 150} == set()


def test_stored_files_are_what_the_code_builds() -> None:
    built = artefacts()
    stored = {str(path.relative_to(COMPONENT)) for path in COMPONENT.rglob("*.json")} | {"alerts.yaml"}
    assert stored == set(built)
    for name, text in built.items():
        assert (COMPONENT / name).read_text() == text, f"{name}: run `outrider grafana build`"
        assert len(text.encode()) < LIMIT


def test_each_dashboard_has_its_config_map() -> None:
    kustomization = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())
    mapped = sorted(file for generator in kustomization["configMapGenerator"] for file in generator["files"])
    assert mapped == sorted(name for name in artefacts() if name.endswith(".json"))
    assert kustomization["generatorOptions"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("model", all_dashboards(), ids=lambda model: model["uid"])
def test_model(model: Any) -> None:
    """Ids are unique, panels do not overlap and stay within 24 columns, all have a unit, and JSON holds it."""
    panels = model["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(model["uid"]) <= 40
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        covered = {(grid["x"] + i, grid["y"] + j) for i in range(grid["w"]) for j in range(grid["h"])}
        assert not covered & cells
        cells |= covered
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${source}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert json.loads(json.dumps(model)) == model
    legends = [target["legendFormat"] for panel in panels for target in panel.get("targets", ())]
    for legend in legends:
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= {*telemetry.COMMON_TAGS, *telemetry.TAG_VALUES}


def test_every_alert_has_a_runbook_section() -> None:
    """A heading of the alert's name, with something to read and something to do below it."""
    runbook = (ROOT / "k8s" / "README.md").read_text()
    sections = dict(re.findall(r"^#### (\w+)\n(.*?)(?=^#|\Z)", runbook, re.MULTILINE | re.DOTALL))
    assert set(sections) == {alert.name for alert in alerts()}
    for alert in alerts():
        assert len(sections[alert.name].split()) >= 25
        assert alert.rule()["annotations"]["runbook"] == f"k8s/README.md#{alert.name.lower()}"


def test_shares_are_taken_at_boundaries_only() -> None:
    with pytest.raises(ValueError, match=r"no boundary 0\.3"):
        queries.slower(Scope(), telemetry.TTFT, 0.3)
