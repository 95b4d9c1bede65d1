"""Whatever happens to a call of an orchestrator, its caller sees one error; what is said there comes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.errors import OverloadedError
from deployments.orchestrator.handle import Call, LostError


class Response:
    """As Serve's: one piece, and then an error, or nothing ever."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


GONE = (
    ActorDiedError(),
    ActorUnavailableError("gone", None),
    AioRpcError(StatusCode.UNAVAILABLE, Metadata(), Metadata()),
    asyncio.CancelledError(),  # at the other end, by a replica that is shut down
)


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
async def test_every_kind_of_loss_is_one_error(error: BaseException) -> None:
    pieces = aiter(Call[int](Response(error)))
    assert await anext(pieces) == 1
    with pytest.raises(LostError):
        await anext(pieces)


async def test_what_the_other_end_raises_comes_through() -> None:
    pieces = aiter(Call[int](Response(OverloadedError("full"))))
    assert await anext(pieces) == 1
    with pytest.raises(OverloadedError):
        await anext(pieces)


async def test_who_is_cancelled_is_cancelled() -> None:
    pieces = aiter(Call[int](Response()))
    assert await anext(pieces) == 1
    waiting = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_call_is_cancelled_at_the_other_end() -> None:
    response = Response()
    Call[int](response).cancel()
    assert response.cancelled
