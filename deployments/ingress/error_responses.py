"""Errors in OpenAI's shape, for everything that can go wrong over HTTP."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from actors.errors import EngineError, InvalidSettingError, OutriderError, RequestError

logger = logging.getLogger("outrider.http")


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads."""

    status = 413
    code = "request_too_large"


class SlowBodyError(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class MediaTypeError(RequestError):
    """The body is not declared as JSON, or packed in a way that is not read here.

    accept_encoding: how it may be packed instead, where that is what is wrong.
    """

    status = 415
    code = "unsupported_media_type"
    accept_encoding: str | None = None


class ForbiddenError(RequestError):
    """No key, or one that is not known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


def error_body(error: Exception) -> dict[str, object]:
    """OpenAI's error object. What was not raised on purpose is not shown to clients."""
    if not isinstance(error, OutriderError):
        error = EngineError("the server failed while answering; the request id finds it in the server's log")
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
    }


def error_response(error: Exception) -> JSONResponse:
    """The error with its status; Retry-After where trying again makes sense."""
    status = error.status if isinstance(error, OutriderError) else 500
    headers = {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(math.ceil(retry_after))
    accept_encoding = getattr(error, "accept_encoding", None)
    if accept_encoding is not None:
        headers["accept-encoding"] = accept_encoding
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every error of `app` in OpenAI's shape."""

    async def on_purpose(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail or HTTPStatus(error.status_code).phrase}"
        refusal = RequestError(message)
        refusal.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return JSONResponse(error_body(refusal), status_code=error.status_code, headers=error.headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return error_response(InvalidSettingError(f"{param}: {first['msg']}", param))

    async def unforeseen(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error)

    app.add_exception_handler(OutriderError, on_purpose)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unforeseen)
