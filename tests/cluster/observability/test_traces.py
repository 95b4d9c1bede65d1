"""A request is one trace over all parts, ended however it ends, and nothing at all when tracing is off."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.draft.actor import DraftActor
from actors.engines.emulated.engines import EmulatedDraft, EmulatedTarget
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.errors import ConfigError
from actors.messages import Delta, GenerationRequest
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from actors.orchestrator.replica_pool import StaticDirectory
from actors.settings import DraftSettings, OrchestratorSettings, SamplingSettings, TargetSettings
from actors.target.actor import TargetActor
from actors.telemetry import MemoryRecorder
from actors.text.emulated_codec import EmulatedCodec
from actors.tracing import NO_TRACES
from actors.transport.links import LocalPeer
from cluster.config.deployment import Tracing
from cluster.observability import otel_tracer
from cluster.observability.otel_tracer import OtelTracer, span_id, trace_id, tracer_for
from deployments.ingress.traced_service import traced

ON = Tracing(endpoint="http://collector:4318/v1/traces")


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


async def serve(spans: InMemorySpanExporter, request: GenerationRequest, deltas: int | None = None) -> None:
    """One request through emulated tiers, abandoned after `deltas` deltas; then everything is stopped."""
    processor = SimpleSpanProcessor(spans)
    language = TargetSpec().language
    target = TargetActor(
        "t0",
        lambda: EmulatedTarget(TargetSpec(pass_ms=1), TargetSettings()),
        TargetSettings(),
        MemoryRecorder(),
        tracer=OtelTracer(ON, "target", "t0", processor),
    )
    draft = DraftActor(
        "d0",
        lambda: EmulatedDraft(DraftSpec(step_ms=0.2), DraftSettings()),
        DraftSettings(),
        MemoryRecorder(),
        tracer=OtelTracer(ON, "draft", "d0", processor),
    )
    target.start()
    draft.start()
    orchestrator = Orchestrator(
        targets=StaticDirectory({"t0": LocalPeer(target)}),
        drafts=StaticDirectory({"d0": LocalPeer(draft)}),
        admission=Admission(EmulatedCodec(language.vocabulary), language.vocabulary, TargetSettings().context),
        settings=OrchestratorSettings(discovery_period_s=0.01),
        recorder=MemoryRecorder(),
        tracer=OtelTracer(ON, "orchestrator", "o0", processor),
    )
    await orchestrator.start()
    try:
        while not all(orchestrator.status()[tier]["replicas"] for tier in ("target", "draft")):
            await asyncio.sleep(0.01)
        stream = orchestrator.generate(request)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == deltas:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        while len(spans.get_finished_spans()) < 3:
            await asyncio.sleep(0.01)
    finally:
        await orchestrator.stop()
        await target.stop()
        await draft.stop()


def request(name: str, tokens: int) -> GenerationRequest:
    return GenerationRequest(name, SamplingSettings(max_tokens=tokens, seed=1, ignore_eos=True), tokens=(1, 2, 3))


@pytest.mark.timeout(60)
async def test_one_request_is_one_trace(spans: InMemorySpanExporter) -> None:
    await serve(spans, request("r1", 20))
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"orchestrator", "target", "draft"}
    assert {span.context.trace_id for span in found.values()} == {trace_id("r1")}
    orchestrator = found["orchestrator"]
    assert orchestrator.parent.span_id == span_id("ingress", "r1", "any")
    for part in ("target", "draft"):
        assert found[part].parent.span_id == orchestrator.context.span_id
        assert found[part].start_time >= orchestrator.start_time
    attributes = orchestrator.attributes
    assert attributes["outrider.outcome"] == "length"
    assert 1 <= attributes["outrider.passes"] <= 20
    assert found["target"].attributes["outrider.finish"] == "length"


@pytest.mark.timeout(60)
async def test_an_abandoned_request_ends_everywhere(spans: InMemorySpanExporter) -> None:
    await serve(spans, request("r2", 1000), deltas=2)
    found = {span.name: span.attributes for span in spans.get_finished_spans()}
    assert found["orchestrator"]["outrider.outcome"] == "cancelled"
    assert found["target"]["outrider.finish"] == "cancelled"
    assert set(found) == {"orchestrator", "target", "draft"}


def test_moves_stay_in_the_trace() -> None:
    """The second orchestrator's sequence has a name of its own, and the ingress span of both is one."""
    assert trace_id("r~1") == trace_id("r")
    assert span_id("ingress", "r~1", "i") == span_id("ingress", "r", "i")
    assert span_id("orchestrator", "r~1", "o") != span_id("orchestrator", "r", "o")
    assert span_id("target", "r", "t0") != span_id("target", "r", "t1")


