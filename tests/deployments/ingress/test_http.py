"""The HTTP door over a reciting service: every route, streamed and not, and every refusal in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tiny import Reciter, byte_codec

from actors.errors import OverloadedError, PromptTooLongError
from deployments.ingress.http_app import HttpLimits, http_app
from deployments.ingress.service import Served

CODEC = byte_codec()
SERVED = Served("tiny", context=64, created=5, version="1")
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 12,
    "total_tokens": 19,
    "completion_tokens_details": {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 1,
        "accepted_draft_tokens": 6,
        "rejected_draft_tokens": 3,
    },
}


@pytest.fixture
def service() -> Reciter:
    return Reciter(CODEC)


@pytest.fixture
async def client(service: Reciter) -> AsyncIterator[httpx.AsyncClient]:
    app = http_app(service, CODEC, SERVED, HttpLimits(body_bytes=200_000))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_completion(client: httpx.AsyncClient) -> None:
    got = (await client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 50})).json()
    assert got["object"] == "text_completion"
    assert got["created"] > 0
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hello wörld", "stop", None)
    assert got["usage"] == USAGE


async def test_completion_length_defaults_to_sixteen(client: httpx.AsyncClient, service: Reciter) -> None:
    await client.post("/v1/completions", json={"prompt": "hi"})
    await client.post("/v1/chat/completions", json=chat())
    assert [request.sampling.max_tokens for request in service.requests] == [16, SERVED.context]


async def test_chat(client: httpx.AsyncClient, service: Reciter) -> None:
    got = (await client.post("/v1/chat/completions", json=chat(max_completion_tokens=5, max_tokens=9))).json()
    choice = got["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert service.requests[0].messages == ({"role": "user", "content": "hi"},)
    assert service.requests[0].sampling.max_tokens == 5


async def test_chat_stream_has_one_role_one_finish_and_the_same_text(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post("/v1/chat/completions", json=chat(stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [d["role"] for d in deltas if "role" in d] == ["assistant"]
    assert "role" in deltas[0]
    assert "".join(d.get("content", "") for d in deltas) == "Hello wörld"
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [f for f in finishes if f] == ["stop"]
    assert finishes[-1] == "stop"
    assert "usage" not in chunks[0]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


async def test_include_usage_adds_one_last_chunk(client: httpx.AsyncClient) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    chunks = events(await client.post("/v1/chat/completions", json=body))
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["usage"] == USAGE
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_stop_strings_and_null_fields(client: httpx.AsyncClient, service: Reciter) -> None:
    for stop in ("lo w", ["zzz", "lo w"]):
        body = chat(stop=stop, seed=None, temperature=None)
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hel", "stop", "lo w")
    assert service.requests[0].sampling.temperature == 1.0


async def test_completion_logprobs_whole_and_streamed_agree(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "logprobs": 2, "max_tokens": 50}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    chunks = events(await client.post("/v1/completions", json=body | {"stream": True}))
    streamed: dict[str, list[Any]] = {key: [] for key in whole}
    for chunk in chunks:
        for key, values in chunk["choices"][0]["logprobs"].items():
            streamed[key] += values
    assert streamed == whole
    assert whole["tokens"][:2] == ["H", "e"]
    assert whole["tokens"][7:9] == ["bytes:\\xc3", "bytes:\\xb6"]  # ö, in two tokens
    assert whole["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10]
    token = CODEC.encode("H")[0]
    assert whole["token_logprobs"][0] == -token / 100
    assert set(whole["top_logprobs"][0]) == {"H", "!", '"'}  # the two alternatives are ids 2 and 3


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    body = chat(logprobs=True, top_logprobs=1)
    content = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    assert content[7]["bytes"] == [0xC3]
    assert content[0]["top_logprobs"] == [{"token": "!", "logprob": -3.0, "bytes": [33]}]


async def test_several_choices_have_derived_seeds(client: httpx.AsyncClient, service: Reciter) -> None:
    got = (await client.post("/v1/chat/completions", json=chat(n=3, seed=11))).json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    seeds = [request.sampling.seed for request in service.requests]
    assert len(set(seeds)) == 3
    assert seeds[0] == 11
    assert got["usage"]["prompt_tokens"] == 7
    assert got["usage"]["completion_tokens"] == 36
    chunks = events(await client.post("/v1/chat/completions", json=chat(n=2, stream=True)))
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello wörld"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a", [("a", None)]),
        ([5, 6], [(None, (5, 6))]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([[5], "b"], [(None, (5,)), ("b", None)]),
    ],
)
async def test_prompts_in_every_form(
    client: httpx.AsyncClient, service: Reciter, prompt: object, sent: list[object]
) -> None:
    got = await client.post("/v1/completions", json={"prompt": prompt})
    assert [(r.text, r.tokens) for r in service.requests] == sent
    assert got.json()["usage"]["prompt_tokens"] == 7 * len(sent)


async def test_echo_precedes_the_answer(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["Say: ", CODEC.encode("he")], "echo": True}
    got = (await client.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in got["choices"]] == ["Say: Hello wörld", "heHello wörld"]
    chunks = events(await client.post("/v1/completions", json={"prompt": "Say: ", "echo": True, "stream": True}))
    assert chunks[0]["choices"][0]["text"].startswith("Say: H")


async def test_best_of_keeps_the_most_likely(client: httpx.AsyncClient, service: Reciter) -> None:
    service.says = ["zz", "!!", "aa"]  # the reciter's log-probabilities fall with the token id
    body = {"prompt": "x", "best_of": 3, "n": 2}
    got = (await client.post("/v1/completions", json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "!!"), (1, "aa")]
    assert got["usage"]["completion_tokens"] == 6
    assert got["choices"][0]["logprobs"] is None


async def test_speculation_is_reported_on_request(client: httpx.AsyncClient, service: Reciter) -> None:
    body = chat(speculation={"tokens": True})
    got = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["speculation"]
    assert (got["rule"], got["exact"], got["passes"]) == ("coupled", True, 4)
    assert got["acceptance_rate"] == 6 / 9
    assert got["acceptance_length"] == 12 / 4
    assert got["tokens"][0] == {"id": CODEC.encode("H")[0], "text": "H", "origin": "accepted", "margin": 0.5}
    chunks = events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    told = [c["choices"][0].get("speculation", {}) for c in chunks]
    assert [token for t in told for token in t.get("tokens", [])] == got["tokens"]
    assert told[-1]["acceptance_length"] == 3
    await client.post("/v1/chat/completions", json=chat(speculation=False))
    assert [r.sampling.speculation for r in service.requests] == [True, True, False]


async def test_a_relaxed_rule_is_marked_in_every_answer(service: Reciter) -> None:
    """Unasked, in whole answers, in streams and in usage; an exact rule is not."""
    for rule, marked in (("typical", True), ("block", False)):
        app = http_app(service, CODEC, replace(SERVED, rule=rule))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            got = (await client.post("/v1/chat/completions", json=chat())).json()
            body = chat(stream=True, stream_options={"include_usage": True})
            chunks = events(await client.post("/v1/chat/completions", json=body))
            assert ("speculation" in got["choices"][0]) == marked
            if marked:
                assert not got["choices"][0]["speculation"]["exact"]
                assert not chunks[-2]["choices"][0]["speculation"]["exact"]
            for usage in (got["usage"], chunks[-1]["usage"]):
                assert usage["completion_tokens_details"].get("relaxed", False) == marked
            assert (await client.get("/v1/models")).json()["data"][0]["exact"] != marked


async def test_extensions_reach_the_sampler(client: httpx.AsyncClient, service: Reciter) -> None:
    body = chat(
        top_k=5, min_p=0.1, repetition_penalty=1.5, ignore_eos=True, min_tokens=2, stop_token_ids=[3],
        logit_bias={"7": -100}, bad_words=["he"], seed=-1, priority=2, timeout_s=9.5,
        prediction={"type": "content", "content": "he"},
    )  # fmt: skip
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    request = service.requests[0]
    s = request.sampling
    assert (s.top_k, s.min_p, s.repetition_penalty, s.ignore_eos, s.min_tokens) == (5, 0.1, 1.5, True, 2)
    assert (s.stop_token_ids, s.logit_bias, s.seed) == ((3,), {7: -100}, 2**63 - 1)
    assert s.bad_words == (CODEC.encode("he"), CODEC.encode(" he"))
    assert s.prediction == CODEC.encode("he")
    assert (request.priority, request.timeout_s) == (2, 9.5)


async def test_response_format_becomes_a_grammar(client: httpx.AsyncClient, service: Reciter) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for format_ in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        assert (await client.post("/v1/chat/completions", json=chat(response_format=format_))).status_code == 200
    assert '"integer"' in (service.requests[1].sampling.grammar or "")
    await client.post("/v1/chat/completions", json=chat(response_format={"type": "text"}))
    assert service.requests[2].sampling.grammar is None


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.mark.parametrize(
    "written",
    [
        'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        '{"name": "weather", "parameters": {"city": "Köln"}}',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]',
    ],
)
async def test_tool_calls(client: httpx.AsyncClient, service: Reciter, written: str) -> None:
    service.says = written
    body = chat(tools=[TOOL], max_tokens=200)
    choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Köln"})
    assert choice["message"]["content"] == ("Let me see. " if written.startswith("Let") else None)
    chunks = events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    assert [(c["index"], c["function"]) for c in calls] == [(0, call)]
    assert "".join(d.get("content", "") for d in deltas) == (choice["message"]["content"] or "")
    assert service.requests[0].tools == (TOOL,)


@pytest.mark.parametrize("parallel", [True, False])
async def test_several_calls_unless_one_is_wanted(client: httpx.AsyncClient, service: Reciter, parallel: bool) -> None:
    one = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
    service.says = one % "Rome" + one % "Oslo"
    body = chat(tools=[TOOL], max_tokens=200, parallel_tool_calls=parallel)
    message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    cities = [json.loads(call["function"]["arguments"])["city"] for call in message["tool_calls"]]
    assert cities == (["Rome", "Oslo"] if parallel else ["Rome"])


async def test_text_that_is_no_call_is_shown(client: httpx.AsyncClient, service: Reciter) -> None:
    service.says = "a <tool_call>not json"
    choice = (await client.post("/v1/chat/completions", json=chat(tools=[TOOL]))).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (service.says, "stop")


async def test_forced_tool_choice_is_a_grammar(client: httpx.AsyncClient, service: Reciter) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        await client.post("/v1/chat/completions", json=chat(tools=[TOOL], tool_choice=choice))
    assert all('"weather"' in (request.sampling.grammar or "") for request in service.requests)
    await client.post("/v1/chat/completions", json=chat(tools=[TOOL], tool_choice="none"))
    assert service.requests[2].tools is None


BAD_CHATS = [
    (chat(n=0), "n"),
    (chat(n="2"), "n"),
    (chat(n=True), "n"),
    (chat(temperature=-1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(min_tokens=5, max_tokens=2), "min_tokens"),
    (chat(messages="hi"), "messages"),
    (chat(messages=[]), "messages"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
    (chat(stop=[""]), "stop"),
    (chat(stop=5), "stop"),
    (chat(stop=["x"] * 17), "stop"),
    (chat(logit_bias={"a": 1}), "logit_bias"),
    (chat(logit_bias={"5": 101}), "logit_bias[5]"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(stream_options=5), "stream_options"),
    (chat(functions=[{}]), "functions"),
    (chat(use_beam_search=True), "use_beam_search"),
    (chat(modalities=["audio"]), "modalities"),
    (chat(response_format={"type": "xml"}), "response_format"),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}), "response_format"),
    (chat(tools=[{"type": "function"}]), "tools"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}), "tool_choice"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": ["weather"]}}), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": {}}}), "tool_choice"),
    (chat(tools=[TOOL] * 1025), "tools"),
    (chat(prediction={"type": "content"}), "prediction"),
    (chat(prediction={"type": "content", "content": "x" * 5000}), "prediction"),
    (chat(prediction={"type": "content", "content": "x" * 5000}), "prediction"),
    (chat(messages=[{"role": "user", "content": "x"}] * 65), "messages"),  # the context has 64 tokens
    (chat(bad_words=["x"] * 257), "bad_words"),
    (chat(structured_outputs={"choice": ["x"] * 1025}), "structured_outputs"),
    (chat(top_k=2**31), "top_k"),
    (chat(max_tokens=10**400, temperature=-1), "temperature"),
    (chat(structured_outputs={"regex": "a", "json": {}}), "structured_outputs"),
    ({"model": "tiny"}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_values_name_the_parameter(
    client: httpx.AsyncClient, service: Reciter, body: dict[str, Any], param: str, stream: bool
) -> None:
    got = await client.post("/v1/chat/completions", json=body | {"stream": stream})
    assert got.status_code == 400
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert service.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        ({}, "prompt"),
    ],
)
async def test_bad_completions_name_the_parameter(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    got = await client.post("/v1/completions", json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("content", "type_", "status", "code"),
    [
        (b'{"prompt": ', "application/json", 400, "invalid_json"),
        (b"\xff\xfe", "application/json", 400, "invalid_json"),
        (b"[" * 5000, "application/json", 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 400, "invalid_value"),
        (b'{"prompt": "x", "temperature": Infinity}', "application/json", 400, "invalid_value"),
        (b'{"prompt": "x"}', "text/plain", 415, "unsupported_media_type"),
        (b'{"prompt": "' + b"x" * 300_000 + b'"}', "application/json", 413, "request_too_large"),
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, content: bytes, type_: str, status: int, code: str) -> None:
    got = await client.post("/v1/completions", content=content, headers={"content-type": type_})
    assert (got.status_code, got.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"]
)
async def test_bodies_of_any_json(client: httpx.AsyncClient, path: str) -> None:
    for body in (None, 5, "x", [], {}, {"prompt": {}}, {"messages": [None]}, {"messages": [[]]}, {"tokens": "a"}):
        got = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert got.status_code == 400
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}


async def test_unknown_model_and_path(client: httpx.AsyncClient) -> None:
    got = await client.post("/v1/chat/completions", json=chat(model="gpt-9"))
    assert (got.status_code, got.json()["error"]["code"], got.json()["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        got = await client.request(method, path)
        assert got.status_code == status
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_service_keep_their_status(
    client: httpx.AsyncClient, service: Reciter, stream: bool
) -> None:
    service.refusal = OverloadedError("the queue is full")
    got = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert (got.status_code, got.headers["retry-after"], got.json()["error"]["code"]) == (429, "1", "overloaded")
    service.refusal = PromptTooLongError("too long", "prompt")
    got = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages")


async def test_a_failure_inside_a_stream_is_an_event(client: httpx.AsyncClient, service: Reciter) -> None:
    service.failure_after = 2
    chunks = events(await client.post("/v1/chat/completions", json=chat(stream=True)))
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "secret" not in chunks[-1]["error"]["message"]
    got = await client.post("/v1/chat/completions", json=chat())
    assert got.status_code == 500
    assert "secret" not in got.text
    assert service.open == 0


async def test_stream_options_go_with_streams(client: httpx.AsyncClient) -> None:
    got = await client.post("/v1/chat/completions", json=chat(stream_options={"include_usage": True}))
    assert (got.status_code, got.json()["error"]["param"]) == (400, "stream_options")


async def test_request_ids_come_back(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
    assert (await client.get("/health")).headers["x-request-id"].startswith("req-")
    assert (await client.get("/nowhere", headers={"x-request-id": "a b"})).headers["x-request-id"].startswith("req-")


async def test_small_routes(client: httpx.AsyncClient, service: Reciter) -> None:
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
    assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 64
    assert (await client.get("/ready")).status_code == 200
    service.is_ready = False
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json() == {"version": "1"}
    assert (await client.get("/status")).json() == {"requests": 0}
    tokens = (await client.post("/tokenize", json={"prompt": "hey"})).json()
    assert tokens == {"tokens": list(CODEC.encode("hey")), "count": 2, "max_model_len": 64}
    got = (await client.post("/v1/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert got == {"prompt": "hey"}
    assert (await client.post("/detokenize", json={"tokens": [10**9]})).status_code == 400
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")  # SVG's name, which nobody fetches
    assert "https://" not in page.text
    described = (await client.get("/openapi.json")).json()
    assert "ChatRequest" in described["components"]["schemas"]


async def test_a_client_that_goes_frees_its_answer() -> None:
    """Drives the application by hand: the client disconnects while the answer waits for its second delta."""
    for path, body in (("/v1/chat/completions", chat()), ("/v1/chat/completions", chat(stream=True, n=2))):
        service = Reciter(CODEC, held=asyncio.Event())
        app = http_app(service, CODEC, SERVED)
        started = asyncio.Event()
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await incoming.put({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

        async def send(message: dict[str, Any], started: asyncio.Event = started) -> None:
            if message.get("body"):
                started.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "server": ("t", 80), "client": ("c", 1), "state": {},
        }  # fmt: skip
        task = asyncio.create_task(app(scope, incoming.get, send))
        if body.get("stream"):
            await asyncio.wait_for(started.wait(), 10)
        else:
            while not service.requests:
                await asyncio.sleep(0)
        assert service.open > 0
        await incoming.put({"type": "http.disconnect"})
        await asyncio.wait_for(task, 10)
        assert service.open == 0
