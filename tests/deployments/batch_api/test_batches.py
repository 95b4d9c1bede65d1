"""`/v1/files` and `/v1/batches` through the official client: what is begun is finished, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from tiny import Reciter, byte_codec

from actors.errors import OverloadedError, PromptError, PromptTooLongError
from actors.messages import Delta, GenerationRequest
from deployments.batch_api.routes import BatchLimits
from deployments.batch_api.store import BatchStore
from deployments.batch_api.worker import Batches
from deployments.ingress.auth import KeyRing, key_hash, new_key
from deployments.ingress.http_app import http_app
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.service import Served

CODEC = byte_codec()
ENDPOINT = "/v1/completions"
ENDS = ("completed", "failed", "expired", "cancelled")


def lines(names: list[str], **body: Any) -> bytes:
    def line(name: str) -> str:
        asked = {"prompt": name, "max_tokens": 3, **body}
        return json.dumps({"custom_id": name, "method": "POST", "url": ENDPOINT, "body": asked})

    return "\n".join(map(line, names)).encode()


class Stopping(Reciter):
    """Answers `allowed` requests and then none."""

    allowed = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if len(self.requests) >= self.allowed:
            await asyncio.Event().wait()
        async for delta in super().generate(request):
            yield delta


@asynccontextmanager
async def client_of(
    folder: Path, service: Reciter, gate: RequestGate | None = None, key: str = "none", **limits: int
) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of an application that runs until the context ends."""
    app = http_app(
        service, CODEC, Served("tiny", context=64), gate=gate, batch_folder=folder, batch_limits=BatchLimits(**limits)
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0) as client,
    ):
        yield client


async def begin(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"job": "x"}, **more
    )


async def until(client: openai.AsyncOpenAI, batch: Any, *statuses: str) -> Any:
    """The test's own time limit bounds the wait."""
    while batch.status not in statuses:
        await asyncio.sleep(0.01)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    """Damaged and refused lines are in the errors file, named; the rest is answered."""
    content = lines(["a", "b"]) + b"\n{broken\n" + lines(["c"], temperature=-1) + b"\n" + lines(["a"])
    service = Reciter(CODEC)
    async with client_of(tmp_path, service) as client:
        batch = await begin(client, content)
        assert (batch.object, batch.endpoint, batch.metadata) == ("batch", ENDPOINT, {"job": "x"})
        assert batch.expires_at == batch.created_at + 86_400
        done = await until(client, batch, *ENDS)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 2, 3)
        answers = {one["custom_id"]: one for one in await results(client, done.output_file_id)}
        assert set(answers) == {"a", "b"}
        assert answers["a"]["response"]["status_code"] == 200
        assert answers["a"]["response"]["body"]["choices"][0]["text"] == "Hel"
        problems = await results(client, done.error_file_id)
        assert sorted(one["line"] for one in problems if "line" in one) == [3, 5]
        (refused,) = (one for one in problems if "line" not in one)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("c", 400)
        assert refused["error"]["param"] == "temperature"
        assert {request.priority for request in service.requests} == {-10}
        for at in (done.in_progress_at, done.finalizing_at, done.completed_at):
            assert at >= done.created_at
        assert (await client.files.retrieve(done.output_file_id)).purpose == "batch_output"
        while list((tmp_path / "work").iterdir()):  # bounded by the test's time limit
            await asyncio.sleep(0.01)


async def test_a_batch_of_conversations(tmp_path: Path) -> None:
    class Strict(Reciter):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            if request.messages == ({"role": "user", "content": "long"},):
                raise PromptTooLongError("too long", "prompt")
            async for delta in super().generate(request):
                yield delta

    route = "/v1/chat/completions"
    asked = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"messages": [{"role": "user", "content": name}]}}
        for name, url in (("a", route), ("long", route), ("elsewhere", ENDPOINT))
    ]
    async with client_of(tmp_path, Strict(CODEC)) as client:
        content = "\n".join(map(json.dumps, asked)).encode()
        file = await client.files.create(file=("in", content), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=route, completion_window="24h")
        done = await until(client, batch, *ENDS)
        (answer,) = await results(client, done.output_file_id)
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello wörld"
        problems = {one["custom_id"]: one["error"] for one in await results(client, done.error_file_id)}
        assert problems["long"]["param"] == "messages"
        assert problems["elsewhere"]["param"] == "url"