@given(st.text(max_size=20), st.floats(0, 1))
def test_all_parts_agree_on_sampling(name: str, share: float) -> None:
    assert otel_tracer.sampled(name, share) == otel_tracer.sampled(f"{name}~2", share)
    assert otel_tracer.sampled(name, 1.0)
    assert not otel_tracer.sampled(name, 0.0)


def test_share_is_kept() -> None:
    """A hash decides: of 10,000 ids a tenth is chosen, 1,000 ± 5 standard deviations of 30 (fails by chance never:
    the ids are fixed).
    """
    chosen = sum(otel_tracer.sampled(f"chatcmpl-{i}", 0.1) for i in range(10_000))
    assert 850 < chosen < 1150


def test_open_spans_are_bounded(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_tracer, "MOST_OPEN", 3)
    tracer = OtelTracer(ON, "target", "t", SimpleSpanProcessor(spans))
    for i in range(5):
        tracer.begin(f"r{i}")
    for i in range(5):
        tracer.end(f"r{i}")
        tracer.end(f"r{i}")  # twice is once
    assert [span.attributes["outrider.sequence"] for span in spans.get_finished_spans()] == ["r0", "r1", "r2"]


def test_a_collector_that_fails_costs_nothing(caplog: Any) -> None:
    class Broken:
        def on_end(self, span: Any) -> None:
            raise ConnectionError("no collector")

    tracer = OtelTracer(ON, "target", "t", Broken())  # type: ignore[arg-type]
    tracer.begin("r")
    tracer.end("r")
    assert "no collector" in caplog.text


def test_off_by_default() -> None:
    assert tracer_for(Tracing(), "target", "t") is NO_TRACES
    service = Reciting()
    assert traced(service, NO_TRACES) is service


class Reciting:
    """A service that answers with one delta a token, and notes when it is closed."""

    def __init__(self) -> None:
        self.closed = False

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            for token in request.tokens or ():
                yield Delta((token,))
        finally:
            self.closed = True

    async def status(self) -> dict[str, object]:
        return {}

    async def ready(self) -> bool:
        return True


@pytest.mark.parametrize("deltas", [1, 3])
async def test_the_door_has_a_span_of_its_own(spans: InMemorySpanExporter, deltas: int) -> None:
    """It ends with the answer, and with the client who leaves in the middle; the service is closed by then."""
    inner = Reciting()
    service = traced(inner, OtelTracer(ON, "ingress", "i0", SimpleSpanProcessor(spans)))
    stream = service.generate(request("r3", 3))
    for _ in range(deltas):
        await anext(stream)
        assert not spans.get_finished_spans()
    await stream.aclose()  # type: ignore[attr-defined]
    (span,) = spans.get_finished_spans()
    assert inner.closed
    assert span.parent is None
    assert span.context.span_id == span_id("ingress", "r3", "any")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"outrider\[traces\]"):
        tracer_for(ON, "target", "t")


def test_it_can_be_sent_to_an_actor() -> None:
    assert isinstance(pickle.loads(pickle.dumps(OtelTracer(ON, "draft", "d"))), OtelTracer)
