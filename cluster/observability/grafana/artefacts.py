"""Dashboards and alert rules as the files that Kubernetes mounts, kept beside the component that uses them."""

from __future__ import annotations

import json
from typing import Any

import yaml

from cluster.observability.grafana.alerts import prometheus_rule
from cluster.observability.grafana.dashboards import all_dashboards

LIMIT = 1_000_000
"""Bytes. A ConfigMap holds a MiB, keys and all."""


def artefacts() -> dict[str, str]:
    """File name, below k8s/components/monitoring, to content. Raises ValueError for a dashboard past the limit."""
    files = {f"dashboards/{model['uid']}.json": _json(model) for model in all_dashboards()}
    if large := [name for name, text in files.items() if len(text.encode()) > LIMIT]:
        raise ValueError(f"over {LIMIT} bytes, too large for a ConfigMap: {', '.join(large)}")
    header = "# Written by `outrider grafana build`; the rules are in cluster/observability/grafana/alerts.py.\n"
    return files | {"alerts.yaml": header + yaml.safe_dump(prometheus_rule(), sort_keys=False, width=110)}


def _json(model: dict[str, Any]) -> str:
    return json.dumps(model, indent=1, sort_keys=True) + "\n"
