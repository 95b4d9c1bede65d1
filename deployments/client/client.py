"""The Python door: `connect()` to a running application, then `generate`, `stream`, or their async forms.

from deployments import connect

client = connect("http://127.0.0.1:8000")
for result in client.generate(["One.", "Two."], max_tokens=50):
    print(result.text)
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from actors.errors import (
    ConfigError,
    InvalidSettingError,
    OutriderError,
    OverloadedError,
    PromptError,
    UnavailableError,
)
from actors.messages import Delta, GenerationRequest
from cluster.config.serve_names import ORCHESTRATOR
from deployments.client.address import DEFAULT_URL
from deployments.client.cluster_owner import refuse_others
from deployments.client.http_service import HttpService, check_ray_address
from deployments.client.journal import Journal, digest
from deployments.client.progress import Progress, progress_for
from deployments.client.request_builder import Prompt, RequestSettings, asked_of, named, request_for
from deployments.client.results import Result
from deployments.client.retrying import Retries
from deployments.ingress.service import Answering, Service

T = TypeVar("T")


def connect(target: str | None = None, *, application: str = "outrider", key: str | None = None) -> Client:
    """A client of a running application.

    target: a URL (`http://...`) for HTTP; a Ray address (`auto`, `HOST:PORT`) for a handle inside that cluster;
        None uses the Ray cluster this process is connected to, if it is, and otherwise `http://127.0.0.1:8000`.
    application: name of the Serve application (Ray only). key: API key (HTTP only).
    Raises ConfigError when a Ray cluster or its application cannot be found, and for `ray://`: Serve streams nothing
    over Ray's client.
    """
    if target is None:
        target = "auto" if _connected_to_ray() else DEFAULT_URL
    if target.startswith(("http://", "https://")):
        return Client(HttpService(target, key))
    if target.startswith("ray://"):
        raise ConfigError(f"{target}: Ray Serve streams nothing over Ray's client; use HTTP, or run inside the cluster")
    return Client(_through_ray(target, application))


class Client:
    """Generates answers, many at a time. Usable as a context manager, from any thread, and in notebooks.

    Errors that may pass (overload, lost replicas, lost connections) are tried again up to `retries` times with
    growing pauses; the seed of an item is fixed before the first try, so that trying again changes nothing.
    """

    def __init__(self, service: Service, retries: int = 5, pause_s: float = 0.5) -> None:
        self._service = service
        self._retries = Retries(retries, pause_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    # -- many -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = 64,
        errors: Literal["return", "raise"] = "return",
        progress: bool | None = None,
        journal: str | Path | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """Answers to all prompts, in their order.

        concurrency: how many are under way at once.
        errors: "return" puts an item's error into its result; "raise" raises the first one.
        progress: show a bar; by default on a terminal or in a notebook.
        journal: file that finished items are written to; a later call with the same inputs goes on from it.
        sampling: fields of SamplingSettings (temperature, max_tokens, seed, stop, ...), and `timeout_s`, `priority`.
        Raises InvalidSettingError for settings out of range or unknown; a prompt that cannot be sent is its item's
        error.
        """

        async def collect() -> list[Result]:
            results: list[Result | None] = [None] * len(prompts)
            arriving = self.agenerate(
                prompts, concurrency=concurrency, errors=errors, progress=progress, journal=journal, **sampling
            )
            async for result in arriving:
                results[result.index] = result
            return [result for result in results if result is not None]

        return self._run(collect())

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = 64,
        errors: Literal["return", "raise"] = "return",
        progress: bool | None = None,
        journal: str | Path | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[Result, None]:
        """Like `generate`, yielding results as they finish; `Result.index` tells which is which."""
        if concurrency < 1:
            raise InvalidSettingError(f"concurrency must be at least 1, not {concurrency}", "concurrency")
        if isinstance(prompts, str):
            raise InvalidSettingError("generate takes a list of prompts; for one prompt use [prompt]", "prompts")
        settings = RequestSettings.of(sampling)
        requests = [_request_or_error(settings, prompt) for prompt in prompts]
        notes = Journal(journal) if journal is not None else None
        bar = progress_for(len(requests), progress)
        try:
            async for result in self._all(requests, concurrency, notes, bar):
                if result.error is not None and errors == "raise":
                    raise result.error
                yield result
        finally:
            bar.close()
            if notes is not None:
                notes.close()

    async def _all(
        self, requests: list[GenerationRequest | PromptError], concurrency: int, journal: Journal | None, bar: Progress
    ) -> AsyncGenerator[Result, None]:
        waiting = iter(enumerate(requests))
        finished: asyncio.Queue[Result | Exception] = asyncio.Queue(maxsize=2 * concurrency)

        async def worker() -> None:
            try:
                for index, request in waiting:
                    await finished.put(await self._item(index, request, journal))
            except Exception as error:  # a journal that cannot be written
                await finished.put(error)

        workers = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(requests)))]
        try:
            for _ in requests:
                result = await finished.get()
                if isinstance(result, Exception):
                    raise result
                bar.add(result)
                yield result
        finally:
            for one in workers:
                one.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _item(self, index: int, request: GenerationRequest | PromptError, journal: Journal | None) -> Result:
        if isinstance(request, PromptError):
            return Result(index, error=request)
        asked = digest(asked_of(request)) if journal is not None else ""
        if journal is not None and (done := journal.result(index, asked)) is not None:
            return Result.from_json(done)
        result = await self._answer(index, request)
        if journal is not None and result.ok:  # what failed is tried again by the next run
            journal.add(index, asked, result.as_json())
        return result

    async def _answer(self, index: int, request: GenerationRequest) -> Result:
        """One item with its retries. Errors that will not pass are the result."""

        async def attempt() -> Result:
            result = Result(index)
            if isinstance(self._service, Answering):
                result.take(await self._service.answer(named(request)))
                return result
            async for delta in self._service.generate(named(request)):
                result.take(delta)
            return result

        try:
            return await self._retries.run(attempt, (OverloadedError, UnavailableError))
        except OutriderError as error:
            return Result(index, error=error)

    # -- one --------------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[Delta]:
        """The steps of one answer as they come. Raises the errors of actors/errors.py."""
        stream = self.astream(prompt, **sampling)
        try:
            while True:
                try:
                    yield self._run(anext(stream))
                except StopAsyncIteration:
                    return
        finally:
            self._run(stream.aclose())

    async def astream(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[Delta, None]:
        """Like `stream`, for async code."""
        answer: AsyncIterator[Delta] = self._service.generate(named(request_for(prompt, sampling)))
        try:
            async for delta in answer:
                yield delta
        finally:
            if isinstance(answer, AsyncGenerator):
                await answer.aclose()

    # -- the application ----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Tiers, replicas and load. Raises UnavailableError."""
        return self._run(self._service.status())

    def ready(self) -> bool:
        """Whether both tiers can serve."""
        return self._run(self._service.ready())

    def close(self) -> None:
        """Close the connections. What is under way ends."""
        if self._loop.is_closed():
            return
        close = getattr(self._service, "close", None)
        if close is not None:
            self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Awaitable[T]) -> T:
        """Run on the client's own loop, so that it works where another loop is running already."""

        async def awaited() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _request_or_error(settings: RequestSettings, prompt: Prompt) -> GenerationRequest | PromptError:
    """One item's prompt that cannot be sent is that item's error, and no other's."""
    try:
        return settings.request(prompt)
    except PromptError as error:
        return error


def _connected_to_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _through_ray(address: str, application: str) -> Service:
    if not _connected_to_ray():
        check_ray_address(address)
    import ray
    from ray import serve

    from deployments.orchestrator.deployment import RemoteService

    if not ray.is_initialized():
        try:
            context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"cannot reach the Ray cluster at {address}: {error}") from error
        try:
            refuse_others(address, context.address_info)
        except ConfigError:
            ray.shutdown()
            raise
    if application not in serve.status().applications:
        raise ConfigError(f"no application {application!r} is running on the Ray cluster at {address}")
    return RemoteService(serve.get_deployment_handle(ORCHESTRATOR, application))
