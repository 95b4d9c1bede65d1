"""OpenAI Batch files: requests in one file, answers in another, errors in a third. A job that was killed goes on.

The output files are the job's memory: an item is done when its line is in one of them, so each input has exactly one
line in the end, whenever the job was stopped. Lines are written whole; one that a crash cut short is dropped. What
failed for reasons that pass (no server, no room, a lost replica) is taken out of the errors by the next run, and asked
again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from actors.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    OutriderError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from deployments.client.jsonl import JsonlFile
from deployments.ingress.error_responses import error_body

ROUTES = ("/v1/chat/completions", "/v1/completions")
PASSING_STATUSES = (429, 500, 502, 503, 504)
"""Of answers that say: not now. The same request may be answered by another try."""
PASSING_TYPES = tuple(kind.type for kind in (OverloadedError, UnavailableError, DeadlineError, EngineError))
MAX_LINE_BYTES = 8 * 1024 * 1024
READ_AHEAD = 64
"""Lines read at once."""

logger = logging.getLogger("outrider.batch")

Json = dict[str, Any]
Post = Callable[[str, Json], Awaitable[tuple[int, str, Json]]]
"""Sends a body to a route; returns status, request id and the answer's body. Raises OutriderError when nothing can."""


class LineError(RequestError):
    """A line of a batch file that is no request."""

    code = "invalid_line"


