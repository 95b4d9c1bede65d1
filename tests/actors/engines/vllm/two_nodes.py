"""A vLLM target whose two ranks are on two nodes of a Ray cluster, in front of a draft. Prints the answers as JSON.

    python two_nodes.py CHECKPOINT

vLLM has no Ray executor for CPUs. It has one for whatever platform names a resource of Ray, and a platform may come
from a plugin (`platform_plugin`): its CPU platform under such a name, on nodes that count one such resource each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
"""
FILES = {
    "cpu_for_ray.py": PLATFORM,
    "cpu_for_ray_plugin.py": 'def platform():\n    return "cpu_for_ray.RayCpuPlatform"\n',
    "cpu_for_ray-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpu-for-ray\nVersion: 0\n",
    "cpu_for_ray-0.dist-info/entry_points.txt": "[vllm.platform_plugins]\ncpu = cpu_for_ray_plugin:platform\n",
}
PROMPTS = 8


def platform_plugin(folder: Path) -> None:
    """Write the plugin; whoever has `folder` on the path uses it."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


async def answers(checkpoint: str) -> dict[str, Any]:
    """Greedy answers of the group, and where its ranks were."""
    from pass_exchanges import PatientExchange
    from vllm_stack import draft, model, prompts, settings, stack

    arguments = {"distributed_executor_backend": "ray"}
    chosen = model(checkpoint, tensor_parallel_size=2, arguments=arguments, spread=True)
    async with stack(chosen, draft, settings(), PatientExchange) as running:
        found = await running.ask_all(prompts(PROMPTS))
        nodes = ranks_by_node()
    accepted = sum(answer.origins.count("accepted") for answer in found)
    return {"tokens": [answer.tokens for answer in found], "accepted": accepted, "nodes": nodes}


def ranks_by_node() -> int:
    """Nodes that hold a bundle of vLLM's placement group."""
    from ray.util import placement_group_table

    [group] = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return len(set(group["bundles_to_node_id"].values()))


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address  # for vLLM's own processes
        ray.init(address=cluster.address, log_to_driver=False)
        found = asyncio.run(answers(sys.argv[1]))
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
