"""Batch files: damaged lines are named, and a job killed anywhere goes on to a complete output without duplicates."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tiny import Reciter, byte_codec

from actors.errors import ConfigError, UnavailableError
from deployments.client.batch_file import Batch, Counts
from deployments.ingress.http_app import http_app
from deployments.ingress.service import Served
from deployments.runtime.local import free_port


def line(name: str, **body: Any) -> str:
    body = {"prompt": name, "max_tokens": 3} | body
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def answer(route: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    if body["prompt"] == "refused":
        return 400, "r", {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
    if body["prompt"] == "lost":
        raise UnavailableError("gone")
    return 200, "r", {"id": "x", "choices": [{"text": body["prompt"].upper()}]}


async def test_damaged_lines_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    lines = [
        line("a"), "{", "", "[1]", json.dumps({"custom_id": "b"}), line("a"), json.dumps({"url": "/v1/completions"}),
        json.dumps({"custom_id": "c", "url": "/v1/embeddings", "body": {}}), line("s", stream=True),
        line("refused"), line("lost"), "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1"), line("z"),
    ]  # fmt: skip
    source, out, bad = tmp_path / "in", tmp_path / "out", tmp_path / "bad"
    source.write_text("\n".join(lines), encoding="latin-1")
    job = Batch(source, out, bad, answer, concurrency=3)
    assert await job.run() == Counts(total=12, completed=2, failed=10)
    answers = {it["custom_id"]: it for it in results(out)}
    assert set(answers) == {"a", "z"}
    assert answers["a"]["response"]["body"]["choices"][0]["text"] == "A"
    assert answers["a"]["response"]["status_code"] == 200
    assert answers["a"]["error"] is None
    told = results(bad)
    assert sorted(it["line"] for it in told if "line" in it) == [2, 4, 5, 6, 7, 8, 9, 12]
    assert all(f"line {it['line']}" in it["error"]["message"] for it in told if "line" in it)
    assert {it["custom_id"]: it["error"]["message"] for it in told if "line" not in it} == {
        "refused": "no",
        "lost": "gone",
    }
    again = await Batch(source, out, bad, answer).run()
    assert again == Counts(total=12, completed=2, failed=10, resumed=11)  # "lost" may pass, and was asked again
    assert (len(results(out)), len(results(bad))) == (2, 10)


async def test_what_failed_for_passing_reasons_is_asked_again(tmp_path: Path) -> None:
    """Down, full, broken, late and refused; then the server is back: only what it refused for good stays failed."""
    source, out, bad = tmp_path / "in", tmp_path / "out", tmp_path / "bad"
    source.write_text("\n".join([*map(line, ("down", "full", "broken", "late", "refused", "fine")), "{"]))
    statuses = {"full": 429, "broken": 500, "late": 504}
    asked: list[str] = []

    async def failing(route: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        name = body["prompt"]
        if name == "down":
            raise UnavailableError("cannot be reached")
        if name in statuses:
            return statuses[name], "r", {"error": {"message": "no", "type": "t", "param": None, "code": None}}
        return await answer(route, body)

    async def recovered(route: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        asked.append(body["prompt"])
        return await answer(route, body)

    assert await Batch(source, out, bad, failing).run() == Counts(total=7, completed=1, failed=6)
    assert await Batch(source, out, bad, recovered).run() == Counts(total=7, completed=5, failed=2, resumed=3)
    assert sorted(asked) == ["broken", "down", "full", "late"]
    assert {it["custom_id"] for it in results(out)} == {"down", "full", "broken", "late", "fine"}
    assert [it["custom_id"] for it in results(bad)] == ["refused", None]
    assert not bad.with_name("bad.part").exists()


async def test_text_that_cannot_be_sent_is_its_line_s_error(tmp_path: Path) -> None:
    half, name = '{"prompt": "\\ud83d"}', '"custom_id": "%s", "url": "/v1/completions", "body": %s'
    bodies = [
        ("a", half),
        ("\\udc00", "{}"),
        ("b", '{"top_p": NaN}'),
        ("c", '{"top_p": 1e999}'),
        ("d", '{"prompt": "d"}'),
    ]
    source, out, bad = tmp_path / "in", tmp_path / "out", tmp_path / "bad"
    source.write_text("\n".join("{" + name % pair + "}" for pair in bodies))
    for resumed in (0, 5):
        counts = await Batch(source, out, bad, answer).run()
        assert counts == Counts(total=5, completed=1, failed=4, resumed=resumed)
    assert [it["custom_id"] for it in results(out)] == ["d"]
    assert [(it["line"], it["error"]["code"]) for it in results(bad)] == [(n, "invalid_line") for n in (1, 2, 3, 4)]


async def test_an_answer_with_half_a_surrogate_pair_is_kept_as_it_came(tmp_path: Path) -> None:
    async def odd(route: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        return 200, "r", {"choices": [{"text": "\ud83d"}]}

    (tmp_path / "in").write_text(line("a"))
    assert (await Batch(tmp_path / "in", tmp_path / "out", tmp_path / "bad", odd).run()).completed == 1
    assert results(tmp_path / "out")[0]["response"]["body"]["choices"][0]["text"] == "\ud83d"


async def test_a_line_cut_short_is_done_again(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(i)) for i in range(10)))
    await Batch(source, out, tmp_path / "bad", answer).run()
    whole = out.read_bytes()
    for cut in random.Random(1).sample(range(len(whole)), 20):
        out.write_bytes(whole[:cut])
        counts = await Batch(source, out, tmp_path / "bad", answer).run()
        assert counts.completed == 10
        assert sorted(int(it["custom_id"]) for it in results(out)) == list(range(10))


async def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    source, other = tmp_path / "in", tmp_path / "other"
    source.write_text(line("a"))
    other.write_text("hello\n")
    with pytest.raises(ConfigError, match="cannot read"):
        await Batch(tmp_path / "none", tmp_path / "out", tmp_path / "bad", answer).run()
    with pytest.raises(ConfigError, match="line 1"):
        await Batch(source, other, tmp_path / "bad", answer).run()
    assert other.read_text() == "hello\n"


@pytest.fixture
def server() -> Iterator[str]:
    codec = byte_codec()
    port = free_port()
    app = http_app(Reciter(codec), codec, Served("tiny", context=64))
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none"))
    thread = threading.Thread(target=running.run)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(20)


def test_a_job_killed_again_and_again_is_complete_in_the_end(tmp_path: Path, server: str) -> None:
    """kill -9 after a random number of results, until it is through: 400 items, each exactly once."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"item-{i}", **({"n": 0} if i == 7 else {})) for i in range(400)))
    command = [sys.executable, "-m", "deployments.cli.main", "batch", str(source), str(out), "--url", server, "--json"]
    luck = random.Random(3)
    for attempt in range(30):
        job = subprocess.Popen([*command, "--concurrency", "8"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wanted = (len(out.read_bytes().splitlines()) if out.exists() else 0) + luck.randint(20, 120)
        while job.poll() is None:
            if attempt < 29 and out.exists() and len(out.read_bytes().splitlines()) >= wanted:
                job.send_signal(signal.SIGKILL)
                break
        counts, told = job.communicate(timeout=60)
        if job.returncode == 1:
            assert json.loads(counts).items() >= {"total": 400, "completed": 399, "failed": 1}.items()
            assert b"399 answered, 1 failed, of 400" in told
            break
        assert job.returncode == -signal.SIGKILL, told
    assert attempt >= 2  # it was killed on the way
    assert sorted(it["custom_id"] for it in results(out)) == sorted(f"item-{i}" for i in range(400) if i != 7)
    (failed,) = results(out.with_name("out.jsonl.errors"))
    assert (failed["custom_id"], failed["error"]["param"]) == ("item-7", "n")