async def test_files(tmp_path: Path) -> None:
    async with client_of(tmp_path, Reciter(CODEC)) as client:
        made = [await client.files.create(file=(f"{i}.jsonl", b"x" * i), purpose="batch") for i in range(1, 6)]
        assert [(file.filename, file.bytes) for file in made] == [(f"{i}.jsonl", i) for i in range(1, 6)]
        assert [file.id async for file in client.files.list(limit=2)] == [file.id for file in reversed(made)]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == [file.id for file in made]
        assert [file.id async for file in client.files.list(purpose="assistants")] == []
        assert (await client.files.content(made[2].id)).content == b"xxx"
        assert (await client.files.delete(made[2].id)).deleted
        with pytest.raises(openai.NotFoundError) as missing:
            await client.files.retrieve(made[2].id)
        assert (missing.value.code, missing.value.param) == ("not_found", "file_id")


async def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(40)]
    stopping = Stopping(CODEC)
    stopping.allowed = 17
    async with client_of(tmp_path, stopping, concurrency=4) as client:
        batch = await begin(client, lines(names))
        while len(stopping.requests) < 17 or stopping.open:
            await asyncio.sleep(0.01)
    again = Reciter(CODEC)
    async with client_of(tmp_path, again) as client:
        done = await until(client, batch, *ENDS)
        assert (done.status, done.request_counts.completed) == ("completed", 40)
        assert sorted(one["custom_id"] for one in await results(client, done.output_file_id)) == sorted(names)
        assert len(again.requests) == 40 - 17
        assert [one.id async for one in client.batches.list()] == [batch.id]


async def test_two_processes_share_the_work_and_no_line(tmp_path: Path) -> None:
    one, other = Reciter(CODEC), Reciter(CODEC)
    async with client_of(tmp_path, one) as client, client_of(tmp_path, other) as second:
        batches = [await begin(client if i % 2 else second, lines([f"{i}-{j}" for j in range(20)])) for i in range(6)]
        for batch in batches:
            done = await until(second, batch, *ENDS)
            assert (done.status, done.request_counts.completed) == ("completed", 20)
        assert sorted(request.text or "" for request in one.requests + other.requests) == sorted(
            f"{i}-{j}" for i in range(6) for j in range(20)
        )


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    stopping = Stopping(CODEC)
    stopping.allowed = 5
    async with client_of(tmp_path, stopping, concurrency=2) as client:
        batch = await begin(client, lines([str(i) for i in range(20)]))
        while len(stopping.requests) < 5 or stopping.open:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.ConflictError) as reading:
            await client.files.delete(batch.input_file_id)
        assert reading.value.code == "conflict"
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await until(client, batch, *ENDS)
        assert done.status == "cancelled"
        assert len(await results(client, done.output_file_id)) == done.request_counts.completed == 5
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        await client.files.delete(batch.input_file_id)


async def test_what_passes_is_tried_again_and_what_does_not_is_told(tmp_path: Path) -> None:
    class Moody(Reciter):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            if len(self.requests) < 2:
                self.requests.append(request)
                full = OverloadedError("full")
                full.retry_after = 0.0
                raise full
            if request.text == "bad":
                raise PromptError("no", "prompt")
            async for delta in super().generate(request):
                yield delta

    async with client_of(tmp_path, Moody(CODEC)) as client:
        done = await until(client, await begin(client, lines(["good", "bad"])), *ENDS)
        assert [one["custom_id"] for one in await results(client, done.output_file_id)] == ["good"]
        (problem,) = await results(client, done.error_file_id)
        assert (problem["custom_id"], problem["error"]["code"]) == ("bad", "invalid_prompt")


