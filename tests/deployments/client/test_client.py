"""The Python client: over a service directly, and over HTTP to the door of the same service."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny import Reciter, byte_codec

from actors.errors import (
    ConfigError,
    EngineError,
    InvalidSettingError,
    OverloadedError,
    PromptError,
    PromptTooLongError,
    UnavailableError,
)
from actors.messages import Delta, GenerationRequest, Usage
from deployments.client.client import Client, connect
from deployments.client.http_service import HttpService, check_ray_address, error_from
from deployments.client.journal import Journal
from deployments.client.progress import Lines
from deployments.client.results import Result
from deployments.ingress.http_app import http_app
from deployments.ingress.service import Served

CODEC = byte_codec()


@pytest.fixture(params=["handle", "http"])
def client(request: pytest.FixtureRequest) -> Iterator[tuple[Client, Reciter]]:
    reciter = Reciter(CODEC)
    if request.param == "handle":
        with Client(reciter, pause_s=0) as client:
            yield client, reciter
        return
    app = http_app(reciter, CODEC, Served("tiny", context=64))
    with Client(HttpService("http://test/v1", transport=httpx.ASGITransport(app)), pause_s=0) as client:
        yield client, reciter


def test_results_come_in_order_with_everything(client: tuple[Client, Reciter]) -> None:
    got, reciter = client
    results = got.generate(
        ["a", "b", [{"role": "user", "content": "c"}], [5, 6]], logprobs=2, max_tokens=7, margins=True
    )
    assert [result.index for result in results] == [0, 1, 2, 3]
    first = results[0]
    assert (first.text, first.finish) == ("Hello w", "length")
    assert first.tokens == list(CODEC.encode("Hello w"))
    assert first.texts == list("Hello w")
    assert first.origins[:3] == ["accepted", "accepted", "correction"]
    assert first.logprobs[0].logprob == -first.tokens[0] / 100
    assert first.logprobs[0].top == ((2, -3.0), (3, -4.0))
    assert first.margins == [0.5] * 7
    assert first.usage == Usage(7, 7, 9, 6, 4, 2, 1)
    assert first.acceptance_length == 7 / 4
    sent = {(r.text, r.tokens) for r in reciter.requests}
    assert sent == {("a", None), ("b", None), (None, None), (None, (5, 6))}
    assert len({request.id for request in reciter.requests}) == 4


def test_stream_and_stop(client: tuple[Client, Reciter]) -> None:
    got, reciter = client
    deltas = list(got.stream("a", stop="wör", max_tokens=50))
    assert "".join(delta.text for delta in deltas) == "Hello "
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", "wör")
    half = got.stream("a", max_tokens=50)
    next(half)
    half.close()
    assert reciter.open == 0


def test_an_item_s_error_is_its_result(client: tuple[Client, Reciter]) -> None:
    got, reciter = client
    reciter.refusal = PromptTooLongError("too long", "prompt")
    results = got.generate(["a", "b"])
    assert [type(result.error) for result in results] == [PromptTooLongError] * 2
    assert not results[0].ok
    assert len(reciter.requests) == 2  # what will not pass is not tried again
    with pytest.raises(PromptError):
        got.generate(["a"], errors="raise")


def test_overload_is_tried_again_and_then_typed() -> None:
    reciter = Reciter(CODEC)
    refusal = OverloadedError("full")
    refusal.retry_after = 0
    reciter.refusal = refusal
    with Client(reciter, retries=3, pause_s=0) as client:
        result = client.generate(["a"])[0]
    assert isinstance(result.error, OverloadedError)
    assert len(reciter.requests) == 4
    assert len({request.sampling.seed for request in reciter.requests}) == 1
    assert len({request.id for request in reciter.requests}) == 4


@pytest.mark.parametrize(
    ("settings", "param", "told"),
    [
        ({"temprature": 1}, "temprature", "temprature: there is no such setting; did you mean temperature?"),
        ({"top_p": 7}, "top_p", "top_p: Input should be less than or equal to 1"),
        ({"concurrency": 0}, "concurrency", "concurrency"),
    ],
)
def test_settings_are_checked_before_anything_is_sent(settings: dict[str, int], param: str, told: str) -> None:
    with Client(Reciter(CODEC)) as client, pytest.raises(InvalidSettingError) as caught:
        client.generate(["a"], **settings)
    assert caught.value.param == param
    assert told in str(caught.value)


def test_rays_own_client_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="use HTTP, or run inside the cluster"):
        connect("ray://127.0.0.1:10001")


def test_an_address_that_is_no_ray_clusters_is_refused_at_once() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        try:
            with pytest.raises(ConfigError, match=f"say http://{address}"):
                check_ray_address(address)
        finally:
            server.shutdown()
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_ray_address(address)
    with pytest.raises(ConfigError, match="neither a URL"):
        check_ray_address("127.0.0.1:port")


def test_a_cluster_that_is_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def get(url: str, **options: object) -> None:
        tries.append(url)
        raise httpx.ConnectError("refused") if len(tries) < 3 else httpx.RemoteProtocolError("not HTTP")

    monkeypatch.setattr(httpx, "get", get)
    check_ray_address("127.0.0.1:6379", patience_s=30.0)
    assert tries == ["http://127.0.0.1:6379/"] * 3


def test_a_prompt_that_cannot_be_sent_is_its_own_error_only(client: tuple[Client, Reciter]) -> None:
    got, reciter = client
    bad: list[Any] = ["half \ud83d", [{"role": "user", "content": "\udfff"}], [{"content": float("nan")}], [1, "x"]]
    results = got.generate(["a", *bad, "b"], max_tokens=5)
    assert [result.ok for result in results] == [True, False, False, False, False, True]
    assert [result.text for result in results if result.ok] == ["Hello"] * 2
    assert all(isinstance(result.error, PromptError) for result in results if not result.ok)
    assert ["U+D83D" in str(results[1].error), "U+DFFF" in str(results[2].error)] == [True, True]
    assert len(reciter.requests) == 2
    with pytest.raises(PromptError):
        list(got.stream("half \ud83d"))


def test_one_text_is_no_list_of_prompts() -> None:
    with Client(Reciter(CODEC)) as client, pytest.raises(InvalidSettingError, match=r"\[prompt\]"):
        client.generate("a")  # type: ignore[arg-type]


async def test_async_use_and_bounded_window() -> None:
    reciter = Reciter(CODEC, held=asyncio.Event())
    client = Client(reciter)
    arriving = client.agenerate([str(i) for i in range(10)], concurrency=3)
    first = asyncio.ensure_future(anext(arriving))
    while len(reciter.requests) < 3:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert reciter.open == 3
    assert len(reciter.requests) == 3
    reciter.held.set()  # type: ignore[union-attr]
    results = [await first, *[result async for result in arriving]]
    assert sorted(result.index for result in results) == list(range(10))
    client.close()


def test_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    reciter = Reciter(CODEC)
    with Client(reciter) as client:
        whole = client.generate(["a", "b", "c"], journal=path, temperature=0)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    path.write_bytes(lines[0] + lines[1] + lines[2][:20])  # killed in the middle of the third
    again = Reciter(CODEC)
    with Client(again) as client:
        resumed = client.generate(["a", "b", "c"], journal=path, temperature=0)
    assert [r.as_json() for r in resumed] == [r.as_json() for r in whole]
    assert len(again.requests) == 1
    assert sorted(json.loads(line)["index"] for line in path.read_text().splitlines()) == [0, 1, 2]


def test_a_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    with Client(Reciter(CODEC)) as client:
        client.generate(["a"], journal=path)
        with pytest.raises(ConfigError, match="another job"):
            client.generate(["b"], journal=path)
        (tmp_path / "text").write_text("hello\n")
        with pytest.raises(ConfigError, match="line 1"):
            client.generate(["b"], journal=tmp_path / "text")
    journal = Journal(tmp_path / "new" / "j")
    assert journal.result(0, "x") is None
    journal.close()


def test_failed_items_are_not_in_the_journal(tmp_path: Path) -> None:
    reciter = Reciter(CODEC, refusal=PromptError("no", "prompt"))
    with Client(reciter) as client:
        client.generate(["a"], journal=tmp_path / "j")
        reciter.refusal = None
        assert client.generate(["a"], journal=tmp_path / "j")[0].ok


@pytest.mark.parametrize("cut", [0, 1])
async def test_a_connection_that_ends_early_is_no_answer(cut: int) -> None:
    async def truncated() -> AsyncIterator[bytes]:
        token = {"id": 1, "text": "x", "origin": "plain"}
        yield f"data: {json.dumps({'choices': [{'speculation': {'tokens': [token]}}]})}\n\n".encode()

    def answer(request: httpx.Request) -> httpx.Response:
        if cut:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=truncated())

    client = Client(HttpService("http://test", transport=httpx.MockTransport(answer)), retries=0)
    with pytest.raises(UnavailableError):
        async for _ in client.astream("a"):
            pass
    async for result in client.agenerate(["a"]):  # asked as a whole: what comes is no answer at all
        assert isinstance(result.error, UnavailableError if cut else EngineError)
    client.close()


def test_errors_come_back_typed() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": "p", "code": "context_length_exceeded"}}'
    error = error_from(400, body, httpx.Headers())
    assert (type(error), error.param, str(error)) == (PromptTooLongError, "p", "m")
    error = error_from(503, b"<html>", httpx.Headers({"retry-after": "7"}))
    assert isinstance(error, UnavailableError)
    assert error.retry_after == 7


def test_result_round_trips() -> None:
    result = Result(3)
    result.take(Delta((1,), ("x",), ("plain",), finish="stop", usage=Usage(1, 1)))
    result.error = PromptError("m", "prompt")
    back = Result.from_json(json.loads(json.dumps(result.as_json())))
    assert isinstance(back.error, PromptError)
    assert back.as_json() == result.as_json()


def test_progress_in_a_log() -> None:
    out, now = io.StringIO(), [0.0]
    lines = Lines(4, out, clock=lambda: now[0])
    for moment in (1.0, 12.0):
        now[0] = moment
        lines.add(Result(0, usage=Usage(completion_tokens=60, passes=20)))
    lines.close()
    assert out.getvalue().splitlines() == ["2/4, 10 tokens/s, acceptance length 3.00, 12 s left"] * 2


async def test_closing_early_cancels_what_is_under_way() -> None:
    reciter = Reciter(CODEC, held=asyncio.Event())
    client = Client(reciter)
    stream = client.astream("a", max_tokens=50)
    await anext(stream)
    assert reciter.open == 1
    await stream.aclose()
    assert reciter.open == 0
    assert isinstance(reciter.requests[0], GenerationRequest)
    client.close()
