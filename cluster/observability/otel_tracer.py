"""Traces through OpenTelemetry: a request is one trace, whatever processes it passes through.

No context travels with the messages. Trace and span ids follow from the request's id, so that ingress, orchestrator,
target and draft agree on them by themselves, and on whether the request is sampled.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any, Literal

from actors.errors import ConfigError
from actors.tracing import NO_TRACES, Tracer
from cluster.config.deployment import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger(__name__)

Part = Literal["ingress", "orchestrator", "target", "draft"]
PARENTS: dict[Part, Part | None] = {
    "ingress": None,
    "orchestrator": "ingress",
    "target": "orchestrator",
    "draft": "orchestrator",
}
MOST_OPEN = 10_000
"""Spans open at once in one process; more are not recorded."""


def tracer_for(settings: Tracing, part: Part, replica: str) -> Tracer:
    """The tracer of one part. Can be pickled until it is first used. Raises ConfigError without the extra `traces`."""
    if settings.endpoint is None:
        return NO_TRACES
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError as error:
        raise ConfigError("tracing needs the extra: pip install 'outrider[traces]'", "tracing.endpoint") from error
    return OtelTracer(settings, part, replica)


def request_of(sequence: str) -> str:
    """The id that all of a request's sequences share: those of its moves to other orchestrators have a suffix."""
    return sequence.partition("~")[0]


def trace_id(sequence: str) -> int:
    """128 bits."""
    return _bits(request_of(sequence), 16)


def span_id(part: Part, sequence: str, replica: str) -> int:
    """64 bits. Moved sequences have a span per replica; what is a parent is named without its replica."""
    name = request_of(sequence) if part == "ingress" else sequence
    return _bits(f"{part}/{name}" + (f"/{replica}" if part in ("target", "draft") else ""), 8)


def sampled(sequence: str, share: float) -> bool:
    """The same answer in every process."""
    return _bits(f"sampled/{request_of(sequence)}", 8) < share * 2**64


class OtelTracer:
    """A Tracer over OpenTelemetry's SDK. `processor`: where spans go; made from the settings when first needed."""

    def __init__(self, settings: Tracing, part: Part, replica: str, processor: SpanProcessor | None = None) -> None:
        self._settings = settings
        self._part = part
        self._replica = replica
        self._processor = processor
        self._open: dict[str, int] = {}

    def begin(self, sequence: str) -> None:
        if len(self._open) < MOST_OPEN and sampled(sequence, self._settings.share):
            self._open[sequence] = time.time_ns()

    def end(self, sequence: str, **facts: str | int | float) -> None:
        started = self._open.pop(sequence, None)
        if started is None:
            return
        try:
            self._export(sequence, started, facts)
        except Exception as error:  # a trace must never cost an answer
            logger.warning("a span could not be recorded: %s", error)

    def _export(self, sequence: str, started: int, facts: dict[str, Any]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        if self._processor is None:
            self._processor = _processor(self._settings)

        def context(part: Part) -> SpanContext:
            return SpanContext(
                trace_id(sequence), span_id(part, sequence, self._replica), False, TraceFlags(TraceFlags.SAMPLED)
            )

        parent = PARENTS[self._part]
        span = ReadableSpan(
            name=self._part,
            context=context(self._part),
            parent=context(parent) if parent is not None else None,
            resource=Resource({"service.name": self._settings.service}),
            attributes={"outrider.sequence": sequence, "outrider.replica": self._replica}
            | {f"outrider.{name}": value for name, value in facts.items()},
            kind=SpanKind.SERVER if parent is None else SpanKind.INTERNAL,
            start_time=started,
            end_time=time.time_ns(),
        )
        self._processor.on_end(span)


def _processor(settings: Tracing) -> SpanProcessor:
    """Not the process-wide provider's: Ray or a user may have set that."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint))


def _bits(text: str, length: int) -> int:
    """A number of `length` bytes that is never zero, which OpenTelemetry takes for "no id"."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=length).digest()) or 1