async def test_keys_own_their_files(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("one", "two")}
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [{"name": n, "sha256": key_hash(k)} for n, k in keys.items()]}))
    gate = RequestGate(KeyRing(file, time.monotonic))
    folder = tmp_path / "store"
    service = Reciter(CODEC)
    async with (
        client_of(folder, service, gate, keys["one"]) as one,
        client_of(folder, service, gate, keys["two"]) as two,
        client_of(folder, service, gate, "wrong") as nobody,
    ):
        batch = await until(one, await begin(one, lines(["a"])), *ENDS)
        attempts: list[Callable[[openai.AsyncOpenAI], Any]] = [
            lambda it: it.files.retrieve(batch.input_file_id),
            lambda it: it.files.content(batch.output_file_id),
            lambda it: it.files.delete(batch.output_file_id),
            lambda it: it.batches.retrieve(batch.id),
            lambda it: it.batches.cancel(batch.id),
            lambda it: it.batches.create(input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                await attempt(two)
            with pytest.raises(openai.AuthenticationError):
                await attempt(nobody)
        assert [it async for it in two.files.list()] == [it async for it in two.batches.list()] == []
        assert len([it async for it in one.files.list()]) == 2


async def test_refusals_name_the_parameter(tmp_path: Path) -> None:
    service = Stopping(CODEC)
    async with client_of(tmp_path, service, file_bytes=2000, held_bytes=3000, open=1) as client:
        file = await client.files.create(file=("in", lines(["a"])), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        for change, param in (
            ({"completion_window": "soon"}, "completion_window"),
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"input_file_id": 5}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.batches.create(**good | change)  # type: ignore[arg-type]
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(**good | {"input_file_id": "file-x"})  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as purpose:
            await client.files.create(file=("in", b"x"), purpose="fine-tune")
        assert purpose.value.param == "purpose"
        for size, sent in ((2500, 0), (1900, 1), (1900, 2)):  # too long; fits; more than a key may hold
            if sent == 1:
                await client.files.create(file=("in", b"x" * 1000), purpose="batch")
                continue
            with pytest.raises(openai.APIStatusError) as large:
                await client.files.create(file=("in", b"x" * size), purpose="batch")
            assert (large.value.status_code, large.value.code) == (413, "request_too_large")
        await client.batches.create(**good)  # type: ignore[arg-type]
        with pytest.raises(openai.RateLimitError) as busy:
            await client.batches.create(**good)  # type: ignore[arg-type]
        assert busy.value.response.headers["retry-after"] == "60"
        for name in ("after", "limit"):
            with pytest.raises(openai.APIStatusError) as listed:
                await client.get("/batches", options={"params": {name: "nonsense"}}, cast_to=object)
            assert listed.value.status_code in (400, 404)
            assert listed.value.param == name


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "application/json"}, b"{}", 415),
        ({"content-type": "multipart/form-data"}, b"", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, b"nonsense", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x--\r\n", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x\r\n\r\nno name\r\n--x--\r\n", 400),
    ],
)
async def test_bad_uploads(tmp_path: Path, headers: dict[str, str], body: bytes, status: int) -> None:
    async with client_of(tmp_path, Reciter(CODEC)) as client:
        got = await client._client.post("http://test/v1/files", content=body, headers=headers)
        assert got.status_code == status
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_folder_that_cannot_be_used_costs_these_routes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "batches.sqlite").write_bytes(b"no database, " * 1000)
    for folder in (tmp_path / "file", broken):
        async with client_of(folder, Reciter(CODEC)) as client:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.files.create(file=("in", b"x"), purpose="batch")
            assert (refused.value.status_code, refused.value.code) == (503, "unavailable")
            assert (await client.completions.create(model="tiny", prompt="x")).choices[0].text
        assert str(folder) in caplog.text


async def test_a_file_without_a_request_fails(tmp_path: Path) -> None:
    async with client_of(tmp_path, Reciter(CODEC)) as client:
        for content in (b"", b"nonsense\n{}\n"):
            done = await until(client, await begin(client, content), *ENDS)
            assert done.status == "failed"
            assert done.errors is not None
            assert [problem.code for problem in done.errors.data or ()] == ["no_requests"]


async def test_an_expired_batch_says_which_lines_were_not_begun(tmp_path: Path) -> None:
    now = [1000.0]
    store = BatchStore(tmp_path, clock=lambda: now[0])

    async def answer(route: str, body: dict[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
        now[0] += 1000  # the fourth would begin after the hour
        return "id", {"choices": []}

    (tmp_path / "in").write_bytes(lines([str(i) for i in range(6)]))
    file = store.add_file("me", "in", "batch", tmp_path / "in")
    batch = store.add_batch("me", ENDPOINT, file.id, "1h", 3600, {})
    worker = Batches(store, answer, concurrency=1)
    worker.start()
    while store.batch(batch.id).status not in ENDS:
        await asyncio.sleep(0.01)
    await worker.stop()
    done = store.batch(batch.id)
    assert (done.status, done.completed, done.failed) == ("expired", 4, 2)
    assert done.errors is not None
    told = [json.loads(line) for line in store.content(done.errors).read_text().splitlines()]
    assert [one["error"]["code"] for one in told] == ["batch_expired"] * 2
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_server_killed_at_random_points_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """SIGKILL after 5 to 60 lines, five times over; the last server finishes. Every line has exactly one result."""
    names = [f"n{i}" for i in range(300)]
    store = BatchStore(tmp_path)
    (tmp_path / "in").write_bytes(lines(names))
    file = store.add_file("anyone", "in", "batch", tmp_path / "in")
    batch = store.add_batch("anyone", ENDPOINT, file.id, "24h", 86_400, {})
    output = store.work(batch.id) / "output.jsonl"
    store.close()
    context, rng = multiprocessing.get_context("fork"), random.Random(6)
    kills = 0
    for _ in range(5):
        process = context.Process(target=_work, args=(tmp_path,))
        process.start()
        enough = _count(output) + rng.randrange(5, 60)
        while process.is_alive() and _count(output) < enough:
            time.sleep(0.001)
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills == 5
    last = context.Process(target=_work, args=(tmp_path,))
    last.start()
    last.join()
    store = BatchStore(tmp_path)
    done = store.batch(batch.id)
    assert (done.status, done.completed, done.failed) == ("completed", 300, 0)
    assert done.output is not None
    told = [json.loads(line)["custom_id"] for line in store.content(done.output).read_text().splitlines()]
    assert sorted(told) == sorted(names)
    store.close()


def _work(folder: Path) -> None:
    """A server's worker, until everything is done."""

    async def answer(route: str, body: dict[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0.002)
        return "id", {"choices": [{"text": body["prompt"]}]}

    async def run() -> None:
        store = BatchStore(folder)
        worker = Batches(store, answer, concurrency=4)
        worker.start()
        while await asyncio.to_thread(store.unfinished):
            await asyncio.sleep(0.005)
        await worker.stop()
        store.close()

    asyncio.run(run())


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def test_a_line_that_nobody_can_answer_is_that_lines_error(tmp_path: Path) -> None:
    """Half a surrogate pair in a prompt, an id, a model; a number that JSON does not have: once each, and the rest."""

    def line(custom_id: str, **body: Any) -> bytes:
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}).encode()

    content = [
        line("good", prompt="x", max_tokens=3),
        line("prompt", prompt="x \ud83d y"),
        line("id \ud83d", prompt="x"),
        line("model", prompt="x", model="m\ud83d"),
        line("nan", prompt="x", temperature=float("nan")),
    ]
    async with client_of(tmp_path, Reciter(CODEC)) as client:
        done = await until(client, await begin(client, b"\n".join(content)), *ENDS)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 1, 4)
        assert sorted(one["line"] for one in await results(client, done.error_file_id)) == [2, 3, 4, 5]


