"""What the autoscaling policies of one application share inside Ray Serve's controller process."""

from __future__ import annotations

import logging
import threading

from cluster.autoscaling import TargetLoad

logger = logging.getLogger("ray.serve")

_lock = threading.Lock()
_targets: dict[str, list[TargetLoad]] = {}
_last: dict[tuple[str, str], tuple[int, str]] = {}


def post(application: str, loads: list[TargetLoad]) -> None:
    """The target tier's loads as of now."""
    with _lock:
        _targets[application] = loads


def read(application: str) -> list[TargetLoad]:
    """The loads last posted; none before the first."""
    with _lock:
        return list(_targets.get(application, ()))


def explain(application: str, deployment: str, replicas: int, reason: str) -> None:
    """Log a decision when it changes, with its reason, so that an operator sees why a tier grew."""
    with _lock:
        before = _last.get((application, deployment))
        _last[application, deployment] = replicas, reason
    if before is None or before[0] != replicas:
        was = "unknown" if before is None else before[0]
        logger.info("autoscaling of %s/%s: %s -> %d replicas: %s", application, deployment, was, replicas, reason)
