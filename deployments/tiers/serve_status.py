"""What Ray Serve and the cluster say of the tiers, for `/status`: replicas by state, and what is in their way."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.config.deployment import DeploymentConfig
from cluster.config.serve_names import TIER_DEPLOYMENTS
from cluster.scaling.placement import Node, TierName, bundles, obstacle
from deployments.runtime.ray_internals import free_resources


async def overview(application: str, config: DeploymentConfig) -> dict[TierName, dict[str, Any]]:
    """Per tier: replicas by state, Serve's message, and why a replica that is to start cannot be placed.

    Empty where Serve cannot be asked. Asked in a thread: these are calls to the cluster's control store.
    """
    return await asyncio.to_thread(look, application, config)


def look(application: str, config: DeploymentConfig) -> dict[TierName, dict[str, Any]]:
    """The same, blocking."""
    from ray import serve

    try:
        deployments = serve.status().applications[application].deployments
    except Exception:  # the controller is restarting, or the application is being deleted
        return {}
    found: dict[TierName, dict[str, Any]] = {}
    for tier, name in TIER_DEPLOYMENTS.items():
        if (deployment := deployments.get(name)) is None:
            continue
        states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
        found[tier] = {"states": states, "status": deployment.status.value, "message": deployment.message}
        if states.get("STARTING", 0):
            resources = (config.target if tier == "target" else config.draft).resources
            found[tier]["obstacle"] = obstacle(bundles(config, tier), resources.labels, nodes())
    return found


def nodes() -> list[Node]:
    """The cluster's living nodes."""
    import ray

    free = free_resources()
    return [
        Node(node["Resources"], free.get(node["NodeID"], {}), node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"]
    ]
