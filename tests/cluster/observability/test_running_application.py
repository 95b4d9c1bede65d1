"""A real Prometheus and a collector beside a running application: under load, growing, and losing a replica.

What the dashboards ask is answered, every metric of the table is recorded, figures are those of the load, no alert
fires, and requests are traced through all four parts. `make test-observability` runs this.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from collector import collector
from prometheus_api import ask, eventually, get, value

from actors import telemetry
from actors.telemetry import METRICS
from cluster.config.deployment import load_config
from cluster.observability import local_prometheus
from cluster.observability.grafana.alerts import alerts
from cluster.observability.grafana.dashboards import all_dashboards
from cluster.observability.grafana.queries import series

pytestmark = [pytest.mark.observability, pytest.mark.ray]

TIER: dict[str, Any] = {
    "model": "emulated:reference",
    "settings": {"slots": 4},
    "resources": {"num_cpus": 0.5, "num_gpus": 0.5},  # of GPUs that are Ray's bookkeeping only
    "autoscaling": {"max_replicas": 2, "upscale_delay_s": 0},
}
CONFIG: dict[str, Any] = {
    "name": "observed",
    "model_id": "emulated",
    "target": {"engine": "emulated", **TIER},
    "draft": {"kind": "emulated", **TIER},
}
CLIENTS = 8
TOKENS = 48
REFUSED = 4
LIMIT_S = 90.0


class Load:
    """Clients that ask again and again until the context ends. Counts answers by status."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        self._lock = threading.Lock()
        self.answers: Counter[int] = Counter()

    def _ask(self) -> None:
        while not self._over.is_set():
            status = post(self._url, words=8)
            with self._lock:
                self.answers[status] += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def post(url: str, words: int) -> int:
    """A completion's status."""
    body = {"model": "emulated", "prompt": "w1 " * words, "max_tokens": TOKENS, "ignore_eos": True}
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


def kill_one(tier: str) -> None:
    """The process of one of the tier's models ends at once."""
    import ray
    from ray.util import list_named_actors

    from deployments.tiers.actor_discovery import NAMESPACE, actor_prefix

    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    victim = min(name for name in names if name.startswith(actor_prefix(CONFIG["name"], tier)))
    ray.kill(ray.get_actor(victim, namespace=NAMESPACE))


@dataclass
class Observed:
    """A cluster's address, a Prometheus that has seen it all, answers by status, and the spans of the requests."""

    cluster: str
    prometheus: str
    answers: Counter[int]
    spans: list[Any]

    def value(self, expression: str) -> float:
        return value(self.prometheus, expression)


