"""How an orchestrator is called: through Ray Serve's handle, over gRPC, and in one way whatever happens to the call.

Not as a stream of Ray's own. In Ray 2.60 whoever serves one stands still at its end, with everything else that it
serves, until the caller has acknowledged every piece: its event loop waits in `WaitAllObjectsReported`. A caller that
is stopped, or whose node died, would hold up an orchestrator until Ray has given it up. Over gRPC a caller's end is
its own affair, and so is the end of a call that nobody waits for any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LostError(Exception):
    """Whoever was called is gone, or cannot be reached."""


class Call(Generic[T]):
    """A streaming call that is under way. Iterating raises LostError, or what was raised at the other end; who gave up
    waiting for a piece may wait for it again."""

    def __init__(self, response: Any) -> None:
        from grpc.aio import AioRpcError
        from ray.exceptions import RayActorError

        self._response = response
        self._pieces: AsyncIterator[T] = aiter(response)
        self._losses: tuple[type[Exception], ...] = (RayActorError, AioRpcError)

    def __aiter__(self) -> Call[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await anext(self._pieces)
        except self._losses as error:
            raise LostError(type(error).__name__) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LostError("cancelled at the other end") from None  # which ends; nobody here wanted that

    def cancel(self) -> None:
        """End it at the other end too. Waits for nobody."""
        self._response.cancel()
