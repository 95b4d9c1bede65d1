"""The answers of one request that are more than fit at once: what was begun is not lost to a full queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from actors.errors import OverloadedError
from actors.messages import Delta, GenerationRequest
from deployments.ingress.service import Service

LONGEST_S = 600.0
"""For which a request without a deadline goes on asking for room."""


class Waves:
    """Generates the answers of one request. The first may be refused; the later ones wait for room.

    limit_s: the time for all of them, from now on.
    """

    def __init__(self, service: Service, limit_s: float) -> None:
        self._service = service
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + limit_s
        self._begun = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Like Service.generate. Raises OverloadedError as long as no answer of the request has begun."""
        while True:
            left = self._deadline - self._clock()
            if request.timeout_s is not None and self._begun:
                request = replace(request, timeout_s=max(left, 1e-3))
            stream = self._service.generate(request)
            started = False
            try:
                async for delta in stream:
                    self._begun = started = True
                    yield delta
                return
            except OverloadedError as error:
                pause_s = error.retry_after
                if started or not self._begun or left <= pause_s:
                    raise
            finally:
                if isinstance(stream, AsyncGenerator):
                    await stream.aclose()
            await asyncio.sleep(pause_s)
