"""Five nodes on one machine: replicas are spread; nodes of both kinds die and stand still, and all comes back."""

from __future__ import annotations

import asyncio

import drills

from benchmarks.support import node_losses
from benchmarks.support.ray_nodes import cluster_of_nodes
from deployments.runtime.local import application, free_port

STREAMS = 12


def nodes_of_actors() -> list[str]:
    """Where the model actors run that answer."""
    import ray
    from ray.util import list_named_actors

    names = [a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == "outrider"]
    actors = [ray.get_actor(name, "outrider") for name in names]
    return ray.get([actor.__ray_call__.remote(_node) for actor in actors], timeout=10)


def _node(actor: object) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def main() -> None:
    import ray

    config = node_losses.config(drills.NAME, free_port(), STREAMS)
    with cluster_of_nodes() as nodes, application(config) as url:
        on_head = ray.get_runtime_context().get_node_id() in nodes_of_actors()
        found = asyncio.run(node_losses.Drill(url, config, nodes, STREAMS, print).run(repeats=1))
    told = found.told
    drills.Verdict(
        [one for each in told for one in each.lost],
        [one for each in told for one in each.changed],
        [one for each in told for one in each.broken],
        sum(each.answers for each in told),
        max(loss.pause for loss in found.losses),
        {
            "on_head": on_head,
            "losses": [[f"{loss.how} {loss.pool}", loss.held, loss.ended] for loss in found.losses],
            "seconds": [[loss.pause, loss.wait, loss.own] for loss in found.losses],
        },
    ).print()


if __name__ == "__main__":
    main()
