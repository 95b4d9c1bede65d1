"""Prometheus beside a Ray cluster on one machine, for a laptop: scraping, rules, and the links to look at.

Finds the nodes through Ray, so that it follows nodes that come and go. In Kubernetes the PodMonitors do this.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from actors.errors import ConfigError
from cluster.observability.grafana.alerts import rules_file
from cluster.observability.grafana.panels import Model

START_LIMIT_S = 30.0
_TARGETS = "targets.json"


def node_addresses(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """host:port of every living node's exporter, from what `ray.nodes()` returns."""
    return sorted(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes if node["Alive"])


def write_targets(folder: Path, addresses: Sequence[str]) -> None:
    """Tell Prometheus, which watches the file, what to scrape."""
    text = json.dumps([{"targets": list(addresses), "labels": {"job": "outrider"}}])
    fresh = folder / f"{_TARGETS}.tmp"
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(folder / _TARGETS)


def configuration(folder: Path, interval_s: float) -> dict[str, Any]:
    """Prometheus' configuration: one job of the nodes, and the project's alert rules."""
    milliseconds = f"{round(interval_s * 1000)}ms"
    return {
        "global": {"scrape_interval": milliseconds, "evaluation_interval": milliseconds},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "outrider",
                "file_sd_configs": [{"files": [str(folder / _TARGETS)], "refresh_interval": "5s"}],
                # Labels of Ray's exporter that say nothing and make series longer.
                "metric_relabel_configs": [{"action": "labeldrop", "regex": "otel_scope_.*"}],
            }
        ],
    }


@contextlib.contextmanager
def prometheus(folder: Path, addresses: Sequence[str], port: int, interval_s: float = 5.0) -> Iterator[str]:
    """Run Prometheus on 127.0.0.1:`port` until the context ends; yields its address. Data go below `folder`.

    Raises ConfigError when it is not installed or does not come up.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        raise ConfigError("prometheus is not installed: `apt-get install prometheus`, or a release from prometheus.io")
    folder.mkdir(parents=True, exist_ok=True)
    write_targets(folder, addresses)
    (folder / "rules.yml").write_text(yaml.safe_dump(rules_file(), width=1000), encoding="utf-8")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(folder, interval_s)), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--storage.tsdb.retention.time=7d",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _await_ready(process, url, folder / "prometheus.log")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"prometheus ended at once: {''.join(last)}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/-/ready"):
            return
        time.sleep(0.1)
    raise ConfigError(f"prometheus did not answer on {url} within {START_LIMIT_S:g} s; see {log}")


def graph_links(url: str, dashboards: Sequence[Model]) -> list[tuple[str, str]]:
    """Title and Prometheus graph page of each dashboard: its panels' queries, one below the other."""
    links = []
    for model in dashboards:
        expressions = [target["expr"] for panel in model["panels"] for target in panel.get("targets", ())]
        parameters = "&".join(
            f"g{i}.expr={quote(local_expression(expression))}&g{i}.tab=0" for i, expression in enumerate(expressions)
        )
        links.append((model["title"], f"{url}/graph?{parameters}"))
    return links


def index_page(title: str, links: Sequence[tuple[str, str]]) -> str:
    """A page in HTML that holds the links: they are kilobytes long, too long for a terminal."""
    items = "".join(f'<li><a href="{escape(link)}">{escape(name)}</a></li>' for name, link in links)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en">{head}<h1>{escape(title)}</h1><ul>{items}</ul></html>\n'


def local_expression(expression: str, window: str = "1m") -> str:
    """A panel's expression with the dashboard's variables filled in: every application, and a fixed window."""
    return expression.replace("$__rate_interval", window).replace("$application", ".*")
