"""Builds the Serve application from a configuration: `serve deploy` and `outrider serve` both come here."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.config import Autoscaling, DeploymentConfig, DraftTier, TargetTier, load_config
from cluster.placement import TierName, group_options
from deployments.front import IngressReplica
from deployments.orchestration import OrchestratorReplica
from deployments.tiers import TierReplica

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0
"""Of ingress and orchestrators; three failures in a row, and Serve replaces a replica."""
HEALTH_SLACK_S = 5.0
"""A replica answers for its actor, so that it gets a little longer than the actor."""
DRAIN_SLACK_S = 5.0
ONGOING = 100_000
"""Serve's own limits are left wide: admission is decided where queues are known."""


def build(args: dict[str, Any]) -> Application:
    """The application for Serve's `args`. Raises ConfigError."""
    return application(load_config(args))


def application(config: DeploymentConfig) -> Application:
    """Ingress, orchestrators and both tiers, bound to each other."""
    raw = config.model_dump(mode="json")
    tiers = [_tier(config, raw, "target")]
    if config.draft.kind != "none":
        tiers.append(_tier(config, raw, "draft"))
    drain = config.orchestrator.settings.request_timeout_s
    common = {
        "max_ongoing_requests": ONGOING,
        "graceful_shutdown_timeout_s": drain,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
    }
    orchestrator = serve.deployment(OrchestratorReplica).options(
        **common,
        name="Orchestrator",
        num_replicas=config.orchestrator.replicas,
        ray_actor_options=_light(config.orchestrator.labels),
    )
    ingress = serve.deployment(IngressReplica).options(
        **common,
        name="Ingress",
        num_replicas=config.ingress.replicas,
        ray_actor_options=_light(config.ingress.labels),
    )
    bound: Application = ingress.bind(raw, orchestrator.bind(raw, *tiers))
    return bound


def _tier(config: DeploymentConfig, raw: dict[str, Any], tier: TierName) -> Application:
    settings = config.target if tier == "target" else config.draft
    options: dict[str, Any] = {
        "name": "TargetTier" if tier == "target" else "DraftTier",
        "ray_actor_options": {"num_cpus": 0},  # what the replica needs is its actor's, in its placement group
        "health_check_period_s": settings.health.period_s,
        "health_check_timeout_s": settings.health.ping_timeout_s + HEALTH_SLACK_S,
        "graceful_shutdown_timeout_s": settings.drain_s + DRAIN_SLACK_S,
        "graceful_shutdown_wait_loop_s": 0.1,  # the replica itself has no requests; its actor has sequences
        **_scale(settings, tier),
        **group_options(config, tier),
    }
    return serve.deployment(TierReplica).options(**options).bind(raw, tier)


def _scale(tier: TargetTier | DraftTier, name: TierName) -> dict[str, Any]:
    bounds: Autoscaling | None = tier.autoscaling
    if bounds is None:
        return {"num_replicas": tier.replicas}
    policy = "deployments.scaling:" + ("TargetPolicy" if name == "target" else "DraftPolicy")
    return {
        "autoscaling_config": {
            "policy": {"policy_function": policy, "policy_kwargs": {"goals": tier.goals.model_dump(mode="json")}},
            "min_replicas": bounds.min_replicas,
            "max_replicas": bounds.max_replicas,
            "upscale_delay_s": bounds.upscale_delay_s,
            "downscale_delay_s": bounds.downscale_delay_s,
        }
    }


def _light(labels: dict[str, str]) -> dict[str, Any]:
    """Doors and orchestrators reserve no CPU, so that an application fits on a machine of two cores; but one byte:
    Ray spreads what needs something over the nodes, and places what needs nothing at random."""
    return {"num_cpus": 0, "memory": 1, **({"label_selector": labels} if labels else {})}
