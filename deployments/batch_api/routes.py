"""OpenAI's `/v1/files` and `/v1/batches` over a BatchStore. A key sees what it handed in, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field
from starlette.responses import FileResponse, JSONResponse, Response

from actors.errors import InvalidSettingError, OverloadedError, UnavailableError
from deployments.batch_api.records import StoredBatch, StoredFile
from deployments.batch_api.store import BatchStore
from deployments.batch_api.worker import Answer, Batches
from deployments.ingress.error_responses import BodyTooLargeError
from deployments.ingress.middleware import read_body, read_upload
from deployments.ingress.request_body import Body, parse

logger = logging.getLogger("outrider.http")

_WINDOW = re.compile(r"([1-9]\d{0,3})([hd])")
_SECONDS = {"h": 3600, "d": 86_400}
MOST_METADATA = 16
MAX_REQUEST_BYTES = 64 * 1024

Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=100)]
Order = Literal["asc", "desc"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one key may hand in.

    file_bytes: of one file; held_bytes: of all its files together, results included; open: batches not at their end.
    concurrency: lines under way at once, over all batches of one ingress replica.
    """

    file_bytes: int = 200 * 1024 * 1024
    held_bytes: int = 4 * 1024 * 1024 * 1024
    open: int = 16
    concurrency: int = 32


class BatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=100)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[str, Field(max_length=8)] = "24h"
    """A number of hours or days: 24h, 3d. What has not begun by then is not answered any more."""
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=MOST_METADATA),
    ] = {}


@dataclass(slots=True)
class BatchRoutes:
    """The routes. The store is opened when it is first needed, or at the start when there is one to go on with."""

    folder: Path
    answer: Answer
    limits: BatchLimits = BatchLimits()
    _store: BatchStore | None = None
    _batches: Batches | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def resume(self) -> None:
        """Go on with what an earlier process left."""
        try:
            if (self.folder / "batches.sqlite").exists():
                (await self._worker()).start()
        except (OSError, UnavailableError) as error:  # answers can be given without it
            logger.error("no batches: %s", error)

    async def close(self) -> None:
        """Let go; what is under way is taken up by the next process."""
        if self._batches is not None:
            await self._batches.stop()
        if self._store is not None:
            self._store.close()
        self._store = self._batches = None

    # -- files ---------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        store, owner = await self._open(), _owner(request)
        fields, content = await read_upload(request, self.limits.file_bytes)
        with content.file:
            if fields.get("purpose") != "batch":
                raise InvalidSettingError("purpose must be 'batch'", "purpose")
            held = await asyncio.to_thread(store.held_bytes, owner)
            if held + (content.size or 0) > self.limits.held_bytes:
                raise BodyTooLargeError(
                    f"this key's files would take more than {self.limits.held_bytes} bytes: delete some", "file"
                )
            name = (content.filename or "upload")[:255]
            stored = await asyncio.to_thread(store.add_file, owner, name, "batch", content.file)
        return JSONResponse(file_body(stored))

    async def files(
        self,
        request: Request,
        after: After = None,
        limit: Limit = 10_000,
        order: Order = "desc",
        purpose: Annotated[str | None, Query(max_length=50)] = None,
    ) -> Response:
        """GET /v1/files."""
        store = await self._open()
        found, more = await asyncio.to_thread(store.files, _owner(request), after, limit, purpose, order == "desc")
        return JSONResponse(_page([file_body(one) for one in found], more))

    async def file(self, request: Request, file_id: str) -> Response:
        """GET /v1/files/{file_id}."""
        store = await self._open()
        return JSONResponse(file_body(await asyncio.to_thread(store.file, file_id, _owner(request))))

    async def content(self, request: Request, file_id: str) -> Response:
        """GET /v1/files/{file_id}/content."""
        store = await self._open()
        stored = await asyncio.to_thread(store.file, file_id, _owner(request))
        return FileResponse(store.content(stored.id), media_type="application/jsonl")

    async def delete(self, request: Request, file_id: str) -> Response:
        """DELETE /v1/files/{file_id}."""
        store = await self._open()
        await asyncio.to_thread(store.remove_file, file_id, _owner(request))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    # -- batches -------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        store, worker, owner = await self._open(), await self._worker(), _owner(request)
        body = parse(BatchRequest, await read_body(request, MAX_REQUEST_BYTES))
        window = _WINDOW.fullmatch(body.completion_window)
        if window is None:
            raise InvalidSettingError("completion_window must be hours or days, like 24h or 3d", "completion_window")
        if len(await asyncio.to_thread(store.unfinished, owner)) >= self.limits.open:
            refusal = OverloadedError(f"{self.limits.open} batches of this key are under way already")
            refusal.retry_after = 60.0
            raise refusal
        seconds = int(window[1]) * _SECONDS[window[2]]
        batch = await asyncio.to_thread(
            store.add_batch, owner, body.endpoint, body.input_file_id, window[0], seconds, body.metadata
        )
        worker.wake()
        return JSONResponse(batch_body(batch))

    async def batches(
        self, request: Request, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """GET /v1/batches."""
        store = await self._open()
        found, more = await asyncio.to_thread(store.batches, _owner(request), after, limit)
        return JSONResponse(_page([batch_body(one) for one in found], more))

    async def batch(self, request: Request, batch_id: str) -> Response:
        """GET /v1/batches/{batch_id}."""
        store = await self._open()
        return JSONResponse(batch_body(await asyncio.to_thread(store.batch, batch_id, _owner(request))))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """POST /v1/batches/{batch_id}/cancel: what is answered by then can be had, nothing more is begun."""
        store, worker = await self._open(), await self._worker()
        await asyncio.to_thread(store.batch, batch_id, _owner(request))
        batch = await asyncio.to_thread(store.advance, batch_id, "cancelling", ("validating", "in_progress"))
        worker.wake()
        return JSONResponse(batch_body(batch))

    # -- opening -------------------------------------------------------------------------------------------------

    async def _open(self) -> BatchStore:
        async with self._opening:
            if self._store is None:
                try:
                    self._store = await asyncio.to_thread(BatchStore, self.folder)
                except (OSError, sqlite3.Error) as error:
                    logger.error("files cannot be kept in %s: %s", self.folder, error)
                    raise UnavailableError("this server has no place for files (ingress.batch_folder)") from error
            return self._store

    async def _worker(self) -> Batches:
        store = await self._open()
        if self._batches is None:
            self._batches = Batches(store, self.answer, self.limits.concurrency)
        return self._batches


def file_body(file: StoredFile) -> Json:
    """OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_body(batch: StoredBatch) -> Json:
    """OpenAI's batch object."""
    times = {f"{name}_at": batch.times.get(name) for name in _TIMED}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.problems} if batch.problems else None,
        "input_file_id": batch.input,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output,
        "error_file_id": batch.errors,
        "created_at": batch.times["validating"],
        "expires_at": batch.expires,
        **times,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata or None,
    }


_TIMED = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _page(data: list[Json], more: bool) -> Json:
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": more}


def _owner(request: Request) -> str:
    name: str = request.state.tenant.name
    return name
