"""Requests for more answers than there is room, and streams that wait for their turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tiny import Reciter, byte_codec

from actors.errors import OverloadedError
from actors.messages import Delta, GenerationRequest
from actors.settings import SamplingSettings
from deployments.ingress.fair_queue import FairQueue
from deployments.ingress.http_app import HttpLimits, http_app
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.service import Served
from deployments.ingress.streams import with_pauses
from deployments.ingress.waves import Waves

CODEC = byte_codec()
SLOTS = 4


@dataclass
class Slotted(Reciter):
    """Refuses an answer beyond its room, and as often as `busy` says in a row; knows how much was used at once."""

    room: int = SLOTS
    most: int = 0
    refused: int = 0
    busy: int = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if self.open >= self.room or self.busy:
            self.busy = max(0, self.busy - 1)
            self.refused += 1
            full = OverloadedError("all slots are taken")
            full.retry_after = 0.0
            raise full
        self.most = max(self.most, self.open + 1)
        async for delta in super().generate(request):
            yield delta


def client_of(service: Reciter, **limits: Any) -> httpx.AsyncClient:
    gate = limits.pop("gate", None)
    app = http_app(service, CODEC, Served("tiny", context=64, ids=CODEC.vocabulary), HttpLimits(**limits), gate)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize(
    ("body", "choices", "answers"),
    [
        ({"prompt": "x", "n": 13}, 13, 13),
        ({"prompt": [f"prompt {i}" for i in range(20)]}, 20, 20),
        ({"prompt": "x", "best_of": 16}, 1, 16),
        ({"prompt": ["x", "y"], "n": 64}, 128, 128),
    ],
)
async def test_more_answers_than_slots_are_served_in_waves(body: dict[str, Any], choices: int, answers: int) -> None:
    service = Slotted(CODEC)
    async with client_of(service, at_once=SLOTS) as client:
        got = await client.post("/v1/completions", json=body)
        assert [choice["index"] for choice in got.json()["choices"]] == list(range(choices))
        assert all(choice["text"] == "Hello wörld" for choice in got.json()["choices"])
        assert (len(service.requests), service.refused, service.most, service.open) == (answers, 0, SLOTS, 0)
        if "best_of" not in body:
            stream = await client.post("/v1/completions", json=body | {"stream": True})
            lines = [line for line in stream.text.split("\n\n") if line.startswith("data: {")]
            chunks = [json.loads(line[6:]) for line in lines]
            ended = sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"] == "stop")
            assert ended == list(range(choices))


async def test_a_full_server_refuses_before_anything_was_said() -> None:
    async with client_of(Slotted(CODEC, room=0), at_once=SLOTS) as client:
        for stream in (False, True):
            got = await client.post("/v1/completions", json={"prompt": "x", "n": 13, "stream": stream})
            assert got.status_code == 429
            assert "retry-after" in got.headers


async def test_what_was_begun_waits_for_room() -> None:
    service = Slotted(CODEC)
    waves = Waves(service, limit_s=60.0)
    first, second = (GenerationRequest(name, SamplingSettings(), text="x") for name in "ab")
    assert [d async for d in waves.generate(first)][-1].finish == "stop"
    service.busy = 3
    assert [d async for d in waves.generate(second)][-1].finish == "stop"
    assert service.refused == 3
    service.busy = 1
    with pytest.raises(OverloadedError):
        await anext(Waves(service, limit_s=60.0).generate(second))  # another request, of which nothing was said
    late = Waves(service, limit_s=0.0)
    assert [d async for d in late.generate(first)]
    service.busy = 1
    with pytest.raises(OverloadedError):
        await anext(late.generate(second))  # its time is up
    assert service.open == 0


async def test_a_stream_that_waits_for_its_turn_says_so() -> None:
    service = Reciter(CODEC)
    gate = RequestGate(queue=FairQueue(running=1))
    body = {"prompt": "x", "stream": True, "max_tokens": 50}
    async with client_of(service, comment_s=0.005, gate=gate) as client:
        async with gate.admit(gate.identify(None), 0, 1):
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while not gate._queue.waiting:
                await asyncio.sleep(0)
            # Refused while it waits, with a status of its own: not as an event of a stream that has begun.
            for wrong, param in (
                ({"prompt": "x" * 500}, "prompt"),
                ({"prompt": [10**6]}, "prompt"),
                ({"stop_token_ids": [10**6]}, "stop_token_ids"),
            ):
                got = await client.post("/v1/completions", json=body | wrong)
                assert (got.status_code, got.json()["error"]["param"]) == (400, param)
        lines = (await asked).text.split("\n\n")
    assert lines[0] == ": waiting"
    assert lines[-2] == "data: [DONE]"
    told = [json.loads(line[6:]) for line in lines[:-2] if not line.startswith(":")]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == "Hello wörld"


async def test_pauses_lose_nothing_and_close_what_they_read() -> None:
    released, closed = asyncio.Event(), []

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await released.wait()
            yield 2
            raise ValueError("at the end")
        finally:
            closed.append(True)

    items: list[int | None] = []

    async def read() -> None:
        async for item in with_pauses(source(), 0.001):
            items.append(item)
            if items.count(None) == 3:
                released.set()

    with pytest.raises(ValueError, match="at the end"):
        await read()
    assert [item for item in items if item is not None] == [1, 2]
    assert items.count(None) >= 3
    released.clear()
    pausing = with_pauses(source(), 0.001)
    assert (await anext(pausing), await anext(pausing)) == (1, None)
    await pausing.aclose()
    assert closed == [True, True]
