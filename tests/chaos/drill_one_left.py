"""Three nodes on one machine: replicas are spread, one node dies for good, and what it held comes back on the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import drills
from ray.cluster_utils import Cluster

from benchmarks.support import emulated_application
from benchmarks.support.checked_load import CheckedLoad
from deployments.client.http_service import HttpService
from deployments.runtime.local import application, free_port

STREAMS = 12


def node_of_actors() -> dict[str, str]:
    """Node by name of the model actors that answer."""
    import ray
    from ray.util import list_named_actors

    names = [a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == "outrider"]
    found = {}
    for name in names:
        actor = ray.get_actor(name, "outrider")
        found[name] = ray.get(actor.__ray_call__.remote(_node), timeout=10)
    return found


def _node(actor: Any) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def main() -> None:
    import ray

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=8, labels={"pool": "models"}) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    labels = {"resources": {"labels": {"pool": "models"}}}
    config = emulated_application.config(drills.NAME, free_port(), STREAMS, target=labels, draft=labels)
    with application(config) as url:
        placed = node_of_actors()
        spread = {
            tier: sorted(Counter(node for name, node in placed.items() if f":{tier}:" in name).values())
            for tier in ("target", "draft")
        }
        head = ray.get_runtime_context().get_node_id()

        async def drill(service: HttpService, load: CheckedLoad) -> dict[str, Any]:
            doomed = next(node for node in nodes if node.node_id in placed.values())
            await asyncio.to_thread(cluster.remove_node, doomed, False)

            async def back() -> bool:
                status: Any = await service.status()
                alive = {name for tier in ("target", "draft") for name in status[tier]["replicas"]}
                gone = {name for name, node in placed.items() if node == doomed.node_id}
                return len(alive) == 4 and not alive & gone

            await emulated_application.until(back)
            return {"spread": spread, "on_head": head in placed.values()}

        asyncio.run(drills.under_load(url, STREAMS, drill))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
