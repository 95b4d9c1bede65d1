"""What Ray Serve must find in the environment of every process of a cluster, so that a loss stays where it happens.

Ray reads the environment once, in each process, so it has to be set before a cluster starts; `outrider serve` and the
manifests do it.
"""

from __future__ import annotations

from deployments.ingress import lost_ingress

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Names a callable from which Serve's proxies take middlewares of their own."""
FORCE = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
"""A replica that stands still is ended when it has failed its health checks. Otherwise Serve would wait for its streams
until the longest request has had its time, and their clients with it."""
GRPC = "RAY_SERVE_USE_GRPC_BY_DEFAULT"
"""Proxies and handles call replicas over gRPC. A replica that answers a call of Ray with a stream stands still when the
stream ends, in Ray 2.60, and all its other streams with it, until the caller has acknowledged every piece: a caller
whose node died, or that is stopped, would hold up replicas on other nodes until Ray has given it up."""

REPORTS = "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
"""Replicas tell what the autoscaling policies go by this often, in seconds, and look at it five times as often. Serve's
10 s are long beside the look-back of a tier (cluster.config.deployment.Autoscaling)."""
REPORT_S = 5


def environment() -> dict[str, str]:
    """The variables."""
    callback = lost_ingress.middlewares
    return {CALLBACK: f"{callback.__module__}:{callback.__name__}", FORCE: "1", GRPC: "1", REPORTS: str(REPORT_S)}