def run(url: str, prometheus: str) -> Counter[int]:
    """More sequences than slots; both tiers grow; one replica of each dies; refusals; then quiet."""

    def comes(expression: str) -> None:
        assert eventually(lambda: ask(prometheus, expression), LIMIT_S), expression

    with Load(url) as load:
        comes("sum(ray_outrider_requests_total) >= 24")
        for tier in ("target", "draft"):
            comes(f'sum(ray_outrider_scaling_decisions_total{{tier="{tier}",direction="up"}}) > 0')
            comes(f'max(ray_outrider_ready_replicas{{tier="{tier}"}}) == 2')
            comes(f'count(ray_outrider_active_sequences{{tier="{tier}"}} > 0) == 2')
            kill_one(tier)
            comes(f'sum(ray_outrider_moved_sequences_total{{tier="{tier}"}}) > 0')
    load.answers.update(post(url, words=5000) for _ in range(REFUSED))
    comes(f"sum(ray_outrider_requests_total) == {load.answers[200]}")
    comes("sum(ray_outrider_active_sequences) == 0")
    comes(f"min(timestamp(ray_outrider_requests_total)) >= {time.time() + 3:.0f}")  # a few scrapes of the end
    return load.answers


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with pytest.MonkeyPatch.context() as environment, warnings.catch_warnings(), collector() as (endpoint, spans):
        environment.setenv("RAY_metrics_report_interval_ms", "1000")
        environment.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
        warnings.simplefilter("ignore")  # Ray's models use what pydantic will drop
        import ray

        from deployments.runtime import local

        raw = CONFIG | {"ingress": {"port": local.free_port()}, "tracing": {"endpoint": endpoint}}
        ray.init(
            address="local",
            num_cpus=local.LOGICAL_CPUS,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=local.OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            with local.application(load_config(raw)) as url:
                folder = tmp_path_factory.mktemp("prometheus")
                addresses = local_prometheus.node_addresses(ray.nodes())
                with local_prometheus.prometheus(folder, addresses, local.free_port(), interval_s=1.0) as prometheus:
                    yield Observed(ray.get_runtime_context().gcs_address, prometheus, run(url, prometheus), spans)
        finally:
            ray.shutdown()


def test_every_request_is_answered(observed: Observed) -> None:
    """A replica of each tier died under way: that cost nobody an answer."""
    assert set(observed.answers) == {200, 400}
    assert observed.answers[400] == REFUSED


def test_every_panel_is_answered(observed: Observed) -> None:
    empty = []
    for model in all_dashboards():
        for panel in model["panels"]:
            for target in panel.get("targets", ()):
                samples = ask(observed.prometheus, local_prometheus.local_expression(target["expr"], "4m"))
                if all(sample["value"][1] == "NaN" for sample in samples):
                    empty.append((model["title"], panel["title"], target["expr"]))
    assert not empty, "\n".join(map(str, empty))


def test_every_metric_is_recorded(observed: Observed) -> None:
    """Each row of the table, by tier and model, with the tags that it declares and values that it lists."""
    for metric in METRICS:
        name = series(metric, "_count" if metric.kind == "histogram" else "")
        samples = ask(observed.prometheus, f"last_over_time({name}[10m])")
        assert samples, f"{metric.name} was never recorded"
        for labels in (sample["metric"] for sample in samples):
            # Scaling is decided for an application and tier, in Serve's controller, which knows no model.
            common = set(telemetry.COMMON_TAGS) - ({"model"} if labels["replica"] == "controller" else set())
            assert common | set(metric.tags) <= labels.keys(), metric.name
            for tag in metric.tags:
                allowed = telemetry.TAG_VALUES[tag]
                assert not allowed or labels[tag] in allowed, (metric.name, tag)


def test_figures_are_those_of_the_load(observed: Observed) -> None:
    """As many tokens as were asked for, none twice, although sequences moved; shares are shares."""
    served = observed.answers[200]
    assert observed.value("sum(ray_outrider_requests_total)") == served
    assert observed.value("sum(ray_outrider_emitted_tokens_total)") == served * TOKENS
    assert observed.value("sum(ray_outrider_refused_requests_total)") == REFUSED
    assert observed.value("sum(ray_outrider_active_sequences)") == 0
    assert observed.value("sum(ray_outrider_time_to_first_token_seconds_count)") == served
    answers = observed.value('sum(ray_outrider_http_responses_total{route="/v1/completions",status="2xx"})')
    assert answers == served
    accepted, proposed = (
        observed.value(f"sum(last_over_time(ray_outrider_{name}_tokens_total[10m]))")
        for name in ("accepted", "proposed")
    )
    assert 0 < accepted <= proposed
    places = [
        observed.value(f"sum(last_over_time(ray_outrider_position_{name}_total[10m]))")
        for name in ("accepted", "proposed")
    ]
    assert places == [accepted, proposed]


def test_scaling_decisions_have_reasons(observed: Observed) -> None:
    samples = ask(observed.prometheus, 'ray_outrider_scaling_decisions_total{direction="up"}')
    reasons = {(sample["metric"]["tier"], sample["metric"]["reason"]) for sample in samples}
    assert ("target", "N sequences for N slots a replica") in reasons
    assert {tier for tier, _ in reasons} == {"target", "draft"}


def test_nothing_fires(observed: Observed) -> None:
    groups = get(f"{observed.prometheus}/api/v1/rules")["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {alert.name for alert in alerts()}
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    assert {rule["state"] for rule in rules.values()} <= {"inactive", "pending"}


def test_series_stay_few(observed: Observed) -> None:
    """The bound of the table is a thousand a process, and it holds for all of these together, per process."""
    processes = ask(observed.prometheus, 'count by (replica) ({__name__=~"ray_outrider_.+"})')
    assert len(processes) >= 6
    assert max(int(sample["value"][1]) for sample in processes) < 500


def test_a_request_is_one_trace_through_all_parts(observed: Observed) -> None:
    """Each request has an ingress span; those that no replica left are whole: one root, two below its one child."""
    served = observed.answers[200]

    def traces() -> dict[bytes, list[Any]]:
        found = defaultdict(list)
        for span in list(observed.spans):
            found[span.trace_id].append(span)
        return found

    def whole() -> list[list[Any]]:
        names = ["draft", "ingress", "orchestrator", "target"]
        return [spans for spans in traces().values() if sorted(span.name for span in spans) == names]

    def roots() -> int:
        return sum(span.name == "ingress" for span in list(observed.spans))

    assert eventually(lambda: roots() >= served, 30)
    assert len(whole()) > served / 2
    for spans in whole():
        by_name = {span.name: span for span in spans}
        assert by_name["ingress"].parent_span_id == b""
        assert by_name["orchestrator"].parent_span_id == by_name["ingress"].span_id
        assert by_name["target"].parent_span_id == by_name["orchestrator"].span_id
        assert by_name["draft"].parent_span_id == by_name["orchestrator"].span_id
        assert by_name["ingress"].start_time_unix_nano <= by_name["orchestrator"].start_time_unix_nano


def test_observe(observed: Observed) -> None:
    """`outrider observe` starts a Prometheus beside the running application, prints where a page of links
    is, and ends with Ctrl-C."""
    from deployments.runtime.local import free_port

    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-W", "ignore", "-m", "deployments.cli.main", "observe"]
    with subprocess.Popen(
        [*command, "--address", observed.cluster, "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            printed = "".join(itertools.takewhile(lambda line: line != "Ctrl-C ends it.\n", process.stdout))
            assert f"Prometheus  {url}\n" in printed
            assert max(map(len, printed.splitlines())) < 160  # the queries' links are kilobytes long
            where = re.search(r"^Dashboards  (file://\S+)", printed, re.MULTILINE)
            assert where is not None
            page = Path(urlparse(where[1]).path).read_text(encoding="utf-8")
            assert page.count(f'<a href="{url}/graph?g0.expr=') == len(all_dashboards())
            for model in all_dashboards():
                assert f">{model['title']}</a>" in page
            assert eventually(lambda: ask(url, 'up{job="outrider"} == 1'), 30)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