class BrokenLineError(RequestError):
    """A line whose answering ended in an error that nobody had foreseen."""

    code = "broken_line"


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a batch file. `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    body: Json


@dataclass(slots=True)
class Counts:
    """How a job stands. `resumed` were done by an earlier run and are counted as what they became."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    resumed: int = 0


def read_items(
    lines: Iterator[bytes], routes: tuple[str, ...] = ROUTES
) -> Iterator[Item | tuple[int, str | None, LineError]]:
    """Requests in order; a damaged line is yielded as its number, its id if it has one, and what is wrong."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        custom_id = None
        try:
            data = _parsed(line, number)
            custom_id = data.get("custom_id") if isinstance(data.get("custom_id"), str) else None
            if not custom_id:
                raise LineError(f"line {number}: custom_id must be a text that is not empty", "custom_id")
            if custom_id in seen:
                raise LineError(f"line {number}: custom_id {custom_id!r} was used before", "custom_id")
            _check_sendable(data, number)
            yield _item(data, number, custom_id, routes)
            seen.add(custom_id)
        except LineError as error:
            yield number, custom_id, error


def _parsed(line: bytes, number: int) -> Json:
    if len(line) > MAX_LINE_BYTES:
        raise LineError(f"line {number}: longer than {MAX_LINE_BYTES} bytes")
    try:
        data = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise LineError(f"line {number}: not JSON") from error
    if not isinstance(data, dict):
        raise LineError(f"line {number}: not a JSON object")
    return data


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _check_sendable(data: Json, number: int) -> None:
    """Raises LineError for what JSON's grammar allows, and nobody can send: half a surrogate pair, 1e999."""
    try:
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise LineError(f"line {number}: half a surrogate pair ({half}), which is no character") from error
    except (ValueError, RecursionError) as error:
        raise LineError(f"line {number}: a number that is too large, or nested too deep") from error


def _item(data: Json, number: int, custom_id: str, routes: tuple[str, ...]) -> Item:
    if data.get("method", "POST") != "POST":
        raise LineError(f"line {number}: method must be POST", "method")
    if data.get("url") not in routes:
        raise LineError(f"line {number}: url must be {' or '.join(routes)}", "url")
    body = data.get("body")
    if not isinstance(body, dict):
        raise LineError(f"line {number}: body must be a JSON object", "body")
    if body.get("stream"):
        raise LineError(f"line {number}: a batch cannot stream", "stream")
    return Item(number, custom_id, data["url"], body)


class ResultFile:
    """Lines of results, appended whole. `done` holds what identifies the lines that are in it.

    Failures that may pass are removed when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[tuple[str, object]] = set()
        self._file = JsonlFile(path, "result of a batch", self._recall)

    def _recall(self, result: Json) -> bool:
        identity = _identity(result)
        if may_pass(result):
            return False
        self.done.add(identity)
        return True

    def add(self, result: Json) -> None:
        """Append one line; returns when the operating system has it."""
        self._file.append(result)
        self.done.add(_identity(result))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def may_pass(result: Json) -> bool:
    """Whether a result is a failure that another run may not meet."""
    response, error = result.get("response"), result.get("error")
    if response is not None:
        return response.get("status_code") in PASSING_STATUSES
    return isinstance(error, dict) and error.get("type") in PASSING_TYPES


def _identity(result: Json) -> tuple[str, object]:
    """A request's id names it; a damaged line is named by its number."""
    if "line" in result:
        return ("line", int(result["line"]))
    return ("id", str(result["custom_id"]))


@dataclass(slots=True)
class Batch:
    """One job. `concurrency` requests are under way at once.

    report: told of every item: whether there is an answer, and its body (empty for those of an earlier run).
    """

    source: Path
    results: Path
    errors: Path
    post: Post
    concurrency: int = 64
    report: Callable[[bool, Json], None] = lambda ok, body: None
    routes: tuple[str, ...] = ROUTES
    counts: Counts = field(default_factory=Counts)

    async def run(self) -> Counts:
        """Do what is not done. Raises ConfigError when a file cannot be used; errors of items are results."""
        self.counts = Counts()
        answers = await asyncio.to_thread(ResultFile, self.results)  # long ones take a while to recall
        try:
            problems = await asyncio.to_thread(ResultFile, self.errors)
        except ConfigError:
            answers.close()
            raise
        try:
            with self._open() as source:
                await self._all(read_items(iter(source), self.routes), answers, problems)
        finally:
            answers.close()
            problems.close()
        return self.counts

    def _open(self) -> BinaryIO:
        try:
            return open(self.source, "rb")
        except OSError as error:
            raise ConfigError(f"cannot read {self.source}: {error.strerror}") from error

    async def _all(
        self, items: Iterator[Item | tuple[int, str | None, LineError]], answers: ResultFile, problems: ResultFile
    ) -> None:
        ahead: deque[Item | tuple[int, str | None, LineError]] = deque()
        reading = asyncio.Lock()

        async def following() -> Item | tuple[int, str | None, LineError] | None:
            """The file is read as fast as it is worked off, on a thread: long ones hold up nothing else."""
            async with reading:
                if not ahead:
                    ahead.extend(await asyncio.to_thread(lambda: list(islice(items, READ_AHEAD))))
                return ahead.popleft() if ahead else None

        async def worker() -> None:
            while (item := await following()) is not None:
                await self._one(item, answers, problems)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(worker())

    async def _one(
        self, item: Item | tuple[int, str | None, LineError], answers: ResultFile, problems: ResultFile
    ) -> None:
        counts = self.counts
        counts.total += 1
        if not isinstance(item, Item):
            line, custom_id, error = item
            if ("line", line) in problems.done:
                counts.resumed += 1
            else:
                problems.add({**_result(custom_id), "line": line, **error_body(error)})
            counts.failed += 1
            self.report(False, {})
        elif ("id", item.custom_id) in answers.done:
            counts.completed += 1
            counts.resumed += 1
            self.report(True, {})
        elif ("id", item.custom_id) in problems.done:
            counts.failed += 1
            counts.resumed += 1
            self.report(False, {})
        else:
            await self._ask(item, answers, problems)

    async def _ask(self, item: Item, answers: ResultFile, problems: ResultFile) -> None:
        try:
            status, request_id, body = await self.post(item.url, item.body)
        except OutriderError as error:
            problems.add({**_result(item.custom_id), **error_body(error)})
            self.counts.failed += 1
            self.report(False, {})
            return
        except Exception as error:  # one line's fault, and no reason for the others to stop
            logger.exception("line %d, %s, broke", item.line, item.custom_id)
            broken = BrokenLineError(f"line {item.line} could not be answered: {type(error).__name__}: {error}")
            problems.add({**_result(item.custom_id), **error_body(broken)})
            self.counts.failed += 1
            self.report(False, {})
            return
        response = {"status_code": status, "request_id": request_id, "body": body}
        if status == 200:
            answers.add({**_result(item.custom_id), "response": response, "error": None})
            self.counts.completed += 1
        else:
            problems.add({**_result(item.custom_id), "response": response, "error": body.get("error")})
            self.counts.failed += 1
        self.report(status == 200, body)


def _result(custom_id: str | None) -> Json:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": None}