async def test_an_error_that_nobody_had_foreseen_is_its_lines_alone(tmp_path: Path) -> None:
    class Breaking(Reciter):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            if request.text == "b":
                raise ZeroDivisionError("of the service")
            async for delta in super().generate(request):
                yield delta

    async with client_of(tmp_path, Breaking(CODEC)) as client:
        done = await until(client, await begin(client, lines(["a", "b", "c"])), *ENDS)
        assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
        (broken,) = await results(client, done.error_file_id)
        assert broken["custom_id"] == "b"


async def test_a_batch_that_cannot_go_on_fails_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Batches, batch: object) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(Batches, "_validate", broken)
    store = BatchStore(tmp_path)
    file = store.add_file("", "in", "batch", _file(tmp_path, lines(["a"])))
    batch = store.add_batch("", ENDPOINT, file.id, "24h", 86_400, {})
    worker = Batches(store, _unused, period_s=0.001)
    worker.start()
    while store.batch(batch.id).status != "failed":  # bounded by the test's time limit
        await asyncio.sleep(0.001)
    await worker.stop()
    (problem,) = store.batch(batch.id).problems
    assert problem["code"] == "batch_broken"
    assert "KeyError: 'a fault of ours'" in problem["message"]
    store.close()


async def test_who_waits_for_a_rate_takes_nobodys_place(tmp_path: Path) -> None:
    """One place, and a tenant that is always told to come back: the other tenant's line is answered all the same."""
    answered = asyncio.Event()

    async def answer(route: str, body: dict[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
        if owner == "limited":
            error = OverloadedError("too many")
            error.retry_after = 3600.0
            raise error
        answered.set()
        return "id", {}

    store = BatchStore(tmp_path)
    for owner in ("limited", "free"):
        file = store.add_file(owner, "in", "batch", _file(tmp_path, lines(["a"])))
        store.add_batch(owner, ENDPOINT, file.id, "24h", 86_400, {})
    worker = Batches(store, answer, concurrency=1, period_s=0.001)
    worker.start()
    await answered.wait()  # bounded by the test's time limit
    await worker.stop()
    store.close()


def test_what_clients_hand_in_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "store")
    store.add_file("", "in", "batch", _file(tmp_path, b"x"))
    store.close()
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    assert (tmp_path / "store" / "batches.sqlite").stat().st_mode & 0o077 == 0


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "content"
    path.write_bytes(content)
    return path


async def _unused(route: str, body: dict[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
    raise AssertionError("nothing is asked")


def test_closing_waits_for_what_another_thread_has_begun(tmp_path: Path) -> None:
    """SQLite ends the process if it is closed in the middle of a statement."""
    store = BatchStore(tmp_path)
    inside, may_end = threading.Event(), threading.Event()

    def change() -> None:
        with store._transaction() as database:
            inside.set()
            may_end.wait()
            database.execute("SELECT 1")

    changing, closing = threading.Thread(target=change), threading.Thread(target=store.close)
    changing.start()
    inside.wait()
    closing.start()
    may_end.set()
    changing.join()
    closing.join()
    with pytest.raises(sqlite3.ProgrammingError):
        store.held_bytes("")
