"""The HTTP door over a reciting service: every route, streamed and not, and every refusal in OpenAI's shape."""

from __future__ import annotations

import asyncio
import gzip
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
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
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
    (chat(length_penalty=1.1), "length_penalty"),
    (chat(return_token_ids=True), "return_token_ids"),
    (chat(return_tokens_as_token_ids=True), "return_tokens_as_token_ids"),
    (chat(chat_template="{{ messages }}"), "chat_template"),
    (chat(chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs"),
    (chat(documents=[{"text": "x"}]), "documents"),
    (chat(continue_final_message=True, add_generation_prompt=False), "continue_final_message"),
    (chat(add_generation_prompt=False), "add_generation_prompt"),
    (chat(add_special_tokens=True), "add_special_tokens"),
    (chat(function_call={"name": "weather"}), "function_call"),
    (chat(best_of=2), "best_of"),
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


async def test_the_tool_at_fault_is_named(client: httpx.AsyncClient) -> None:
    bad = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^(?!0)"}}}
    named = {"type": "function", "function": {"name": "mail", "parameters": bad}}
    got = await client.post("/v1/chat/completions", json=chat(tools=[TOOL, named], tool_choice="required"))
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tool 'mail': ")
    assert "look-ahead" in error["message"] or "regex" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/version", "/status", "/"])
async def test_head_is_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    full, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(full.content) > 0
    assert head.headers["content-type"] == full.headers["content-type"]


async def test_head_of_what_only_takes_post(client: httpx.AsyncClient) -> None:
    assert (await client.head("/v1/completions")).status_code == 405
    assert (await client.head("/nowhere")).status_code == 404


def packed(body: dict[str, Any], *, members: int = 1) -> bytes:
    text = json.dumps(body).encode()
    size = -(-len(text) // members)
    return b"".join(gzip.compress(text[i : i + size]) for i in range(0, len(text), size))


async def test_packed_bodies_are_understood(client: httpx.AsyncClient) -> None:
    for name, body in (("gzip", packed(chat())), ("GZIP", packed(chat(), members=3)), ("x-gzip", packed(chat()))):
        got = await client.post("/v1/chat/completions", content=body, headers={"content-encoding": name})
        assert got.json()["choices"][0]["message"]["content"] == "Hello wörld"
    plain = await client.post("/v1/chat/completions", json=chat(), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_packed_bodies_have_the_same_limit(client: httpx.AsyncClient) -> None:
    """A gigabyte of blanks in a megabyte: no more than the limit of 200,000 bytes is unpacked."""
    piece = gzip.compress(b" " * 100_000)
    got = await client.post(
        "/v1/chat/completions", content=piece + piece + packed(chat()), headers={"content-encoding": "gzip"}
    )
    assert got.status_code == 413
    bomb = gzip.compress(b" " * 100_000_000, 9)
    assert len(bomb) < 200_000
    got = await client.post("/v1/chat/completions", content=bomb, headers={"content-encoding": "gzip"})
    assert got.status_code == 413


async def test_what_cannot_be_unpacked(client: httpx.AsyncClient) -> None:
    for name in ("br", "zstd", "deflate", "gzip, gzip"):
        got = await client.post("/v1/chat/completions", content=b"x", headers={"content-encoding": name})
        assert (got.status_code, got.headers["accept-encoding"]) == (415, "gzip, identity")
    for body in (b"{}", packed(chat())[:-9], packed(chat()) + b"more"):
        got = await client.post("/v1/chat/completions", content=body, headers={"content-encoding": "gzip"})
        assert got.status_code == 400
        assert "gzip" in got.json()["error"]["message"]


DEFAULTS = {
    **{"n": 1, "stream": False, "stream_options": {"include_usage": False}, "stop": [], "temperature": 1, "top_p": 1},
    **{
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
    },
    **{"min_tokens": 0, "stop_token_ids": [], "bad_words": [], "ignore_eos": False, "use_beam_search": False},
    **{"response_format": {"type": "text"}, "length_penalty": 1.0, "early_stopping": False, "best_of": 1},
    **{"include_stop_str_in_output": False, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"return_token_ids": False, "return_tokens_as_token_ids": False, "user": "", "priority": 0},
}
"""What the references of OpenAI and vLLM give as defaults, said aloud, as generated clients do."""
CHAT_DEFAULTS = {
    **{"logprobs": False, "top_logprobs": 0, "function_call": "none", "functions": [], "tools": [], "echo": False},
    **{"tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "chat_template_kwargs": {}},
    **{"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "documents": []},
}


async def test_defaults_said_aloud_are_accepted(client: httpx.AsyncClient, service: Reciter) -> None:
    for body in (DEFAULTS | CHAT_DEFAULTS, *({key: value} for key, value in (DEFAULTS | CHAT_DEFAULTS).items())):
        got = await client.post("/v1/chat/completions", json=chat(**body))
        assert got.status_code == 200, (body, got.text)
    for body in (DEFAULTS, *({key: value} for key, value in DEFAULTS.items())):
        more = {"prompt": "hi", "suffix": "", "echo": False, "add_special_tokens": True, "logprobs": None}
        got = await client.post("/v1/completions", json=more | body)
        assert got.status_code == 200, (body, got.text)


async def test_a_stop_string_is_shown_to_those_who_ask(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "stop": "lo w", "max_tokens": 50, "include_stop_str_in_output": True}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello w", "stop", "lo w")
    chunks = events(await client.post("/v1/chat/completions", json=chat(**body, stream=True)))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello w"


async def test_special_tokens_are_shown_to_those_who_ask(client: httpx.AsyncClient, service: Reciter) -> None:
    service.says = "a<|user|>b"
    for shown, text in ((False, "a<|user|>b"), (True, "ab")):
        body = {"prompt": "hi", "skip_special_tokens": shown}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == text


async def test_tokens_and_back_keep_special_tokens(client: httpx.AsyncClient) -> None:
    text = "<|user|>hey<|end|> wörld"
    tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert tokens[0] == 1
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    echo = {"prompt": tokens, "echo": True, "max_tokens": 5}
    assert (await client.post("/v1/completions", json=echo)).json()["choices"][0]["text"] == text + "Hello"


@pytest.mark.parametrize("written", [None, "", " ", "null", "{}"])
async def test_tools_and_calls_without_arguments(
    client: httpx.AsyncClient, service: Reciter, written: str | None
) -> None:
    function = {"name": "now"} if written is None else {"name": "now", "arguments": written}
    call = {"id": "call_1", "type": "function", "function": function}
    body = chat(tools=[{"type": "function", "function": {"name": "now", "parameters": None, "description": None}}])
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    for choice in ("auto", "required"):
        assert (await client.post("/v1/chat/completions", json=body | {"tool_choice": choice})).status_code == 200
    assert service.requests[0].tools == ({"type": "function", "function": {"name": "now"}},)


def answered(chunks: list[dict[str, Any]]) -> tuple[str, list[str], str]:
    """Content, names of the calls and the reason of the end, of a stream."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    content = "".join(delta.get("content", "") for delta in deltas)
    return content, [call["function"]["name"] for call in calls], chunks[-1]["choices"][0]["finish_reason"]


ONE_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.mark.parametrize(
    ("says", "cut", "expected"),
    [
        (ONE_CALL + "Done.", None, ("Done.", ["weather"], "tool_calls")),
        (ONE_CALL + " and " + ONE_CALL, None, (" and ", ["weather"] * 2, "tool_calls")),
        (ONE_CALL + "Done.", ONE_CALL + "Do", ("Do", ["weather"], "length")),
        (ONE_CALL + ONE_CALL, ONE_CALL + ONE_CALL[:30], (ONE_CALL[:30], ["weather"], "length")),
        (ONE_CALL, ONE_CALL[:30], (ONE_CALL[:30], [], "length")),
    ],
)
async def test_text_around_calls_and_cut_answers(
    client: httpx.AsyncClient, service: Reciter, says: str, cut: str | None, expected: tuple[str, list[str], str]
) -> None:
    """cut: what max_tokens lets the model say."""
    service.says, service.block = says, 5
    body = chat(tools=[TOOL], max_tokens=200 if cut is None else len(CODEC.encode(cut)))
    choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    names = [call["function"]["name"] for call in choice["message"].get("tool_calls", [])]
    assert (choice["message"]["content"] or "", names, choice["finish_reason"]) == expected
    assert answered(events(await client.post("/v1/chat/completions", json=body | {"stream": True}))) == expected


async def test_an_answer_that_a_grammar_shapes_is_no_call(client: httpx.AsyncClient, service: Reciter) -> None:
    service.says = '{"name": "weather", "arguments": {}}'
    for shape in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": ".*"}},
    ):
        got = await client.post("/v1/chat/completions", json=chat(tools=[TOOL], max_tokens=200, **shape))
        choice = got.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (service.says, "stop")


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
