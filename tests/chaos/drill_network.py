"""Runs inside a network namespace that holds one of two Ray nodes: the link to the other one is cut for ten seconds.

Arguments: Ray's address, and the name of this side's interface. Drafts are on the other node, and one of two targets.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import drills

from benchmarks.support import emulated_application
from benchmarks.support.checked_load import CheckedLoad
from deployments.client.http_service import HttpService
from deployments.runtime.local import application, free_port, ray_cluster

STREAMS = 8
CUT_S = 10.0


async def switch(interface: str, state: str) -> None:
    process = await asyncio.create_subprocess_exec("ip", "link", "set", interface, state)
    assert await process.wait() == 0


async def accepting(service: HttpService) -> bool:
    return await drills.accepted(service, 7) > 0


def main() -> None:
    address, interface = sys.argv[1:]
    config = emulated_application.config(
        drills.NAME,
        free_port(),
        STREAMS,
        target={"resources": {"num_cpus": 4}},  # one fits on each node, of 5 and 6
        draft={"resources": {"num_cpus": 1, "labels": {"side": "far"}}},
        orchestrator={"labels": {"side": "near"}},
        ingress={"labels": {"side": "near"}},
    )

    async def drill(service: HttpService, load: CheckedLoad) -> dict[str, Any]:
        before = await drills.accepted(service, 7)
        await switch(interface, "down")
        began, answers = time.monotonic(), load.told.answers
        await asyncio.sleep(CUT_S)
        during = load.told.answers - answers
        await switch(interface, "up")
        await emulated_application.until(lambda: accepting(service))
        recovered = time.monotonic() - began - CUT_S

        async def whole() -> bool:
            status: Any = await service.status()
            return len(status["target"]["replicas"]) == 2

        await emulated_application.until(whole)
        return {
            "before": before,
            "answers_during": during,
            "recovered_s": recovered,
            "gap": load.told.longest_gap(began),
        }

    with ray_cluster(address), application(config) as url:
        asyncio.run(drills.under_load(url, STREAMS, drill))


if __name__ == "__main__":
    main()
