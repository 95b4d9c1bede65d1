"""The OpenAI-compatible HTTP door as an application: its routes, and what every request passes through.

`http_app` takes whatever serves (see service.py), so the same application runs behind Ray Serve and in tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from deployments.batch_api.routes import BatchLimits, BatchRequest, BatchRoutes
from deployments.ingress import error_responses, openapi
from deployments.ingress.browser_guard import BrowserGuardMiddleware
from deployments.ingress.client_compatibility import HeadMiddleware, Http10Middleware
from deployments.ingress.middleware import AccessLogMiddleware, RequestIdMiddleware
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.routes import HttpLimits, Routes
from deployments.ingress.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deployments.ingress.service import Codec, Served, Service
from deployments.ingress.streams import GoneError


def http_app(
    service: Service,
    codec: Codec,
    served: Served,
    limits: HttpLimits | None = None,
    gate: RequestGate | None = None,
    stamp_ids: bool = True,
    batch_folder: Path | None = None,
    batch_limits: BatchLimits | None = None,
) -> FastAPI:
    """The application over `service`. All errors are in OpenAI's shape.

    stamp_ids: give requests their ids here; Ray Serve's proxy does it itself.
    batch_folder: where files and batches are kept, and taken up again after a restart; without it there are none.
    """
    limits = limits or HttpLimits()
    door = Routes(service, codec, served, limits, gate or RequestGate())
    batches = None if batch_folder is None else BatchRoutes(batch_folder, door.answer, batch_limits or BatchLimits())

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        if batches is not None:
            await batches.resume()
        yield
        if batches is not None:
            await batches.close()
        door.grammars.close()

    app = FastAPI(
        title="Outrider", version=served.version, openapi_url="/openapi.json", redirect_slashes=False, lifespan=life
    )
    error_responses.install(app)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(GoneError, gone)
    app.add_exception_handler(ClientDisconnect, gone)  # in the middle of its body
    app.add_middleware(HeadMiddleware)
    app.add_middleware(Http10Middleware)
    if stamp_ids:
        app.add_middleware(RequestIdMiddleware)
    if limits.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(limits.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if limits.guards_browsers:
        app.add_middleware(BrowserGuardMiddleware, origins=limits.cors_origins, is_loopback=limits.is_loopback)
    if limits.access_log:
        app.add_middleware(AccessLogMiddleware)
    _routes(app, door)
    if batches is not None:
        _batch_routes(app, batches, door)
    openapi.install(app)
    return app


def _routes(app: FastAPI, door: Routes) -> None:
    takes, known = openapi.body_of, [Depends(door.identify)]
    app.post("/v1/completions", openapi_extra=takes(CompletionRequest), dependencies=known)(door.complete)
    app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), dependencies=known)(door.chat)
    app.get("/v1/models", dependencies=known)(door.models)
    app.get("/v1/models/{name:path}", dependencies=known)(door.model)
    for prefix in ("", "/v1"):
        app.post(f"{prefix}/tokenize", openapi_extra=takes(TokenizeRequest), dependencies=known)(door.tokenize)
        app.post(f"{prefix}/detokenize", openapi_extra=takes(DetokenizeRequest), dependencies=known)(door.detokenize)
        app.get(f"{prefix}/tokenizer_info", dependencies=known)(door.tokenizer_info)
    app.get("/status", dependencies=known)(door.status)
    app.get("/", include_in_schema=False)(door.page)
    app.get("/health")(door.health)
    app.get("/ready")(door.ready)
    app.get("/version")(door.version)


def _batch_routes(app: FastAPI, batches: BatchRoutes, door: Routes) -> None:
    known = [Depends(door.identify)]
    app.post("/v1/files", openapi_extra=openapi.UPLOAD, dependencies=known)(batches.upload)
    app.get("/v1/files", dependencies=known)(batches.files)
    app.get("/v1/files/{file_id}", dependencies=known)(batches.file)
    app.get("/v1/files/{file_id}/content", dependencies=known)(batches.content)
    app.delete("/v1/files/{file_id}", dependencies=known)(batches.delete)
    app.post("/v1/batches", openapi_extra=openapi.body_of(BatchRequest), dependencies=known)(batches.create)
    app.get("/v1/batches", dependencies=known)(batches.batches)
    app.get("/v1/batches/{batch_id}", dependencies=known)(batches.batch)
    app.post("/v1/batches/{batch_id}/cancel", dependencies=known)(batches.cancel)
