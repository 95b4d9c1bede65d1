"""Prometheus beside a local cluster: what `outrider observe` starts, follows, refuses and links to."""

from __future__ import annotations

import html
import re
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prometheus_api import ask, eventually, get

from actors.errors import ConfigError
from cluster.observability import local_prometheus
from cluster.observability.grafana.alerts import alerts
from cluster.observability.grafana.dashboards import all_dashboards
from deployments.runtime.local import free_port


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
        with local_prometheus.prometheus(tmp_path / "p", [], free_port(), interval_s=0.5) as url:
            local_prometheus.write_targets(tmp_path / "p", [f"127.0.0.1:{server.server_port}"])
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
    monkeypatch.setattr(local_prometheus, "rules_file", lambda: {"groups": [{"name": "g", "rules": [{"expr": "1 +"}]}]})
    with (
        pytest.raises(ConfigError, match="prometheus ended at once"),
        local_prometheus.prometheus(tmp_path, [], free_port()),
    ):
        pass


def test_without_prometheus_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install prometheus"), local_prometheus.prometheus(tmp_path, [], 9):
        pass


def test_nodes_that_live() -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.2", "MetricsExportPort": 8081, "Alive": True},
        {"NodeManagerAddress": "10.0.0.3", "MetricsExportPort": 8082, "Alive": False},
        {"NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 8080, "Alive": True},
    ]
    assert local_prometheus.node_addresses(nodes) == ["10.0.0.1:8080", "10.0.0.2:8081"]


def test_a_page_holds_the_links() -> None:
    """They are kilobytes long: a terminal gets the page's address instead."""
    links = local_prometheus.graph_links("http://127.0.0.1:9090", all_dashboards())
    page = local_prometheus.index_page("Here & there", links)
    found = re.findall(r'<li><a href="([^"]*)">([^<]*)</a></li>', page)
    assert [(html.unescape(name), html.unescape(link)) for link, name in found] == links
    assert "<h1>Here &amp; there</h1>" in page


def test_links_hold_every_query() -> None:
    links = local_prometheus.graph_links("http://127.0.0.1:9090", all_dashboards())
    assert [title for title, _ in links] == [model["title"] for model in all_dashboards()]
    for (_, link), model in zip(links, all_dashboards(), strict=True):
        count = sum(len(panel.get("targets", ())) for panel in model["panels"])
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
        assert len([name for name in asked if name.endswith(".expr")]) == count
        assert all("$" not in value for values in asked.values() for value in values)
