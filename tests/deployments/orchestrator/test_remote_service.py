"""An answer that moves to another orchestrator: what it is asked for then."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import Delta, GenerationRequest
from actors.settings import SamplingSettings
from deployments.orchestrator import deployment
from deployments.orchestrator.handle import LostError


class Call:
    """Tells one token, and is lost after it; the last one ends the answer."""

    def __init__(self, request: GenerationRequest) -> None:
        self._pieces = self._run(request)

    @staticmethod
    async def _run(request: GenerationRequest) -> AsyncGenerator[Delta]:
        number = len(request.committed)
        yield Delta((number,), finish="length" if number == 2 else None)
        if number < 2:
            raise LostError("gone")

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._pieces

    async def __anext__(self) -> Delta:
        return await anext(self._pieces)

    def cancel(self) -> None: ...


class Handle:
    """A Serve handle. Each request takes ten seconds, by the clock that is put in place of the real one."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.now = 100.0
        self.generate = self.answer = self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, request: GenerationRequest) -> GenerationRequest:
        self.requests.append(request)
        self.now += 10.0
        return request


async def test_a_move_does_not_start_the_time_limit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    monkeypatch.setattr(deployment, "Call", Call)
    monkeypatch.setattr(deployment, "time", SimpleNamespace(monotonic=lambda: handle.now))

    async def first_asked(ask: Any, *_: Any) -> tuple[Any, Any, Delta]:
        call = ask()
        return call, aiter(call), await anext(call)

    monkeypatch.setattr(deployment, "take_over", first_asked)
    service = deployment.RemoteService(handle)
    request = GenerationRequest("r", SamplingSettings(), tokens=(1,), timeout_s=60.0, elapsed_s=2.0)
    deltas = [delta async for delta in service.generate(request)]
    assert [token for delta in deltas for token in delta.tokens] == [0, 1, 2]
    assert [asked.id for asked in handle.requests] == ["r", "r~1", "r~2"]
    assert [asked.committed for asked in handle.requests] == [(), (0,), (0, 1)]
    assert [asked.elapsed_s for asked in handle.requests] == [2.0, 12.0, 22.0]
    assert {asked.timeout_s for asked in handle.requests} == {60.0}
