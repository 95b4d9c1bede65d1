"""Works batches off: what `/v1/batches` begins goes on here, also after a restart, each line exactly once.

Any number of processes may watch one store; a batch is worked on by the one that holds its lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from actors.errors import OutriderError, OverloadedError, RequestError, UnavailableError
from deployments.batch_api.records import OPEN, Status, StoredBatch
from deployments.batch_api.store import BatchStore
from deployments.client.batch_file import Batch, Counts, Item, read_items
from deployments.ingress.error_responses import error_body

logger = logging.getLogger("outrider.http")

Json = dict[str, Any]
Answer = Callable[[str, Json, str], Awaitable[tuple[str, Json]]]
"""Answers one body on a route for an owner; returns the request's id and the answer. Raises OutriderError."""

MOST_LINES = 50_000
LONGEST_PAUSE_S = 20.0
STRIKES = 3
"""A batch that fails so often in a row, for a reason that is not the store's, ends as failed."""


class ExpiredError(RequestError):
    """The batch's completion window was over before this request was begun."""

    code = "batch_expired"


class Batches:
    """The worker of one process. Lives on one event loop.

    concurrency: requests under way at once, over all batches of this process.
    period_s: how often the store is looked at: for batches of processes that died, for cancellations, for counts.
    """

    def __init__(self, store: BatchStore, answer: Answer, concurrency: int = 32, period_s: float = 1.0) -> None:
        self._store = store
        self._answer = answer
        self._room = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._period_s = period_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._strikes: Counter[str] = Counter()
        self._watcher: asyncio.Task[None] | None = None
        self._new = asyncio.Event()

    def start(self) -> None:
        """Begin to work, if that has not happened."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    def wake(self) -> None:
        """There is something new in the store."""
        self.start()
        self._new.set()

    async def stop(self) -> None:
        """Let go of everything. What is not done is done by the next process that watches the store."""
        tasks = [task for task in (self._watcher, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watcher = None

    async def _watch(self) -> None:
        while True:
            self._new.clear()
            try:
                for id_ in await asyncio.to_thread(self._store.unfinished):
                    if id_ not in self._running:
                        task = self._running[id_] = asyncio.create_task(self._take(id_))
                        task.add_done_callback(lambda _, id_=id_: self._running.pop(id_, None))  # type: ignore[misc]
            except Exception as error:  # a full disk, a lost volume: looked at again
                logger.error("the batch store cannot be read: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._new.wait()

    async def _take(self, id_: str) -> None:
        """Work on a batch, unless another process does."""
        try:
            with self._store.held(id_) as ours:
                if ours:
                    await self._work(await asyncio.to_thread(self._store.batch, id_))
                    await asyncio.to_thread(self._store.tidy, id_)
                    self._strikes.pop(id_, None)
        except (OSError, sqlite3.Error) as error:  # a full disk, a lost volume: taken up again
            logger.error("batch %s stands still: %s", id_, error)
            await asyncio.sleep(self._period_s)
        except Exception as error:  # not the store's fault, so it would be the same for ever
            self._strikes[id_] += 1
            logger.exception("batch %s broke, for the %d. time", id_, self._strikes[id_])
            if self._strikes[id_] >= STRIKES:
                del self._strikes[id_]
                await asyncio.to_thread(self._give_up, id_, error)
            await asyncio.sleep(self._period_s)

    def _give_up(self, id_: str, error: Exception) -> None:
        told = f"the batch cannot go on: {type(error).__name__}: {error}"
        problem = {"code": "batch_broken", "message": told, "param": None, "line": None}
        self._store.advance(id_, "failed", OPEN, problems=[problem])

    async def _work(self, batch: StoredBatch) -> None:
        if batch.status == "validating":
            batch = await asyncio.to_thread(self._validate, batch)
        if batch.status == "in_progress":
            batch = await self._answer_all(batch)
        if batch.status in ("cancelling", "finalizing"):
            await asyncio.to_thread(self._finish, batch)

    def _validate(self, batch: StoredBatch) -> StoredBatch:
        """Count the lines. Damaged ones are named in the errors file later; a file without a good line fails."""
        total, good = 0, False
        with self._store.content(batch.input).open("rb") as lines:
            for item in read_items(iter(lines), (batch.endpoint,)):
                total += 1
                good = good or isinstance(item, Item)
                if total > MOST_LINES:
                    break
        problem = None
        if total > MOST_LINES:
            problem = "too_many_requests", f"a batch has at most {MOST_LINES} lines"
        elif not good:
            problem = "no_requests", f"no line of the file is a request to {batch.endpoint}"
        if problem is None:
            self._store.count(batch.id, total, 0, 0)
            return self._store.advance(batch.id, "in_progress", ("validating",))
        told = {"code": problem[0], "message": problem[1], "param": None, "line": None}
        return self._store.advance(batch.id, "failed", ("validating",), problems=[told])

    async def _answer_all(self, batch: StoredBatch) -> StoredBatch:
        work = self._store.work(batch.id)
        expiry = _Expiry(batch, self._store)

        async def post(route: str, body: Json) -> tuple[int, str, Json]:
            return await self._post(route, body, batch.owner, expiry)

        job = Batch(
            self._store.content(batch.input), work / "output.jsonl", work / "errors.jsonl", post,
            self._concurrency, routes=(batch.endpoint,),
        )  # fmt: skip
        running = asyncio.create_task(job.run())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=self._period_s)
                batch = await self._note(batch, job.counts)
                if batch.status == "cancelling":
                    running.cancel()
                    await asyncio.wait({running})
                    return await self._note(batch, job.counts)  # what was finished meanwhile counts
            running.result()
            batch = await self._note(batch, job.counts)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        facts = {"problems": [{"code": "batch_expired", "message": "the completion window is over"}]}
        return await asyncio.to_thread(
            lambda: self._store.advance(batch.id, "finalizing", ("in_progress",), **(facts if expiry.met else {}))
        )

    async def _note(self, batch: StoredBatch, counts: Counts) -> StoredBatch:
        total = max(batch.total, counts.total)
        return await asyncio.to_thread(self._store.count, batch.id, total, counts.completed, counts.failed)

    async def _post(self, route: str, body: Json, owner: str, expiry: _Expiry) -> tuple[int, str, Json]:
        """One line. What may pass (overload, rates, lost replicas) is tried again until the window is over."""
        pause = 0.25
        while True:
            expiry.check()
            try:
                async with self._room:  # who waits for its tenant's rate takes no place meanwhile
                    id_, answer = await self._answer(route, body, owner)
            except (OverloadedError, UnavailableError) as error:
                pause = min(LONGEST_PAUSE_S, 2 * pause)
                await asyncio.sleep(min(max(pause, error.retry_after), expiry.left_s()))
            except OutriderError as error:
                return error.status, "", error_body(error)
            else:
                return 200, id_, answer

    def _finish(self, batch: StoredBatch) -> None:
        """Turn the results into files. Ids follow from the batch's, so that a crash in between does no harm."""
        facts: dict[str, str] = {}
        for name, word in (("output", "output"), ("errors", "error")):
            path = self._store.work(batch.id) / f"{name}.jsonl"
            if path.exists() and path.stat().st_size:
                id_ = f"file-{batch.id.removeprefix('batch_')}-{word}"
                self._store.add_file(batch.owner, f"{batch.id}_{word}.jsonl", "batch_output", path, id_)
                facts[name] = id_
        end: Status = "completed"
        if batch.status == "cancelling":
            end = "cancelled"
        elif batch.problems:
            end = "expired"
        self._store.advance(batch.id, end, (batch.status,), **facts)


class _Expiry:
    """The end of a batch's window."""

    def __init__(self, batch: StoredBatch, store: BatchStore) -> None:
        self._at = batch.expires
        self._store = store
        self.met = False
        """Whether a request was not begun because of it."""

    def left_s(self) -> float:
        return max(0.0, self._at - self._store.now())

    def check(self) -> None:
        """Raises ExpiredError once the window is over."""
        if self._store.now() >= self._at:
            self.met = True
            raise ExpiredError("the batch's completion window was over before this request was begun")
