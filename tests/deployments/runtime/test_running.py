"""The doors of running applications: Ray Serve, HTTP, the official client, actors that die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import yaml

from deployments.client.client import Client, connect
from deployments.client.results import Result
from deployments.runtime.local import free_port

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are not ours to fix

EMULATED: dict[str, Any] = {
    "model_id": "emulated",
    "target": {"engine": "emulated", "model": "emulated:reference"},
    "draft": {"kind": "emulated", "model": "emulated:reference"},
}
PROMPTS = [f"prompt number {i} " * (1 + i % 4) for i in range(20)]


@pytest.fixture
def client(emulated_url: str) -> Iterator[Client]:
    with connect(emulated_url) as client:
        yield client


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Polls; the limit only bounds a failure."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def tokens_of(results: list[Result]) -> list[list[int]]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.tokens for result in results]


def replicas(client: Client, tier: str) -> set[str]:
    status: Any = client.status()
    return set(status[tier]["replicas"])


def test_speculation_changes_nothing(client: Client) -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
        fast = client.generate(PROMPTS, max_tokens=40, **sampling)
        plain = client.generate(PROMPTS, max_tokens=40, speculation=False, **sampling)
        assert tokens_of(fast) == tokens_of(plain)
        assert sum(result.usage.accepted_tokens for result in fast) > 0
        assert sum(result.usage.proposed_tokens for result in plain) == 0


@pytest.mark.parametrize("tier", ["draft", "target"])
def test_an_actor_killed_in_the_middle_costs_no_token(client: Client, tier: str) -> None:
    """All 20 streams finish with the tokens they would have had; the replica then replaces its actor."""
    import ray

    from deployments.tiers.actor_discovery import NAMESPACE

    expected = tokens_of(client.generate(PROMPTS, max_tokens=60, temperature=0.0))
    (victim,) = replicas(client, tier)
    started = threading.Barrier(len(PROMPTS) + 1)
    got: dict[int, list[int]] = {}

    def one(index: int) -> None:
        tokens: list[int] = []
        for delta in client.stream(PROMPTS[index], max_tokens=60, temperature=0.0):
            if not tokens:
                started.wait(60)
            tokens += delta.tokens
        got[index] = tokens

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    started.wait(60)
    ray.kill(ray.get_actor(victim, namespace=NAMESPACE))
    for thread in threads:
        thread.join(90)
    assert [got.get(index) for index in range(len(PROMPTS))] == expected
    assert eventually(lambda: bool(replicas(client, tier)) and victim not in replicas(client, tier))


def test_a_client_that_goes_frees_both_tiers(client: Client, emulated_url: str) -> None:
    def idle() -> bool:
        status: Any = client.status()
        held = [r["sequences"] for tier in ("target", "draft") for r in status[tier]["replicas"].values()]
        return status["sessions"] == 0 and not any(held)

    body = {"prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{emulated_url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: dropping it would close the connection
        next(lines)
        assert not idle()
    assert eventually(idle, 20)


def test_through_a_ray_handle(emulated_url: str, client: Client) -> None:
    with connect("auto", application="emulated") as handle:
        results = handle.generate(PROMPTS[:5], max_tokens=20, temperature=0.0)
        assert tokens_of(results) == tokens_of(client.generate(PROMPTS[:5], max_tokens=20, temperature=0.0))
        assert handle.ready()
        error = handle.generate(["x " * 5000])[0].error
        assert error is not None
        assert type(error).__name__ == "PromptTooLongError"
        stream = handle.stream("x", max_tokens=1000, ignore_eos=True)
        next(stream)
        stream.close()


async def test_five_hundred_connections(emulated_url: str, client: Client) -> None:
    """64 slots and a queue of 256, all taken: 500 more are told to come back, and then get whole answers."""
    parts = urlsplit(emulated_url)
    refused = asyncio.Event()

    async def ask(prompt: str, max_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0,
             "speculation": {"tokens": True}}
        ).encode()  # fmt: skip
        head = f"POST {parts.path}/v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head.encode() + body)
        return reader, writer

    async def one(index: int) -> list[int]:
        while True:
            reader, writer = await ask(f"w{index}", 8)
            got = await reader.read()
            writer.close()
            header, _, rest = got.partition(b"\r\n\r\n")
            if b" 429 " in header.splitlines()[0]:
                assert b"retry-after" in header.lower()
                refused.set()
                await asyncio.sleep(1)
                continue
            assert b" 200 " in header.splitlines()[0], got[:500]
            assert rest.count(b"data: [DONE]") == 1
            chunks = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: {")]
            return [token["id"] for c in chunks for token in c["choices"][0]["speculation"].get("tokens", [])]

    def taken() -> bool:
        return client.status()["sessions"] >= 320

    holding = [await ask("x", 1500) for _ in range(320)]
    assert await asyncio.to_thread(eventually, taken)
    asking = asyncio.gather(*(one(index) for index in range(500)))
    await asyncio.wait_for(refused.wait(), 60)
    for _, writer in holding:
        writer.close()
    answers = await asking
    assert [len(tokens) for tokens in answers] == [8] * 500
    alone = client.generate([f"w{i}" for i in range(0, 500, 50)], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert tokens_of(alone) == answers[::50]
    assert eventually(lambda: client.status()["sessions"] == 0, 20)


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_over_the_wire(emulated_url: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x " * 5000}], "stream": stream}
    got = httpx.post(f"{emulated_url}/v1/chat/completions", json=body, timeout=30)
    assert (got.status_code, got.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert httpx.get(f"{emulated_url}/nowhere").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{emulated_url}/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_command_line_against_a_server(emulated_url: str) -> None:
    def outrider(*arguments: str) -> str:
        command = [sys.executable, "-m", "deployments.cli.main", *arguments, "--url", emulated_url]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    answer = outrider("generate", "w1 w2", "--max-tokens", "8", "--temperature", "0", "--explain")
    assert "target passes" in answer
    assert "accepted by the target" in answer
    assert '"tokens"' in outrider("generate", "w1 w2", "--max-tokens", "3", "--json")
    shown = outrider("status")
    assert "ready" in shown
    assert "steps of" in shown  # of the draft, which has one replica


@pytest.mark.parametrize("proxy", ["serve", pytest.param("haproxy", marks=pytest.mark.slow)])
def test_interrupting_a_server_stops_what_it_started(tmp_path: Path, proxy: str) -> None:
    """As Ctrl-C does it: the signal goes to the whole process group, Ray's processes included."""
    port = free_port()
    config = tmp_path / "config.yaml"
    ingress = {"port": port, "proxy": proxy, "batch_folder": str(tmp_path / "batches")}
    config.write_text(yaml.safe_dump(EMULATED | {"ingress": ingress}))
    command = [sys.executable, "-m", "deployments.cli.main", "serve", str(config)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    try:
        assert eventually(lambda: b"Serving" in (tmp_path / "log").read_bytes(), 120), (tmp_path / "log").read_text()
        _use(f"http://127.0.0.1:{port}")
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(60) == 0
        assert eventually(lambda: not session_members(server.pid), 20)
    finally:
        for process in session_members(server.pid):
            os.kill(process, signal.SIGKILL)
        server.wait(10)


def _use(url: str) -> None:
    """What every proxy must carry: ids, refusals, streams, and the news that a client is gone."""
    models = httpx.get(f"{url}/v1/models", headers={"x-request-id": "mine"})
    assert models.json()["data"][0]["id"] == "emulated"
    assert models.headers["x-request-id"] == "mine"
    assert httpx.post(f"{url}/v1/completions", content=b"{").json()["error"]["code"] == "invalid_json"
    with connect(url) as client:
        (result,) = client.generate(["w1 w2"], max_tokens=30, temperature=0.0)
        assert len(result.tokens) == 30
        stream = client.stream("w1 w2", max_tokens=1500, ignore_eos=True)
        next(stream)
        stream.close()
        assert eventually(lambda: client.status()["sessions"] == 0, 20)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w1"}}
        file = official.files.create(file=("in", json.dumps(line).encode()), purpose="batch")
        batch = official.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert eventually(lambda: official.batches.retrieve(batch.id).status == "completed", 30)


def session_members(session: int) -> list[int]:
    """Processes that were started under a session leader, as far as they run."""
    members = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdecimal() and int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry.name))
    return members


