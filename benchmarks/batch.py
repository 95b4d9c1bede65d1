"""A batch of short prompts through the Python handle, on emulated tiers: does the target ever wait for work?

    python -m benchmarks batch [--prompts 10000] [--tokens 16] [--concurrency 256] [--plain] [--out FILE]

busy: share of the time that the target spends in passes. filled: slots with a sequence in a pass, of all slots: a
target can be busy with half-empty passes. Both count from the first prompt to the last answer, with both ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support import options
from benchmarks.support.goals import Goal, print_goals
from benchmarks.support.provenance import MACHINE, command
from cluster.config.deployment import load_config
from deployments.client.client import connect
from deployments.runtime.local import application, free_port, ray_cluster
from deployments.tiers.actor_discovery import NAMESPACE

SLOTS = 64


def target_facts(status: dict[str, Any]) -> dict[str, float]:
    """What the only target has done so far."""
    import ray

    (name,) = status["target"]["replicas"]
    facts: dict[str, float] = ray.get(ray.get_actor(name, namespace=NAMESPACE).facts.remote())
    return facts


def main(argv: Sequence[str]) -> int:
    parser = options.parser("batch", __doc__)
    parser.add_argument("--prompts", type=options.at_least(1), default=10_000)
    parser.add_argument("--tokens", type=options.at_least(1), default=16)
    parser.add_argument("--concurrency", type=options.at_least(1), default=256)
    parser.add_argument("--plain", action="store_true", help="without a draft tier")
    parser.add_argument("--out")
    arguments = parser.parse_args(argv)
    draft = {"kind": "emulated", "model": "emulated:reference", "settings": {"slots": 2 * SLOTS}}
    config = load_config(
        {
            "model_id": "emulated",
            "target": {"engine": "emulated", "model": "emulated:reference", "settings": {"slots": SLOTS}},
            "draft": {"kind": "none"} if arguments.plain else draft,
            "ingress": {"port": free_port(), "batch_folder": None},
        }
    )
    prompts = [f"prompt w{i}" for i in range(arguments.prompts)]
    with ray_cluster(), application(config), connect("auto") as client:
        sampling: dict[str, Any] = {"max_tokens": arguments.tokens, "temperature": 0.0, "ignore_eos": True}
        client.generate(prompts[:SLOTS], progress=False, **sampling)  # warm up
        before, started = target_facts(client.status()), time.perf_counter()
        results = client.generate(prompts, concurrency=arguments.concurrency, progress=False, **sampling)
        wall = time.perf_counter() - started
        after = target_facts(client.status())
    passes = after["passes"] - before["passes"]
    told: dict[str, Any] = {
        "command": command(),
        "machine": MACHINE,
        "prompts": len(prompts),
        "failed": sum(not result.ok for result in results),
        "draft tier": not arguments.plain,
        "seconds": round(wall, 1),
        "tokens/s": round(sum(len(result.tokens) for result in results) / wall),
        "busy": round((after["busy_s"] - before["busy_s"]) / wall, 4),
        "filled": round((after["rows"] - before["rows"]) / passes / SLOTS, 3),
        "ms per pass": round(1e3 * (after["busy_s"] - before["busy_s"]) / passes, 1),
    }
    print(json.dumps(told, indent=2))
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
    goals = [Goal("share of the time that the target is busy", told["busy"], 0.95)]
    return print_goals([*goals, Goal("failed prompts", told["failed"], 0, at_least=False)])
