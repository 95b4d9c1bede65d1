"""Clients that leave, freezes of one part at a known token, and a flood of text, on running applications."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from typing import Any

import httpx
import pytest
from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

from actors.errors import ConfigError
from actors.messages import Delta, GenerationRequest
from actors.settings import SamplingSettings
from benchmarks.support import emulated_application
from benchmarks.support.processes import find
from cluster.config.deployment import load_config
from deployments.client.http_service import HttpService

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
LEAVERS = 300


def long_request(number: int, **sampling: Any) -> GenerationRequest:
    settings = SamplingSettings(**{"temperature": 0.0, "max_tokens": 60, "ignore_eos": True} | sampling)
    return GenerationRequest(f"c{number}", settings, tokens=emulated_application.request(number).tokens)


def runs(pid: int) -> bool:
    """Whether the process has not ended (one that ended and was not waited for has)."""
    try:
        return Process(pid).status() != STATUS_ZOMBIE
    except NoSuchProcess:
        return False


async def tokens(service: HttpService, request: GenerationRequest) -> tuple[int, ...]:
    return tuple([token async for delta in service.generate(request) for token in delta.tokens])


def test_clients_that_leave_at_random_moments_leave_nothing_behind(emulated_url: str) -> None:
    """300 at once, each gone after 0 to 3 deltas; then both tiers are at rest and answers are what they were."""
    chance = random.Random(20)

    async def leave(service: HttpService, number: int, patience: int) -> None:
        stream = service.generate(long_request(number, max_tokens=1000))
        for _ in range(patience):
            await anext(stream)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def run() -> None:
        service = HttpService(emulated_url)
        await asyncio.gather(*(leave(service, number, chance.randrange(4)) for number in range(LEAVERS)))
        began = asyncio.get_running_loop().time()
        await emulated_application.at_rest("emulated")
        print(f"at rest after {asyncio.get_running_loop().time() - began:.2f} s")
        requests = [long_request(number) for number in range(20)]
        answers = await asyncio.gather(*(tokens(service, request) for request in requests))
        assert list(answers) == [emulated_application.truth(request) for request in requests]
        await service.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_draft_that_goes_after_the_tenth_token_changes_nothing(emulated_url: str, how: signal.Signals) -> None:
    async def run() -> None:
        service, request = HttpService(emulated_url), long_request(21, max_tokens=200)
        (draft,) = await find("emulated", "draft actor")
        got: list[Delta] = []
        async for delta in service.generate(request):
            before = sum(len(one.tokens) for one in got)
            got.append(delta)
            if before < 10 <= before + len(delta.tokens):
                draft.send(how)
        assert tuple(token for delta in got for token in delta.tokens) == emulated_application.truth(request)
        assert got[-1].finish == "length"
        await service.close()

        async def replaced() -> bool:
            """Another actor is there; the frozen one was ended, though it could not even hear that it should."""
            now = await find("emulated", "draft actor")
            return [one.name for one in now] != [draft.name] and len(now) == 1 and not runs(draft.pid)

        await emulated_application.until(replaced)

    asyncio.run(run())


def test_negative_times_are_refused() -> None:
    for section, key in (
        ("orchestrator.settings", "request_timeout_s"),
        ("target", "drain_s"),
        ("draft.health", "period_s"),
    ):
        raw: dict[str, Any] = {key: -1}
        for name in reversed(section.split(".")):
            raw = {name: raw}
        with pytest.raises(ConfigError, match=f"{section}.{key}"):
            load_config(raw)


def test_a_target_tier_is_never_empty() -> None:
    """Requests are seen by targets: with none of them, nothing would bring the first one back. Drafts may be none."""
    with pytest.raises(ConfigError, match=r"target\.autoscaling\.min_replicas must be at least 1"):
        load_config({"target": {"autoscaling": {"min_replicas": 0}}})
    load_config({"draft": {"autoscaling": {"min_replicas": 0}}})


def test_a_model_thread_that_stands_still_is_replaced_and_its_answer_goes_on(ray_port: int) -> None:
    """Every actor's thread stops at its 40th pass, while its event loop goes on answering. An answer of 60 passes is
    begun by one actor and ended by the next one."""
    from deployments.runtime.local import application

    health = {"period_s": 0.5, "stuck_after_s": 2.0}
    frozen = {
        "name": "frozen",
        "model_id": "emulated",
        "target": {
            "engine": "emulated",
            "model": "emulated:reference",
            "engine_kwargs": {"pass_ms": 5, "faults": [{"kind": "freeze", "at": 40}]},
            "health": health,
        },
        "draft": {"kind": "none"},
        "orchestrator": {"settings": {"stall_timeout_s": 1.5, "discovery_period_s": 0.2}},
        "ingress": {"port": ray_port, "route_prefix": "/frozen"},
    }

    async def run(url: str) -> None:
        service, request = HttpService(url), long_request(22)
        (before,) = await find("frozen", "target actor")
        assert await tokens(service, request) == emulated_application.truth(request)
        (after,) = await find("frozen", "target actor")
        assert before.name != after.name
        await service.close()

    with application(load_config(frozen)) as url:
        asyncio.run(run(url))


def test_a_flood_of_text_stops_neither_health_nor_streams(emulated_url: str) -> None:
    """Five megabytes are refused by size, and nearly four by length; a stream goes on and /health answers meanwhile."""
    posted: list[int] = []

    def post(size: int) -> None:
        body = {"prompt": "x " * (size // 2), "max_tokens": 4}
        posted.append(httpx.post(f"{emulated_url}/v1/completions", json=body, timeout=60).status_code)

    async def run() -> None:
        service, request = HttpService(emulated_url), long_request(23, max_tokens=400)
        floods = [threading.Thread(target=post, args=(size,)) for size in (5_000_000, 3_900_000, 3_900_000)]
        during, healthy, got = 0, 0, list[int]()
        async with httpx.AsyncClient() as client:
            async for delta in service.generate(request):
                if not got:
                    for flood in floods:
                        flood.start()
                got += delta.tokens
                if any(flood.is_alive() for flood in floods):
                    during += 1
                    if during % 5 == 1:
                        healthy += (await client.get(f"{emulated_url}/health", timeout=30)).status_code == 200
        assert tuple(got) == emulated_application.truth(request)
        assert during > 1
        assert healthy > 0
        for flood in floods:
            await asyncio.to_thread(flood.join)
        await service.close()

    asyncio.run(run())
    assert sorted(posted) == [400, 400, 413]
