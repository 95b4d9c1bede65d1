"""What faults and changes of size cost clients, measured on an application of emulated tiers.

Each measurement runs a checked load and returns figures; every token is checked, so that "0 changed" is a count.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.messages import GenerationRequest
from benchmarks.support import emulated_application
from benchmarks.support.checked_load import CheckedLoad, Told
from benchmarks.support.fault_schedule import Fault, strike
from benchmarks.support.processes import Kind
from cluster.config.deployment import DeploymentConfig
from deployments.client.http_service import HttpService

Say = Callable[[str], None]
AFTER_S = 6.0
"""How long after a fault pauses are taken for its doing; longer than a freeze lasts."""


@dataclass
class Failover:
    """Longest pause of any stream after each fault, in seconds, by fault."""

    gaps: dict[str, list[float]] = field(default_factory=dict)
    told: Told = field(default_factory=Told)


async def failover(url: str, config: DeploymentConfig, streams: int, repeats: int, say: Say) -> Failover:
    """Kill and freeze replicas one at a time, with a rest in between."""
    service, found, chance = HttpService(url), Failover(), random.Random(1)
    load = CheckedLoad(service, emulated_application.request, emulated_application.truth, streams)
    kinds: tuple[tuple[Any, Kind], ...] = (
        ("kill", "target actor"),
        ("freeze", "target actor"),
        ("kill", "target replica"),
        ("kill", "draft actor"),
        ("freeze", "draft actor"),
        ("kill", "orchestrator"),
    )
    await asyncio.sleep(AFTER_S)
    calm = time.monotonic()
    await asyncio.sleep(AFTER_S)
    found.gaps["nothing"] = [load.told.longest_gap(calm, calm + AFTER_S)]
    for _ in range(repeats):
        for how, kind in kinds:
            struck = await strike(config.name, Fault(how, kind), chance, emulated_application.freeze_s(config))
            await asyncio.sleep(AFTER_S)
            gap = load.told.longest_gap(struck.at, struck.at + AFTER_S)
            found.gaps.setdefault(str(struck.fault), []).append(gap)
            say(f"{struck.fault}: longest pause {gap:.2f} s")
            await whole(service, targets=2, drafts=2)
    found.told = await load.stop()
    await service.close()
    return found


async def whole(service: HttpService, targets: int, drafts: int, limit_s: float = 120.0) -> None:
    """Wait for that many replicas of each tier. Raises TimeoutError."""

    async def there() -> bool:
        return await sizes(service) == (targets, drafts)

    await emulated_application.until(there, limit_s)


async def sizes(service: HttpService) -> tuple[int, int]:
    """Replicas that take sequences, of both tiers."""
    status: Any = await service.status()

    def count(tier: str) -> int:
        return sum(not replica["draining"] for replica in status[tier]["replicas"].values())

    return count("target"), count("draft")


def scaling_config(name: str, port: int, streams: int) -> DeploymentConfig:
    """Targets 1 to 3, drafts 0 to 3, sized so that `streams` need three targets; grows at the default
    pace and shrinks within seconds."""
    pace = {"downscale_delay_s": 10.0}
    return emulated_application.config(
        name,
        port,
        streams,
        target={
            "autoscaling": {"min_replicas": 1, "max_replicas": 3, **pace},
            "settings": {"slots": max(2, round(streams / 2.2))},
            "drain_s": 10.0,
        },
        draft={
            "autoscaling": {"min_replicas": 0, "max_replicas": 3, **pace},
            "settings": {"slots": max(2, round(streams / 2.2))},
            "drain_s": 10.0,
        },
        orchestrator={"replicas": 1},
        ingress={"replicas": 1},
    )


@dataclass
class Scaling:
    """What one rise and fall of load did. Times are in seconds since the load rose."""

    up_s: dict[int, float] = field(default_factory=dict)
    """Targets, and when there were so many."""
    most: tuple[int, int] = (0, 0)
    down_s: float = 0.0
    """From the fall of load until one target was left."""
    least: tuple[int, int] = (0, 0)
    rest_s: float = 0.0
    """From the end of all load until no draft was left."""
    before_rate: float = 0.0
    during_rate: float = 0.0
    """Tokens per second of the light load before the heavy one, and while replicas went."""
    told: list[Told] = field(default_factory=list)


async def scaling(url: str, streams: int, say: Say, limit_s: float = 240.0) -> Scaling:
    """A light load, a heavy one until the tiers have grown, the light one until they have shrunk, and none."""
    service, found = HttpService(url), Scaling()

    def numbered(offset: int) -> Callable[[int], GenerationRequest]:
        return lambda number: emulated_application.request(offset + number)

    async def drafted() -> bool:
        return (await sizes(service))[1] > 0

    light = CheckedLoad(service, numbered(0), emulated_application.truth, max(1, streams // 10))
    await emulated_application.until(drafted, limit_s)  # they start at none
    began = time.monotonic()
    await asyncio.sleep(AFTER_S)
    found.before_rate = light.told.rate(began, time.monotonic())
    heavy, rose = CheckedLoad(service, numbered(10**6), emulated_application.truth, streams), time.monotonic()
    async with asyncio.timeout(limit_s):
        while len(found.up_s) < 3:
            targets, drafts = await sizes(service)
            found.most = max(found.most[0], targets), max(found.most[1], drafts)
            for count in range(1, targets + 1):
                if count not in found.up_s:
                    found.up_s[count] = time.monotonic() - rose
                    say(f"{count} targets, {drafts} drafts after {found.up_s[count]:.1f} s")
            await asyncio.sleep(emulated_application.POLL_S)
    found.told.append(await heavy.stop())
    fell = time.monotonic()

    async def one_target() -> bool:
        found.least = await sizes(service)
        return found.least[0] == 1

    await emulated_application.until(one_target, limit_s)
    found.down_s = time.monotonic() - fell
    found.during_rate = light.told.rate(fell, time.monotonic())
    say(f"{found.least[0]} targets, {found.least[1]} drafts {found.down_s:.1f} s after the load fell")
    found.told.append(await light.stop())
    ended = time.monotonic()

    async def no_draft() -> bool:
        return (await sizes(service))[1] == 0

    await emulated_application.until(no_draft, limit_s)
    found.rest_s = time.monotonic() - ended
    say(f"no draft {found.rest_s:.1f} s after the last request")
    await service.close()
    return found
