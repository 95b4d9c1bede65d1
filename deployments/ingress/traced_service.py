"""The ingress's span: a service whose requests are traced from the door on, whoever generates their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from actors.messages import Delta, GenerationRequest
from actors.tracing import NO_TRACES, Tracer
from deployments.ingress.service import Service


class TracedService:
    """A Service over another one. The span ends with the answer, however that ends."""

    def __init__(self, service: Service, tracer: Tracer) -> None:
        self._service = service
        self._tracer = tracer
        self.status = service.status
        self.ready = service.ready

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of one answer, as the service gives them."""
        self._tracer.begin(request.id)
        try:
            # Closed with this generator, and not some time later: that is what cancels the request.
            deltas: Any = self._service.generate(request)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            self._tracer.end(request.id)


def traced(service: Service, tracer: Tracer) -> Service:
    """`service` itself where tracing is off."""
    return service if tracer is NO_TRACES else TracedService(service, tracer)
