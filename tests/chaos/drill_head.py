"""Runs on the far node: the head of the cluster, with its control store's process, dies and comes back from Redis.

Arguments: Ray's address, this node's address, the process id of the head's `ray start`, and the command to start the
head again. Everything that serves is on this node, as it is on Kubernetes (k8s/), where the head serves nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import drills
import psutil
import ray
from ray import serve

from benchmarks.support import emulated_application
from benchmarks.support.checked_load import CheckedLoad
from deployments.client.http_service import HttpService
from deployments.runtime.local import application, free_port

STREAMS = 8
OUTAGE_S = 10.0


def kill_head(pid: int) -> None:
    """Everything that the head's `ray start` started, and itself. What serves belongs to the other node's."""
    process = psutil.Process(pid)
    for one in [*process.children(recursive=True), process]:
        one.kill()


def main() -> None:
    address, here, head, *restart = sys.argv[1:]
    side = {"labels": {"side": "far"}}
    config = emulated_application.config(
        drills.NAME,
        free_port(here),
        STREAMS,
        target={"resources": side},
        draft={"resources": side},
        orchestrator=side,
        ingress={"host": here, **side},
    )
    started: list[subprocess.Popen[bytes]] = []

    async def drill(service: HttpService, load: CheckedLoad) -> dict[str, Any]:
        killed, answers = time.monotonic(), load.told.answers
        await asyncio.to_thread(kill_head, int(head))
        await asyncio.sleep(OUTAGE_S)
        during = load.told.answers - answers
        started.append(await asyncio.to_thread(subprocess.Popen, restart, start_new_session=True))

        async def back() -> bool:
            return len(await asyncio.to_thread(ray.nodes)) >= 2 and await service.ready()

        await emulated_application.until(back)
        answers = load.told.answers
        await emulated_application.until(lambda: load.told.answers > answers + STREAMS)
        return {"answers_during": during, "back_s": time.monotonic() - killed, "gap": load.told.longest_gap(killed)}

    ray.init(address=address, _node_ip_address=here, log_to_driver=False)
    serve.start(proxy_location="EveryNode", http_options={"host": "0.0.0.0", "port": config.ingress.port})
    try:
        with application(config) as url:
            asyncio.run(drills.under_load(url, STREAMS, drill))
    finally:
        for process in started:
            kill_head(process.pid)


if __name__ == "__main__":
    main()
