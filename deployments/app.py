"""Builds the Serve application from a configuration: `serve deploy` and `outrider serve` both come here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.config.deployment import Autoscaling, DeploymentConfig, DraftTier, TargetTier, load_config
from cluster.config.serve_names import INGRESS, ORCHESTRATOR, TIER_DEPLOYMENTS
from cluster.scaling.placement import TierName, group_options
from deployments.ingress.deployment import IngressReplica
from deployments.orchestrator.deployment import OrchestratorReplica
from deployments.runtime.ray_internals import with_version
from deployments.tiers.deployment import TierReplica

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0
"""Of ingress and orchestrators; three failures in a row, and Serve replaces a replica. They do nothing that takes long,
so that one whose event loop has not turned for half a minute has come to an end."""
HEALTH_SLACK_S = 5.0
"""A replica answers for its actor, so that it gets a little longer than the actor."""
DRAIN_SLACK_S = 5.0
ONGOING = 100_000
"""Serve's own limits are left wide: admission is decided where queues are known."""


def build(args: dict[str, Any]) -> Application:
    """The application for Serve's `args`. Raises ConfigError."""
    return application(load_config(args))


def application(config: DeploymentConfig, version: str | None = None) -> Application:
    """Ingress, orchestrators and both tiers, bound to each other.

    version: of an application that runs, to change its draft and nothing else; None: of this code and `config`.

    Which draft the draft tier runs is its `user_config`, which Serve exchanges without touching anything else: where
    `serve deploy` runs this, under `deployments` in the file; where `serve.run` does, by running it again.
    """
    raw = config.model_dump(mode="json")
    version = version or code_version(config)
    tiers = [_tier(config, raw, "target", version)]
    if config.draft.kind != "none":
        tiers.append(_tier(config, raw, "draft", version))
    drain = config.orchestrator.settings.request_timeout_s
    common = {
        "max_ongoing_requests": ONGOING,
        "graceful_shutdown_timeout_s": drain,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
    }
    orchestrator = _deployment(OrchestratorReplica, version).options(
        **common,
        name=ORCHESTRATOR,
        num_replicas=config.orchestrator.replicas,
        ray_actor_options=_light(config.orchestrator.labels),
    )
    ingress = _deployment(IngressReplica, version).options(
        **common,
        name=INGRESS,
        num_replicas=config.ingress.replicas,
        ray_actor_options=_light(config.ingress.labels),
    )
    bound: Application = ingress.bind(raw, orchestrator.bind(raw, version, *tiers))
    return bound


def code_version(config: DeploymentConfig) -> str:
    """Digest of the code, and of all settings but for which draft is run.

    Serve restarts the replicas of a deployment whose version changed; without one, `serve.run` restarts them all.
    """
    raw = config.model_dump(mode="json")
    for name in config.draft_choice.model_dump():
        del raw["draft"][name]
    found = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    root = Path(__file__).parent.parent
    for package in ("actors", "cluster", "deployments"):
        for file in sorted((root / package).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _deployment(replica: Any, version: str) -> Any:
    return with_version(serve.deployment(replica), version)


def _tier(config: DeploymentConfig, raw: dict[str, Any], tier: TierName, version: str) -> Application:
    settings = config.target if tier == "target" else config.draft
    options: dict[str, Any] = {
        "name": TIER_DEPLOYMENTS[tier],
        "ray_actor_options": {"num_cpus": 0},  # what the replica needs is its actor's, in its placement group
        "health_check_period_s": settings.health.period_s,
        "health_check_timeout_s": settings.health.ping_timeout_s + HEALTH_SLACK_S,
        "graceful_shutdown_timeout_s": settings.drain_s + DRAIN_SLACK_S,
        "graceful_shutdown_wait_loop_s": 0.1,  # the replica itself has no requests; its actor has sequences
        **_scale(settings, tier),
        **group_options(config, tier),
    }
    if tier == "draft":
        options["user_config"] = config.draft_choice.model_dump(mode="json")
    bound: Application = _deployment(TierReplica, version).options(**options).bind(raw, tier)
    return bound


def _scale(tier: TargetTier | DraftTier, name: TierName) -> dict[str, Any]:
    bounds: Autoscaling | None = tier.autoscaling
    if bounds is None:
        return {"num_replicas": tier.replicas}
    given = {"goals": tier.goals.model_dump(mode="json"), "look_back_s": bounds.look_back_s}
    policy = "deployments.tiers.autoscaling_policies:" + ("TargetPolicy" if name == "target" else "DraftPolicy")
    return {
        "autoscaling_config": {
            "policy": {"policy_function": policy, "policy_kwargs": given},
            "min_replicas": bounds.min_replicas,
            "max_replicas": bounds.max_replicas,
            "upscale_delay_s": bounds.upscale_delay_s,
            "downscale_delay_s": bounds.downscale_delay_s,
            "look_back_period_s": bounds.look_back_s,
        }
    }


def _light(labels: dict[str, str]) -> dict[str, Any]:
    """Doors and orchestrators reserve no CPU, so that an application fits on a machine of two cores; but one byte:
    Ray spreads what needs something over the nodes, and places what needs nothing at random."""
    return {"num_cpus": 0, "memory": 1, **({"label_selector": labels} if labels else {})}
