"""What a replica reserves, and what an operator is told when it cannot be placed."""

from __future__ import annotations

import threading

import pytest

from cluster.config.deployment import DeploymentConfig
from cluster.scaling.placement import Node, bundles, group_options, obstacle
from deployments.cli.explain import status_rows

GPU_NODE = Node({"CPU": 16, "GPU": 4}, {"CPU": 16, "GPU": 4}, {"tier": "target"})
CPU_NODE = Node({"CPU": 8}, {"CPU": 8}, {"tier": "draft"})


def config(**target) -> DeploymentConfig:
    return DeploymentConfig.model_validate({"target": target})


def test_one_bundle_for_each_rank_and_one_group_for_each_replica() -> None:
    ranks = config(tensor_parallel_size=4, resources={"num_cpus": 2, "num_gpus": 1, "memory_gib": 1})
    assert bundles(ranks, "target") == [{"CPU": 2, "GPU": 1, "memory": 2**30}] * 4
    one_process = config(engine="vllm", tensor_parallel_size=4, resources={"num_cpus": 2, "num_gpus": 1})
    assert bundles(one_process, "target") == [{"CPU": 2, "GPU": 4}]
    assert bundles(ranks, "draft") == [{"CPU": 1}]


def test_ranks_are_packed_and_labels_hold_for_each_of_them() -> None:
    labelled = config(tensor_parallel_size=2, resources={"num_gpus": 1, "labels": {"tier": "target"}})
    assert group_options(labelled, "target") == {
        "placement_group_bundles": [{"CPU": 1, "GPU": 1}] * 2,
        "placement_group_strategy": "PACK",
        "placement_group_bundle_label_selector": [{"tier": "target"}] * 2,
    }
    assert group_options(config(resources={"num_cpus": 0}), "target") == {}


@pytest.mark.parametrize(
    ("group", "labels", "nodes", "why"),
    [
        ([{"GPU": 1.0}] * 4, {"tier": "target"}, [GPU_NODE, CPU_NODE], None),
        ([], {}, [], None),
        ([{"CPU": 1.0}], {}, [], "the cluster has no node"),
        ([{"CPU": 1.0}], {"tier": "x"}, [GPU_NODE, CPU_NODE], "none of the 2 nodes carries tier=x"),
        ([{"CPU": 1.0, "GPU": 8.0}], {}, [GPU_NODE, CPU_NODE], "no node is large enough: needs GPU 8, there is 4"),
        ([{"GPU": 1.0}] * 5, {}, [GPU_NODE], "all nodes together are too small for its 5 parts"),
        (
            [{"GPU": 2.0}],
            {},
            [Node({"GPU": 4}, {"GPU": 1})],
            "all nodes that fit are taken: needs GPU 2, there is 1",
        ),
        (
            [{"GPU": 2.0}],
            {},
            [Node({"GPU": 2}, {"GPU": 1}), Node({"GPU": 2}, {"GPU": 1})],
            "all nodes that fit are taken: what is free is in too small pieces",
        ),
    ],
)
def test_an_operator_is_told_what_is_lacking(group, labels, nodes, why) -> None:
    assert obstacle(group, labels, nodes) == why


def test_status_names_what_is_in_the_way() -> None:
    status = {
        "target": {
            "replicas": {"t.0": {"sequences": 3, "draining": True}},
            "serve": {
                "states": {"RUNNING": 2, "STARTING": 1},
                "status": "UPSCALING",
                "obstacle": "no node is large enough: needs GPU 8, there is 4",
            },
        },
        "draft": {"serve": {"states": {}, "status": "DEPLOY_FAILED", "message": "it broke\nat length"}},
    }
    assert [row[:3] for row in status_rows(status)] == [
        ("target", "t.0", "3 sequences, to go when they have ended"),
        ("target", "-", "1 starting; no node is large enough: needs GPU 8, there is 4"),
        ("target", "-", "1 running without a model: it starts, or is placed again after a loss (see the log)"),
        ("draft", "-", "no replica"),
        ("draft", "-", "DEPLOY_FAILED: it broke"),
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own warnings are not ours to fix
def test_an_operator_hears_what_a_tier_waits_for(ray_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that wants more CPUs than any node has: said while the application starts."""
    import ray

    from cluster.config.deployment import load_config
    from deployments.runtime import local

    class EnoughError(Exception):
        """Ends the wait."""

    heard: list[str] = []
    emulated = {"engine": "emulated", "model": "emulated:reference"}
    config = load_config(
        {
            "name": "large",
            "target": emulated | {"resources": {"num_cpus": 1000}},
            "draft": {"kind": "none"},
            "ingress": {"port": ray_port, "route_prefix": "/large"},
        }
    )
    monkeypatch.setattr(local, "OBSTACLES_S", 0.2)
    waited = threading.Event()

    def report(line: str) -> None:
        heard.append(line)
        if "cannot be placed" in line:
            waited.set()

    def run(target: object, name: str, route_prefix: str) -> None:
        """Serve's own, without its endless wait for an application that cannot start."""
        from ray import serve

        asked = [serve.RunTarget(target=target, name=name, route_prefix=route_prefix)]
        serve.run_many(asked, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        assert waited.wait(60)
        raise EnoughError

    monkeypatch.setattr("ray.serve.run", run)
    with pytest.raises(EnoughError), local.application(config, report):
        pass
    cpus = max(node["Resources"]["CPU"] for node in ray.nodes())
    assert f"The target tier cannot be placed: no node is large enough: needs CPU 1000, there is {cpus:g}" in heard