@pytest.mark.slow
def test_streams_go_on_while_a_new_version_is_rolled_out(ray_port: int) -> None:
    """Every deployment is replaced under eight streams; each ends with the tokens it would have had."""
    from ray import serve

    from cluster.config.deployment import load_config
    from deployments.app import application as build
    from deployments.runtime.local import application

    ingress = {"port": ray_port, "route_prefix": "/rolling", "batch_folder": None}
    raw = EMULATED | {"name": "rolling", "ingress": ingress}
    asked: dict[str, Any] = {"max_tokens": 800, "temperature": 0.0, "ignore_eos": True}
    with application(load_config(raw)) as url, connect(url) as client:
        expected = tokens_of(client.generate(PROMPTS[:8], **asked))
        started = threading.Barrier(9)
        got: dict[int, list[int]] = {}

        def one(index: int) -> None:
            tokens: list[int] = []
            for delta in client.stream(PROMPTS[index], **asked):
                if not tokens:
                    started.wait(60)
                tokens += delta.tokens
            got[index] = tokens

        threads = [threading.Thread(target=one, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        started.wait(60)
        before = replicas(client, "target")
        changed = load_config(raw | {"ingress": ingress | {"access_log": True}})
        serve.run(build(changed), name="rolling", route_prefix="/rolling")
        for thread in threads:
            thread.join(120)
        assert [got.get(index) for index in range(8)] == expected
        assert eventually(lambda: bool(replicas(client, "target")) and not before & replicas(client, "target"))


@pytest.mark.demo
class TestOfficialClient:
    """The `openai` package against the demo's real model."""

    @pytest.fixture
    def official(self, demo_url: str) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as official:
            yield official

    def test_streams_a_chat(self, official: openai.OpenAI) -> None:
        asked: Any = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_completion_tokens": 24,
        }
        chunks = list(official.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        whole = official.chat.completions.create(**asked)
        assert "Paris" in text
        assert whole.choices[0].message.content == text
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
            whole.choices[0].finish_reason
        ]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_equals_plain_decoding(self, official: openai.OpenAI) -> None:
        for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
            asked: Any = {"model": "smollm2-135m-instruct", "prompt": "The sea is", "max_tokens": 32, **sampling}
            told = [
                official.completions.create(**asked, extra_body={"speculation": {"enabled": enabled, "tokens": True}})
                for enabled in (True, False)
            ]
            ids = [[token["id"] for token in one.choices[0].speculation["tokens"]] for one in told]  # type: ignore[attr-defined]
            margins = [token["margin"] for token in told[1].choices[0].speculation["tokens"]]  # type: ignore[attr-defined]
            place = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), None)
            assert ids[0] == ids[1] or (place is not None and margins[place] < 1e-3)

    def test_log_probabilities_and_choices(self, official: openai.OpenAI) -> None:
        got = official.chat.completions.create(
            model="smollm2-135m-instruct", messages=[{"role": "user", "content": "Hi"}],
            n=2, seed=1, max_tokens=6, logprobs=True, top_logprobs=3,
        )  # fmt: skip
        assert [choice.index for choice in got.choices] == [0, 1]
        content = got.choices[0].logprobs
        assert content is not None
        assert content.content is not None
        for token in content.content:
            assert len(token.top_logprobs) == 3
            scores = [other.logprob for other in token.top_logprobs]
            assert scores == sorted(scores, reverse=True)
            assert token.logprob <= scores[0] + 1e-6

    def test_json_mode_parses(self, official: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        }
        got = official.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "Name a city as JSON."}],
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
        )
        assert json.loads(got.choices[0].message.content or "")["city"] in ("Paris", "Rome")

    def test_errors_are_the_client_s_own(self, official: openai.OpenAI) -> None:
        messages: Any = [{"role": "user", "content": "Hi"}]
        with pytest.raises(openai.NotFoundError) as missing:
            official.chat.completions.create(model="gpt-9", messages=messages)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as refused:
            official.chat.completions.create(model="smollm2-135m-instruct", messages=messages, temperature=-1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as unknown:
            official.completions.create(model="smollm2-135m-instruct", prompt=[10**6])
        assert unknown.value.param == "prompt"
        assert "smollm2-135m-instruct" in [model.id for model in official.models.list()]
