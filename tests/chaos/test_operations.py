"""What operators do under load, a new version and a tier that grows and shrinks; and what a crash loop comes to."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from actors.errors import EngineError
from benchmarks.support import emulated_application, fault_scenarios
from benchmarks.support.checked_load import CheckedLoad, Told
from benchmarks.support.processes import find
from cluster.config.deployment import load_config
from deployments.client.http_service import HttpService

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STREAMS = 12


def check(told: Told) -> None:
    assert (told.lost, told.changed, told.broken) == ([], [], [])


def test_a_rolling_update_under_load_fails_no_stream(ray_port: int) -> None:
    """Every process of the application is replaced by one of a new version, also those that hold connections."""
    from ray import serve

    from deployments.app import application as build
    from deployments.runtime.local import application

    old = emulated_application.config("rolling", ray_port, STREAMS)
    new = emulated_application.config("rolling", ray_port, STREAMS, draft={"settings": {"tree": {"depth": 8}}})

    async def run(url: str) -> Told:
        service = HttpService(url)
        load = CheckedLoad(service, emulated_application.request, emulated_application.truth, STREAMS)
        while load.told.answers < STREAMS:
            await asyncio.sleep(0.05)
        before = await replicas(service)
        await asyncio.to_thread(serve.run, build(new), name="rolling", route_prefix=new.ingress.route_prefix)
        while (now := await replicas(service)) & before or len(now) != 4:
            await asyncio.sleep(0.1)
        told = await load.stop()
        await emulated_application.at_rest("rolling")
        await service.close()
        return told

    with application(old) as url:
        check(asyncio.run(run(url)))


async def replicas(service: HttpService) -> set[str]:
    status: Any = await service.status()
    return {name for tier in ("target", "draft") for name in status[tier]["replicas"]}


def test_both_tiers_follow_the_load_and_no_stream_notices(ray_port: int) -> None:
    """Targets 1 to 3 and back, drafts 0 to 3 and back to none, under clients that check every token."""
    from deployments.runtime.local import application

    with application(fault_scenarios.scaling_config("scaling", ray_port, STREAMS)) as url:
        found = asyncio.run(fault_scenarios.scaling(url, STREAMS, print))
    for told in found.told:
        check(told)
    assert found.most[0] == 3
    assert found.most[1] >= 1
    assert found.least[0] == 1


def test_a_crash_loop_backs_off_and_ends_with_another_replica(ray_port: int) -> None:
    """Every actor dies at its sixth pass, so an answer of 60 tokens cannot be had: it ends with a typed error after six
    targets. The replica places its actor again after 0, 1, 2, 4 and 8 seconds, and is then replaced itself."""
    from deployments.runtime.local import application

    crashing = {
        "name": "crashing",
        "model_id": "emulated",
        "target": {
            "engine": "emulated",
            "model": "emulated:reference",
            "engine_kwargs": {"pass_ms": 5, "faults": [{"kind": "crash", "at": 5, "hard": True}]},
            "health": {"period_s": 0.5},
        },
        "draft": {"kind": "none"},
        "orchestrator": {"settings": {"discovery_period_s": 0.2}},
        "ingress": {"port": ray_port, "route_prefix": "/crashing"},
    }

    async def run(url: str) -> None:
        service = HttpService(url)
        (first,) = await find("crashing", "target actor")
        began = time.monotonic()
        with pytest.raises(EngineError, match="targets were lost under this request"):
            async for _ in service.generate(emulated_application.request(0, tokens=60)):
                pass
        assert time.monotonic() - began > 0 + 1 + 2 + 4 + 8
        replica = first.name.rpartition(".")[0]

        async def another() -> bool:
            return any(not one.name.startswith(replica) for one in await find("crashing", "target actor"))

        await emulated_application.until(another)
        await service.close()

    with application(load_config(crashing)) as url:
        asyncio.run(run(url))
