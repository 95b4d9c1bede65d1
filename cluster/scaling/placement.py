"""Where replicas go: what one reserves, how its parts are kept together, and why it cannot be placed.

A replica's placement group holds one bundle per actor. Tensor-parallel ranks talk all the time, so the bundles are
packed on one node where they fit. Replicas have a group each, and Ray puts each group where the most is left, which
spreads the replicas of a tier over its nodes, so that one node's death costs as few of them as can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.config.deployment import DeploymentConfig, Resources

TierName = Literal["target", "draft"]
Bundle = dict[str, float]
TOLERANCE = 1e-9
STRATEGY = "PACK"
"""Ray's name for: on one node where it fits, else on as few as possible."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node: all that it has, what of it is free, and its labels."""

    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def actor_gpus(config: DeploymentConfig, tier: TierName) -> float:
    """GPUs of a replica's actor. vLLM spreads over its GPUs from inside one process, or leaves them to Ray workers."""
    if tier == "target" and config.target.engine == "vllm":
        gpus = config.target.resources.num_gpus
        return 0.0 if config.target.ranks_are_actors else gpus * config.target.tensor_parallel_size
    return _resources(config, tier).num_gpus


def bundles(config: DeploymentConfig, tier: TierName) -> list[Bundle]:
    """The placement group of one replica: a bundle per actor, the first one's actor being the one orchestrators know.

    Empty when the replica needs nothing that could be reserved.
    """
    resources = _resources(config, tier)
    ranks = config.target.tensor_parallel_size if tier == "target" and config.target.ranks_are_actors else 1
    beside_a_rank = tier == "target" and config.target.engine == "vllm" and config.target.ranks_are_actors
    first = _bundle(resources, resources.num_gpus if beside_a_rank else actor_gpus(config, tier))
    others = [_bundle(resources, resources.num_gpus) for _ in range(ranks - 1)]
    return [first, *others] if first else []


def group_options(config: DeploymentConfig, tier: TierName) -> dict[str, object]:
    """Ray Serve's options for the placement group of one replica; none when it reserves nothing."""
    group = bundles(config, tier)
    if not group:
        return {}
    options: dict[str, object] = {"placement_group_bundles": group, "placement_group_strategy": STRATEGY}
    labels = _resources(config, tier).labels
    if labels:
        options["placement_group_bundle_label_selector"] = [labels] * len(group)
    return options


def obstacle(group: Sequence[Bundle], labels: Mapping[str, str], nodes: Sequence[Node]) -> str | None:
    """Why one more replica cannot be placed now, for an operator; None when it can.

    group: bundles of the replica, which may go to different nodes. labels: what each node must carry.
    """
    if not group:
        return None
    fitting = [node for node in nodes if all(node.labels.get(name) == value for name, value in labels.items())]
    if not fitting:
        wanted = ", ".join(f"{name}={value}" for name, value in labels.items())
        return f"none of the {len(nodes)} nodes carries {wanted}" if labels else "the cluster has no node"
    for bundle in group:
        if not any(_fits(bundle, node.total) for node in fitting):
            lacking = _lacking(bundle, [node.total for node in fitting])
            return f"no node is large enough: {lacking}"
    if _pack(group, [dict(node.total) for node in fitting]):
        if _pack(group, [dict(node.free) for node in fitting]):
            return None
        lacking = _lacking(_sum(group), [_sum([node.free for node in fitting])])
        return f"all nodes that fit are taken: {lacking or 'what is free is in too small pieces'}"
    return f"all nodes together are too small for its {len(group)} parts"


def _resources(config: DeploymentConfig, tier: TierName) -> Resources:
    return (config.target if tier == "target" else config.draft).resources


def _bundle(resources: Resources, gpus: float) -> Bundle:
    amounts = {"CPU": resources.num_cpus, "GPU": gpus, "memory": resources.memory_gib * 2**30}
    if resources.accelerator_type is not None:
        amounts[f"accelerator_type:{resources.accelerator_type}"] = 0.001  # Ray's way to ask for the type only
    return {name: amount for name, amount in amounts.items() if amount}


def _fits(bundle: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(room.get(name, 0.0) >= amount - TOLERANCE for name, amount in bundle.items())


def _pack(group: Sequence[Bundle], rooms: list[dict[str, float]]) -> bool:
    """First fit; bundles of a group differ little, so order hardly matters."""
    for bundle in group:
        room = next((room for room in rooms if _fits(bundle, room)), None)
        if room is None:
            return False
        for name, amount in bundle.items():
            room[name] -= amount
    return True


def _sum(amounts: Sequence[Mapping[str, float]]) -> Bundle:
    total: Bundle = {}
    for each in amounts:
        for name, amount in each.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _lacking(bundle: Mapping[str, float], rooms: Sequence[Mapping[str, float]]) -> str:
    most = {name: max((room.get(name, 0.0) for room in rooms), default=0.0) for name in bundle}
    return ", ".join(
        f"needs {name} {amount:g}, there is {most[name]:g}"
        for name, amount in bundle.items()
        if most[name] < amount - TOLERANCE
    )
