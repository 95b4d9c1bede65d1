"""What the autoscaling policies of one application share inside Ray Serve's controller process."""

from __future__ import annotations

import logging
import re
import threading

from actors import telemetry
from cluster.config.serve_names import TIER_DEPLOYMENTS
from cluster.observability.ray_recorder import RayRecorder
from cluster.scaling.policies import TargetLoad

logger = logging.getLogger("ray.serve")

_lock = threading.Lock()
_targets: dict[str, list[TargetLoad]] = {}
_last: dict[tuple[str, str], tuple[int, str]] = {}
_recorders: dict[tuple[str, str], RayRecorder] = {}
TIERS = {deployment: tier for tier, deployment in TIER_DEPLOYMENTS.items()}
"""Deployments by name, and how metrics call them."""


def post(application: str, loads: list[TargetLoad]) -> None:
    """The target tier's loads as of now."""
    with _lock:
        _targets[application] = loads


def read(application: str) -> list[TargetLoad]:
    """The loads last posted; none before the first."""
    with _lock:
        return list(_targets.get(application, ()))


def explain(application: str, deployment: str, replicas: int, reason: str) -> None:
    """Log and count a decision when it changes, with its reason, so that an operator sees why a tier grew."""
    with _lock:
        before = _last.get((application, deployment))
        _last[application, deployment] = replicas, reason
        recorder = _recorders.setdefault((application, deployment), _recorder(application, deployment))
    if before is None or before[0] != replicas:
        recorder.set(telemetry.DESIRED_REPLICAS, replicas)
    if before is not None and before[0] != replicas:
        direction = "up" if replicas > before[0] else "down"
        recorder.add(telemetry.SCALING_DECISIONS, 1, direction=direction, reason=kind_of(reason))
    if before is None or before[0] != replicas:
        was = "unknown" if before is None else before[0]
        logger.info("autoscaling of %s/%s: %s -> %d replicas: %s", application, deployment, was, replicas, reason)


def kind_of(reason: str) -> str:
    """A reason without its figures and details: few enough to count by."""
    return re.sub(r"\d[\d.]*%?", "N", reason.partition(":")[0])


def _recorder(application: str, deployment: str) -> RayRecorder:
    tier = TIERS.get(deployment, deployment)
    return RayRecorder({"application": application, "tier": tier, "model": "", "replica": "controller"})
