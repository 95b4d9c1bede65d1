"""Provisioning against Grafana's recorded contract: once through a plain transport, once through grafana-api."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_grafana import TOKEN, Grafana, served
from typer.testing import CliRunner

from actors.errors import ConfigError
from cluster.observability.grafana import client
from cluster.observability.grafana.alerts import alerts
from cluster.observability.grafana.client import GrafanaError, MissingError, Transport, push
from cluster.observability.grafana.dashboards import all_dashboards
from cluster.observability.grafana.managed import rule_group
from deployments.cli import kubernetes

needs_package = pytest.mark.observability
PROMETHEUS = "http://prometheus.monitoring:9090"


def plain(url: str, token: str) -> Transport:
    """What `connect` promises, in the standard library: the contract does not depend on the package."""

    def send(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{url}/api{path}", method=method, headers={"Authorization": f"Bearer {token}"}
        )
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                message = json.load(error)["message"]
            raise (MissingError if error.code == 404 else GrafanaError)(f"{method} {path}: {message}") from error

    return send


@pytest.fixture(params=["", "/grafana"])
def grafana(request: pytest.FixtureRequest) -> Iterator[tuple[Grafana, str]]:
    fake = Grafana(request.param)
    with served(fake) as url:
        yield fake, url


@pytest.fixture(params=[plain, pytest.param(client.connect, marks=needs_package)], ids=["plain", "package"])
def connect(request: pytest.FixtureRequest) -> Callable[[str, str], Transport]:
    chosen: Callable[[str, str], Transport] = request.param
    return chosen


def test_an_empty_grafana_is_filled(grafana: tuple[Grafana, str], connect: Any) -> None:
    fake, url = grafana
    done = push(connect(url, TOKEN), all_dashboards(), PROMETHEUS)
    assert (done.folder_created, done.source, done.written, done.unchanged) == (True, "created", 4, 0)
    assert set(fake.dashboards) == {"outrider-users", "outrider-speculation", "outrider-target", "outrider-draft"}
    assert {d["meta"]["folderUid"] for d in fake.dashboards.values()} == {"outrider"}
    assert fake.sources["outrider-prometheus"]["url"] == PROMETHEUS
    assert done.urls[0] == f"{fake.prefix}/d/outrider-users/outrider-users"


def test_a_second_push_changes_nothing(grafana: tuple[Grafana, str], connect: Any) -> None:
    fake, url = grafana
    push(connect(url, TOKEN), all_dashboards(), PROMETHEUS)
    fake.requests.clear()
    done = push(connect(url, TOKEN), all_dashboards(), PROMETHEUS)
    assert (done.folder_created, done.source, done.written, done.unchanged) == (False, "unchanged", 0, 4)
    assert all(request.startswith("GET ") for request in fake.requests)
    assert len(fake.requests) == 6


def test_what_differs_is_put_right(grafana: tuple[Grafana, str], connect: Any) -> None:
    """An edited dashboard, one moved to another folder, and a data source that points elsewhere."""
    fake, url = grafana
    push(connect(url, TOKEN), all_dashboards(), PROMETHEUS)
    fake.dashboards["outrider-users"]["dashboard"]["title"] = "Mine"
    fake.dashboards["outrider-draft"]["meta"]["folderUid"] = "elsewhere"
    done = push(connect(url, TOKEN), all_dashboards(), "http://other:9090")
    assert (done.source, done.written, done.unchanged) == ("updated", 2, 2)
    assert fake.dashboards["outrider-users"]["dashboard"]["title"] == "Outrider: users"
    assert fake.dashboards["outrider-users"]["dashboard"]["version"] == 2
    assert fake.sources["outrider-prometheus"]["url"] == "http://other:9090"


def test_data_sources_are_left_alone_unless_asked_for(grafana: tuple[Grafana, str], connect: Any) -> None:
    fake, url = grafana
    assert push(connect(url, TOKEN), all_dashboards()).source == "left alone"
    assert fake.sources == {}


def test_alerts_are_pushed_where_asked_for(grafana: tuple[Grafana, str], connect: Any) -> None:
    """Once made, then left as they are, and put right when somebody has changed one."""
    fake, url = grafana
    assert push(connect(url, TOKEN), all_dashboards(), PROMETHEUS).alerts == "left alone"
    assert fake.groups == {}
    assert push(connect(url, TOKEN), all_dashboards(), alerts=True).alerts == "created"
    kept = fake.groups["outrider/outrider"]["rules"]
    assert [rule["title"] for rule in kept] == [alert.name for alert in alerts()]
    assert push(connect(url, TOKEN), all_dashboards(), alerts=True).alerts == "unchanged"
    kept[0]["data"][0]["model"]["expr"] = "vector(0)"
    assert push(connect(url, TOKEN), all_dashboards(), alerts=True).alerts == "updated"
    assert fake.groups["outrider/outrider"]["rules"][0]["data"][0]["model"]["expr"] == alerts()[0].expression


def test_alerts_need_a_data_source(grafana: tuple[Grafana, str], connect: Any) -> None:
    fake, url = grafana
    with pytest.raises(MissingError, match="datasources"):
        push(connect(url, TOKEN), all_dashboards(), alerts=True)
    assert fake.groups == {}


def test_grafana_s_rules_say_what_prometheus_rules_say() -> None:
    """Expression, hold, labels and texts; the value has another name there, and fires whatever it is."""
    for rule, alert in zip(rule_group("f", "s")["rules"], alerts(), strict=True):
        query, condition = rule["data"]
        assert (query["datasourceUid"], query["model"]["expr"]) == ("s", alert.expression)
        assert (rule["condition"], condition["model"]["expression"]) == (condition["refId"], "is_number($A)")
        assert (rule["for"], rule["labels"]) == (alert.hold, {"severity": alert.severity})
        assert len(rule["uid"]) <= 40
        text = rule["annotations"]["summary"]
        assert text.replace("$values.A.Value", "$value") == alert.summary
        assert "$value " not in text


def test_a_wrong_token_is_said(grafana: tuple[Grafana, str], connect: Any) -> None:
    fake, url = grafana
    with pytest.raises(GrafanaError, match="GET /folders/outrider"):
        push(connect(url, "wrong"), all_dashboards())
    assert fake.dashboards == {}


def test_a_broken_gateway_is_said(grafana: tuple[Grafana, str], connect: Any) -> None:
    fake, url = grafana
    fake.broken = True
    with pytest.raises(GrafanaError, match="Bad Gateway"):
        push(connect(url, TOKEN), all_dashboards())


@needs_package
def test_nobody_there() -> None:
    with pytest.raises(GrafanaError, match="GET /folders/outrider"):
        push(client.connect("http://127.0.0.1:1", TOKEN), all_dashboards())


@pytest.mark.parametrize(("url", "token"), [("grafana:3000", TOKEN), ("ftp://grafana", TOKEN), ("http://g", "")])
def test_unusable_arguments(url: str, token: str) -> None:
    with pytest.raises(ConfigError):
        client.connect(url, token)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_api.grafana_api", None)
    with pytest.raises(ConfigError, match=r"outrider\[grafana\]"):
        client.connect("http://grafana:3000", TOKEN)


@needs_package
def test_command(grafana: tuple[Grafana, str]) -> None:
    _, url = grafana
    environment = {"GRAFANA_URL": url, "GRAFANA_TOKEN": TOKEN}
    result = CliRunner().invoke(kubernetes.grafana, ["push", "--alerts", "--prometheus", PROMETHEUS], env=environment)
    assert result.exit_code == 0, result.output
    assert "4 written, 0 unchanged" in result.output
    assert "alerts created" in result.output
    assert TOKEN not in result.output
    refused = CliRunner().invoke(kubernetes.grafana, ["push", "--url", url, "--token", "wrong"])
    assert refused.exit_code == 1
    assert "error: GET /folders/outrider" in refused.output
