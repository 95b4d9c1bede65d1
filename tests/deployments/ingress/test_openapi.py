"""Requests made up from the OpenAPI description: none may end with 5xx, none may hang, every refusal has its shape."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from tiny import Reciter, byte_codec

from deployments.ingress.http_app import http_app
from deployments.ingress.service import Served

CODEC = byte_codec()
FOLDER = tempfile.TemporaryDirectory(prefix="outrider-openapi-")
APP = http_app(Reciter(CODEC), CODEC, Served("tiny", context=64), batch_folder=Path(FOLDER.name))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
ROUTES = {
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/v1/tokenize",
    "/detokenize", "/v1/detokenize", "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches",
    "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel", "/status", "/health", "/ready", "/version",
    "/tokenizer_info", "/v1/tokenizer_info",
}  # fmt: skip
SHAPE = {"message", "type", "param", "code"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the test clients behind schemathesis


def test_every_route_is_described() -> None:
    assert set(APP.openapi()["paths"]) == ROUTES


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_made_up_requests(case: schemathesis.Case) -> None:
    response = case.call(timeout=10)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == SHAPE
        assert response.json()["error"]["param"] is None or isinstance(response.json()["error"]["param"], str)
