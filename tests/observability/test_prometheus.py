"""A real Prometheus beside a running application: what the dashboards ask is answered, and rules are loaded.

What is marked `observability` is run by `make test-observability`; it needs the distribution's prometheus package.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from actors.errors import ConfigError
from cluster import observe
from cluster.config import load_config
from cluster.grafana.alerts import alerts
from cluster.grafana.dashboards import all_dashboards

INTERVAL = "RAY_metrics_report_interval_ms"
CONFIG = {
    "name": "observed",
    "model_id": "emulated",
    "target": {"engine": "emulated", "model": "emulated:reference", "autoscaling": {"max_replicas": 2}},
    "draft": {"kind": "emulated", "model": "emulated:reference", "autoscaling": {"max_replicas": 2}},
}

SILENT = {
    "Tokens per GPU-second": "the emulated tiers hold no GPU",
    "Sequences moved": "no replica goes",
    "Scaling decisions": "the load is too small for a change",
}
"""Panels without data after a small healthy load on CPUs, and why."""


def get(url: str, **parameters: str) -> Any:
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=10) as answer:
        return json.load(answer)


def ask(url: str, expression: str) -> list[Any]:
    """The samples of an instant query, as Prometheus answers it."""
    samples: list[Any] = get(f"{url}/api/v1/query", query=expression)["data"]["result"]
    return samples


def eventually(holds: Callable[[], Any], limit_s: float) -> Any:
    """The first true value of `holds`, asked twice a second; its last value at the limit."""
    deadline = time.monotonic() + limit_s
    while not (value := holds()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return value


@dataclass
class Application:
    """A running application and the Prometheus that scrapes it."""

    url: str
    prometheus: str


def load(url: str, requests: int, refused: int) -> None:
    """Requests that are served, eight at a time, and ones that are refused for their length."""

    def post(words: int) -> int:
        body = {"model": "emulated", "prompt": "w1 " * words, "max_tokens": 48}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status: int = answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        return status

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(post, [8] * requests + [5000] * refused))
    assert statuses == [200] * requests + [400] * refused


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    os.environ[INTERVAL] = "1000"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's models use what pydantic will drop
        import ray

        from deployments import local

        raw = CONFIG | {"ingress": {"port": local.free_port()}}
        with local.ray_cluster(), local.application(load_config(raw)) as url:
            folder = tmp_path_factory.mktemp("prometheus")
            addresses = observe.node_addresses(ray.nodes())
            with observe.prometheus(folder, addresses, local.free_port(), interval_s=1.0) as prometheus:
                # Two rounds: a counter's rate needs a sample from before it grew.
                load(url, 24, 2)
                counted = 'sum(ray_outrider_requests_total{outcome!="error"}) >= 24'
                assert eventually(lambda: ask(prometheus, counted), 60), ask(prometheus, "up")
                load(url, 48, 2)
                assert eventually(lambda: ask(prometheus, counted.replace("24", "72")), 60)
                settled = f"min(timestamp(ray_outrider_requests_total)) >= {time.time() + 3:.0f}"
                assert eventually(lambda: ask(prometheus, settled), 60)  # a few scrapes of the end
                yield Application(url, prometheus)
    del os.environ[INTERVAL]


@pytest.mark.observability
@pytest.mark.ray
class TestRunningApplication:
    def test_every_panel_is_answered(self, application: Application) -> None:
        empty = []
        for model in all_dashboards():
            for panel in model["panels"]:
                for target in panel.get("targets", ()):
                    samples = ask(application.prometheus, observe.local_expression(target["expr"], "2m"))
                    if not any(sample["value"][1] != "NaN" for sample in samples) and panel["title"] not in SILENT:
                        empty.append((model["title"], panel["title"], target["expr"]))
        assert not empty, "\n".join(map(str, empty))

    def test_figures_are_those_of_the_load(self, application: Application) -> None:
        """72 requests of 48 tokens each, 4 refused; accepted are at most proposed; shares are shares."""

        def value(expression: str) -> float:
            (sample,) = ask(application.prometheus, expression)
            return float(sample["value"][1])

        assert value("sum(ray_outrider_requests_total)") == 72
        assert value("sum(ray_outrider_emitted_tokens_total)") == 72 * 48
        assert value("sum(ray_outrider_refused_requests_total)") == 4
        accepted, proposed = (value(f"sum(ray_outrider_{name}_tokens_total)") for name in ("accepted", "proposed"))
        assert 0 < accepted <= proposed
        assert value("sum(ray_outrider_time_to_first_token_seconds_count)") == 72
        assert value("sum(ray_outrider_active_sequences)") == 0
        assert value('max(ray_outrider_ready_replicas{tier="target"})') == 1

    def test_nothing_fires(self, application: Application) -> None:
        groups = get(f"{application.prometheus}/api/v1/rules")["data"]["groups"]
        rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert set(rules) == {alert.name for alert in alerts()}
        assert {rule["health"] for rule in rules.values()} == {"ok"}
        assert {rule["state"] for rule in rules.values()} <= {"inactive", "pending"}

    def test_series_stay_few(self, application: Application) -> None:
        """Four processes record here; the bound of the table is a thousand each."""
        (sample,) = ask(application.prometheus, 'count({__name__=~"ray_outrider_.+"})')
        assert 0 < int(sample["value"][1]) < 1500


@pytest.mark.observability
def test_targets_are_followed(tmp_path: Path) -> None:
    """Prometheus scrapes an exporter that appears after its start, and says so."""

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = b'ray_outrider_ready_replicas{application="a",tier="target",otel_scope_name="x"} 2\n'
            self.send_response(200)
            self.send_header("content-type", "text/plain")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with observe.prometheus(tmp_path / "p", [], _free_port(), interval_s=0.5) as url:
            observe.write_targets(tmp_path / "p", [f"127.0.0.1:{server.server_port}"])
            samples = eventually(lambda: ask(url, "ray_outrider_ready_replicas"), 30)
            assert samples[0]["value"][1] == "2"
            assert "otel_scope_name" not in samples[0]["metric"]
            assert len(get(f"{url}/api/v1/rules")["data"]["groups"][0]["rules"]) == len(alerts())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.observability
def test_a_configuration_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "rules_file", lambda: {"groups": [{"name": "g", "rules": [{"expr": "1 +"}]}]})
    with pytest.raises(ConfigError, match="prometheus ended at once"), observe.prometheus(tmp_path, [], _free_port()):
        pass


def test_without_prometheus_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install prometheus"), observe.prometheus(tmp_path, [], 9):
        pass


def test_nodes_that_live() -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.2", "MetricsExportPort": 8081, "Alive": True},
        {"NodeManagerAddress": "10.0.0.3", "MetricsExportPort": 8082, "Alive": False},
        {"NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 8080, "Alive": True},
    ]
    assert observe.node_addresses(nodes) == ["10.0.0.1:8080", "10.0.0.2:8081"]


def test_links_hold_every_query() -> None:
    links = observe.graph_links("http://127.0.0.1:9090", all_dashboards())
    assert [title for title, _ in links] == [model["title"] for model in all_dashboards()]
    for (_, link), model in zip(links, all_dashboards(), strict=True):
        count = sum(len(panel.get("targets", ())) for panel in model["panels"])
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
        assert len([name for name in asked if name.endswith(".expr")]) == count
        assert all("$" not in value for values in asked.values() for value in values)


def _free_port() -> int:
    from deployments.local import free_port

    return free_port()
