"""Keys, rates and fairness: who gets in, who goes next, and what is told to those who do not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tiny import Reciter, byte_codec

from actors.errors import ConfigError, DeadlineError, OverloadedError
from deployments.ingress.auth import KeyRing, Tenant, key_hash, new_key, read_keys
from deployments.ingress.error_responses import ForbiddenError
from deployments.ingress.fair_queue import FairQueue
from deployments.ingress.http_app import http_app
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.routes import HttpLimits
from deployments.ingress.service import Served

CODEC = byte_codec()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_keys(path: Path, *keys: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump({"keys": list(keys)}))


async def enter(queue: FairQueue, order: list[str], name: str, priority: int = 0) -> None:
    async with queue.place(name[0], priority):
        order.append(name)
        await asyncio.sleep(0)


async def test_tenants_take_turns_however_many_they_send() -> None:
    """One place; tenant a sends five before b sends two: b's do not wait behind all of a's."""
    queue, order = FairQueue(running=1), []
    async with queue.place("c"):
        tasks = [asyncio.create_task(enter(queue, order, name)) for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2")]
        await asyncio.sleep(0)
        assert queue.waiting == 7
    await asyncio.gather(*tasks)
    assert order.index("b2") <= 4
    assert (queue.running, queue.waiting) == (0, 0)


async def test_with_several_places_the_one_with_least_running_is_next() -> None:
    queue = FairQueue(running=4)
    async with AsyncExitStack() as held:
        for _ in range(3):
            await held.enter_async_context(queue.place("a"))
        last = await held.enter_async_context(_released(queue, "b"))
        order: list[str] = []
        tasks = [asyncio.create_task(enter(queue, order, name)) for name in ("a1", "c1", "b1")]
        await asyncio.sleep(0)
        last.set()
        await asyncio.gather(*tasks)
        assert order == ["c1", "b1", "a1"]


@asynccontextmanager
async def _released(queue: FairQueue, tenant: str) -> AsyncIterator[asyncio.Event]:
    """A place that is given back when the event is set."""
    entered, event = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with queue.place(tenant):
            entered.set()
            await event.wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    yield event
    await task


async def test_priorities_go_first_and_each_has_its_own_queue() -> None:
    queue, order = FairQueue(running=1, queue=2), []
    async with queue.place("x"):
        tasks = [asyncio.create_task(enter(queue, order, f"a{i}")) for i in range(2)]
        tasks += [asyncio.create_task(enter(queue, order, f"b{i}", priority=1)) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await enter(queue, order, "a9")
    await asyncio.gather(*tasks)
    assert order == ["b0", "b1", "a0", "a1"]


async def test_a_waiter_that_gives_up_leaves_no_trace() -> None:
    queue, order = FairQueue(running=1), []
    async with queue.place("x"):
        tasks = [asyncio.create_task(enter(queue, order, f"a{i}")) for i in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a0", "a2"]
    assert (queue.running, queue.waiting) == (0, 0)


async def test_a_wide_request_is_not_overtaken_for_ever() -> None:
    queue, order = FairQueue(running=2), []

    async def wide() -> None:
        async with queue.place("w", weight=99):  # more than there is: takes all there is
            order.append("w")

    async with queue.place("x"):
        task = asyncio.create_task(wide())
        await asyncio.sleep(0)
        small = asyncio.create_task(enter(queue, order, "a"))
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(task, small)
    assert order == ["w", "a"]


async def test_rates_refill_and_tell_when() -> None:
    clock = Clock()
    gate = RequestGate(clock=clock)
    tenant = Tenant(name="a", requests_per_minute=2, tokens_per_minute=60)
    for _ in range(2):
        async with gate.admit(tenant, 0, 1):
            pass
    with pytest.raises(OverloadedError) as refused:
        async with gate.admit(tenant, 0, 1):
            pass
    assert (refused.value.retry_after, refused.value.code) == (30, "rate_limit_exceeded")
    clock.now += 30
    async with gate.admit(tenant, 0, 1):
        pass
    gate.settle(tenant, 90)  # 60 in the bucket: overdrawn by 30
    clock.now += 30
    with pytest.raises(OverloadedError) as refused:
        async with gate.admit(tenant, 0, 1):
            pass
    assert refused.value.retry_after == pytest.approx(1)


async def test_a_turn_that_does_not_come_in_time() -> None:
    gate = RequestGate(queue=FairQueue(running=1))
    tenant = Tenant(name="a")
    async with gate.admit(tenant, 0, 1):
        with pytest.raises(DeadlineError):
            async with gate.admit(tenant, 0, 1, limit_s=0.01):
                pass
    async with gate.admit(tenant, 0, 1, limit_s=0.01):
        pass


def test_keys_are_reloaded_and_survive_a_broken_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    one, two = new_key(), new_key()
    write_keys(path, {"name": "a", "sha256": key_hash(one)})
    ring = KeyRing(path, clock)
    assert ring.identify(f"Bearer {one}").name == "a"
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {one}", f"Bearer {two}", f"Bearer {one}x"):
        with pytest.raises(ForbiddenError):
            ring.identify(wrong)
    write_keys(path, {"name": "a", "sha256": key_hash(two)}, {"name": "b", "sha256": key_hash(one)})
    clock.now += 2
    assert [ring.identify(f"bearer {key}").name for key in (one, two)] == ["b", "a"]
    path.write_text("keys: [")
    clock.now += 2
    with caplog.at_level(logging.ERROR):
        assert ring.identify(f"Bearer {one}").name == "b"
    assert "stay in force" in caplog.text
    assert one not in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "keys: 5", "keys: [{name: a, sha256: x}]", "keys: [{name: a, key: b}]", "keys: [{name: a}, {name: a}]"],
)
def test_bad_keys_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="keys file"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none")


async def test_http_with_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, key = tmp_path / "keys.yaml", new_key()
    write_keys(path, {"name": "team", "sha256": key_hash(key), "requests_per_minute": 1, "priority": 3})
    service = Reciter(CODEC)
    gate = RequestGate(KeyRing(path, Clock()), clock=Clock())
    limits = HttpLimits(access_log=True, cors_origins=("https://page.example",))
    app = http_app(service, CODEC, Served("tiny", context=64), limits, gate)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    body = {"prompt": "a secret prompt", "max_tokens": 3}
    with caplog.at_level(logging.INFO, "outrider.access"):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/health")).status_code == 200
            client.headers["authorization"] = f"Bearer {key}"
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            for stream in (True, False):
                limited = await client.post("/v1/completions", json={**body, "stream": stream})
                assert limited.status_code == 429
                assert int(limited.headers["retry-after"]) == 60
                assert limited.json()["error"]["code"] == "rate_limit_exceeded"
            allowed = await client.get("/v1/models", headers={"origin": "https://page.example"})
            assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    lines = [json.loads(record.message) for record in caplog.records if record.name == "outrider.access"]
    assert [(line["path"], line["status"], line["tenant"]) for line in lines[:4]] == [
        ("/v1/completions", 401, None),
        ("/v1/models", 401, None),
        ("/health", 200, None),
        ("/v1/completions", 200, "team"),
    ]
    assert key not in caplog.text
    assert "secret prompt" not in caplog.text


async def test_places_are_given_back_whatever_ends_the_answer() -> None:
    queue = FairQueue(running=2)
    service = Reciter(CODEC)
    app = http_app(service, CODEC, Served("tiny", context=64), gate=RequestGate(queue=queue))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for failure, stream in ((None, False), (None, True), (1, False), (1, True)):
            service.failure_after = failure
            await client.post("/v1/completions", json={"prompt": "x", "n": 2, "stream": stream})
            assert (queue.running, queue.waiting) == (0, 0)
