"""Responses are counted by route and class of status, and a path that nobody serves is one label, not many."""

from __future__ import annotations

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from actors import telemetry
from actors.telemetry import MemoryRecorder
from cluster.scaling.controller_state import kind_of
from deployments.ingress.metrics_middleware import MetricsMiddleware


def test_routes_and_statuses() -> None:
    app, recorder = FastAPI(), MemoryRecorder()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> str:
        if name == "none":
            raise HTTPException(404)
        return name

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    app.add_middleware(MetricsMiddleware, recorder=recorder)
    client = TestClient(app)
    for path in ("/v1/models/a", "/v1/models/b/c", "/v1/models/none", "/stream", "/.env", "/admin"):
        client.get(path)
    counted = {key[1]: value for key, value in recorder.sums.items() if key[0] == telemetry.HTTP_RESPONSES.name}
    assert counted == {
        (("route", "/v1/models/{name:path}"), ("status", "2xx")): 2,
        (("route", "/v1/models/{name:path}"), ("status", "4xx")): 1,
        (("route", "/stream"), ("status", "2xx")): 1,
        (("route", "other"), ("status", "4xx")): 2,
    }


def test_reasons_lose_their_figures() -> None:
    assert kind_of("12 sequences for 16 slots a replica") == kind_of("3 sequences for 8 slots a replica")
    assert kind_of("48% of passes found no proposal") == "N of passes found no proposal"
    assert kind_of("policy failed: KeyError('x7')") == "policy failed"
