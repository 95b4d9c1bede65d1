"""Requests made up from the OpenAPI description: none may end with 5xx, none may hang, every refusal has its shape."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from tiny import Reciter, byte_codec

from deployments.ingress import http_app
from deployments.service import Served

CODEC = byte_codec()
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", http_app(Reciter(CODEC), CODEC, Served("tiny", context=64)))
SHAPE = {"message", "type", "param", "code"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the test clients behind schemathesis


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_made_up_requests(case: schemathesis.Case) -> None:
    response = case.call(timeout=10)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == SHAPE
        assert response.json()["error"]["param"] is None or isinstance(response.json()["error"]["param"], str)
