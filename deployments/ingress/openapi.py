"""The OpenAPI description: bodies are read by hand, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from deployments.batch_api.routes import BatchRequest
from deployments.ingress.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    BatchRequest,
)

_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"anyOf": [*_TEXT_OR_TEXTS["anyOf"], _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}
"""openapi_extra of the route that takes files."""


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """openapi_extra of a route that reads `model` by hand."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Describe `app`, once, when it is first asked."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]  # FastAPI's documented way


def _description(app: FastAPI) -> dict[str, Any]:
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for model in _BODIES:
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["stop"] |= _TEXT_OR_TEXTS
        schemas[name]["properties"]["stop"].pop("type", None)
        schemas[name]["properties"]["stop"].pop("items", None)
    schemas["CompletionRequest"]["properties"]["prompt"] |= _PROMPT
    schemas["Error"] = _ERROR
    problem = {"content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}}
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "Refused", **problem}
            operation["responses"]["5XX"] = {"description": "Not possible now", **problem}
    return described
