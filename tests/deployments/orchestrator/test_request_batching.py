"""Bundles of whole answers, from a client's requests through one call to a reciting service and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from tiny import Reciter, byte_codec

from actors.errors import EngineError, OutriderError, OverloadedError, UnavailableError
from actors.messages import Delta, GenerationRequest
from deployments.client.client import Client
from deployments.client.request_builder import named, request_for
from deployments.orchestrator.heartbeat import SilenceError
from deployments.orchestrator.request_batching import Outcome, RequestBatcher, answered

CODEC = byte_codec()


class Bundled:
    """A reciter at the other end of bundles. `calls` are the bundles' sizes."""

    def __init__(self, reciter: Reciter, silence_s: float = 10.0) -> None:
        self.reciter = reciter
        self.calls: list[int] = []
        self.lost: Exception | None = None
        self.bundler = RequestBatcher(self._call, self._translated, silence_s)
        self.answer = self.bundler.answer
        self.generate, self.status, self.ready = reciter.generate, reciter.status, reciter.ready

    async def _call(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Outcome]]:
        self.calls.append(len(requests))
        outcomes = answered(self.reciter.generate, requests, period_s=0.01)  # type: ignore[arg-type]
        try:
            async for found in outcomes:
                yield found
                if self.lost is not None:
                    raise self.lost
        finally:
            await outcomes.aclose()

    @staticmethod
    def _translated(error: Exception) -> Exception:
        return UnavailableError(str(error)) if isinstance(error, SilenceError | OSError) else EngineError(str(error))


def ask(prompt: str, **sampling: Any) -> GenerationRequest:
    return named(request_for(prompt, {"max_tokens": 5, **sampling}))


async def test_what_is_asked_at_once_travels_at_once() -> None:
    it = Bundled(Reciter(CODEC))
    answers = await asyncio.gather(*(it.answer(ask(str(i))) for i in range(300)))
    assert it.calls == [256, 44]
    assert {answer.text for answer in answers} == {"Hello"}
    first = answers[0]
    assert first.tokens == CODEC.encode("Hello")
    assert first.finish == "length"
    assert len(first.texts) == len(first.origins) == 5
    assert first.usage is not None
    assert it.reciter.open == 0


async def test_each_gets_its_own_error() -> None:
    class Picky(Reciter):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            if request.text == "full":
                raise OverloadedError("full")
            if request.text == "broken":
                raise RuntimeError("secret")
            async for delta in super().generate(request):
                yield delta

    it = Bundled(Picky(CODEC))
    told = await asyncio.gather(*(it.answer(ask(p)) for p in ("a", "full", "broken", "b")), return_exceptions=True)
    assert [type(one) for one in told] == [Delta, OverloadedError, EngineError, Delta]
    assert "secret" not in str(told[2])


async def test_nobody_waits_any_more() -> None:
    it = Bundled(Reciter(CODEC, held=asyncio.Event()))
    tasks = [asyncio.create_task(it.answer(ask(str(i)))) for i in range(3)]
    while it.reciter.open < 3:
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while it.reciter.open:  # bounded by the test's time limit
        await asyncio.sleep(0.001)


async def test_life_signs_keep_a_slow_bundle_and_silence_ends_it() -> None:
    it = Bundled(Reciter(CODEC, held=asyncio.Event()), silence_s=0.2)
    task = asyncio.create_task(it.answer(ask("slow")))
    while not it.reciter.open:
        await asyncio.sleep(0.001)
    await asyncio.wait({task}, timeout=0.5)  # more than the silence that would end it
    assert not task.done()
    it.reciter.held.set()  # type: ignore[union-attr]
    assert (await task).text == "Hello"

    async def silent(requests: list[GenerationRequest]) -> AsyncGenerator[list[Outcome]]:
        await asyncio.Event().wait()
        yield []

    with pytest.raises(UnavailableError):
        await RequestBatcher(silent, Bundled._translated, silence_s=0.01).answer(ask("x"))


@pytest.mark.parametrize(("lost", "kind"), [(OSError("gone"), UnavailableError), (ValueError("?"), EngineError)])
async def test_a_call_that_is_lost_fails_what_is_left(lost: Exception, kind: type[OutriderError]) -> None:
    it = Bundled(Reciter(CODEC, held=asyncio.Event()))
    it.lost = lost
    with pytest.raises(kind):
        await it.answer(ask("x"))
    assert it.reciter.open == 0


def test_the_client_uses_bundles_and_tries_again() -> None:
    it = Bundled(Reciter(CODEC))
    refusal = OverloadedError("full")
    refusal.retry_after = 0
    it.reciter.refusal = refusal

    async def heal() -> None:
        it.reciter.refusal = None

    with Client(it, retries=2, pause_s=0) as client:  # type: ignore[arg-type]
        assert isinstance(client.generate(["a"])[0].error, OverloadedError)
        client._run(heal())
        results = client.generate([str(i) for i in range(50)], concurrency=50, max_tokens=5)
    assert [result.text for result in results] == ["Hello"] * 50
    assert it.calls[:3] == [1, 1, 1]
    assert it.calls[3] == 50
