"""What clients get when an answer ends inside a block, at every offset, streamed and not, through the whole stack.

The expected values come from the rigged script alone.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from stack import EOS, Character, Stack, said, stack
from tiny import byte_codec

from actors import telemetry
from actors.settings import SamplingSettings
from deployments.client.request_builder import named, request_for

CODEC = byte_codec()
SCRIPT = CODEC.encode("abcdefghijklmnop")
ASK = {"prompt": "x", "temperature": 0}


async def ask(it: Stack, body: dict[str, Any]) -> dict[str, Any]:
    """The only choice, after checking that the streamed answer is the same. Adds `ids` and `usage`."""
    speculation = {"tokens": True, "enabled": body.get("speculation", True)}
    body = {**ASK, **body, "speculation": speculation}
    whole, streamed = await asyncio.gather(
        it.http.post("/v1/completions", json=body),
        it.http.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}),
    )
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    choice: dict[str, Any] = answer["choices"][0]
    choice["ids"] = [token["id"] for token in choice["speculation"]["tokens"]]
    choice["usage"] = answer["usage"]
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    parts = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    assert [token["id"] for part in parts for token in part["speculation"].get("tokens", [])] == choice["ids"]
    return choice


@pytest.mark.parametrize("character", ["twin", "foe", None])
async def test_stops_and_caps_at_every_offset(character: Character | None) -> None:
    """An earlier stop ends with "stop" and nothing after it; an earlier cap with "length" and exactly that many."""
    async with stack(CODEC, SCRIPT, character, lookahead=5) as it:
        for place in range(1, 13):
            stopped = await ask(it, {"stop_token_ids": [SCRIPT[place]], "max_tokens": 40})
            assert stopped["ids"][:place] == list(SCRIPT[:place])
            assert (stopped["text"], stopped["finish_reason"]) == ("abcdefghijklmnop"[:place], "stop")
            text = await ask(it, {"stop": ["abcdefghijklmnop"[place - 1 : place + 1]], "max_tokens": 40})
            assert (text["text"], text["finish_reason"]) == ("abcdefghijklmnop"[: place - 1], "stop")
            capped = await ask(it, {"max_tokens": place})
            assert (capped["ids"], capped["finish_reason"]) == (list(SCRIPT[:place]), "length")
            assert capped["usage"]["completion_tokens"] == place
        if character == "twin":
            assert it.recorder.total(telemetry.ACCEPTED) > 0


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4, 6])  # 5: above
async def test_any_id_of_the_answer_can_stop_it(lookahead: int) -> None:
    """The answer without speculation, cut at the first occurrence of the id; one that never comes changes nothing."""
    text = "abcabdabcabe"
    script = CODEC.encode(text)
    async with stack(CODEC, script, "twin", lookahead) as it:
        plain = await ask(it, {"max_tokens": 40, "speculation": False})
        assert plain["text"] == text
        for letter in "abcdez":
            got = await ask(it, {"stop_token_ids": [*CODEC.encode(letter)], "max_tokens": 40})
            place = text.find(letter)
            assert got["text"] == (text[:place] if place >= 0 else text)
            assert got["ids"] == [*script[: place + 1]] if place >= 0 else [*script, EOS]


@pytest.mark.parametrize("lookahead", [1, 2, 4, 6])
async def test_end_of_sequence(lookahead: int) -> None:
    async with stack(CODEC, SCRIPT[:3], "twin", lookahead) as it:
        natural = await ask(it, {"max_tokens": 40})
        assert (natural["text"], natural["finish_reason"]) == ("abc", "stop")
        assert natural["usage"]["completion_tokens"] == len(natural["ids"])


async def test_min_tokens_holds_the_end_back_and_no_longer() -> None:
    """The script ends after three tokens: m below that changes nothing, m above gives exactly m content tokens."""
    async with stack(CODEC, SCRIPT[:3], "twin", 4) as it:
        for least in range(9):
            got = await ask(it, {"min_tokens": least, "max_tokens": 40})
            sampling = SamplingSettings(min_tokens=least)
            content = [said(SCRIPT[:3], place, sampling) for place in range(max(3, least))]
            assert [token for token in got["ids"] if token != EOS] == content
            assert got["finish_reason"] == "stop"


@pytest.mark.parametrize("character", ["twin", "foe"])
async def test_ignore_eos_delivers_exactly_max_tokens(character: Character) -> None:
    async with stack(CODEC, SCRIPT[:3], character, 4) as it:
        for most in range(1, 12):
            got = await ask(it, {"ignore_eos": True, "max_tokens": most, "logprobs": 1})
            assert len(got["ids"]) == got["usage"]["completion_tokens"] == most
            assert len(got["logprobs"]["tokens"]) == len(got["logprobs"]["token_logprobs"]) == most
            assert got["finish_reason"] == "length"


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4, 5, 6])
async def test_characters_split_over_tokens_and_blocks(lookahead: int) -> None:
    """Deltas join to a one-shot decode; a replacement character only where max_tokens cuts inside a character."""
    text = "👩‍🚀 한글 é"
    script = CODEC.encode(text)
    async with stack(CODEC, script, "twin", lookahead) as it:
        got = await ask(it, {"max_tokens": 100})
        assert got["text"] == text
        cut = await ask(it, {"max_tokens": 2})
        assert cut["text"] == "\ufffd"


async def test_log_probabilities_belong_to_their_tokens() -> None:
    async with stack(CODEC, SCRIPT, "twin", 4) as it:
        body = {"logprobs": 5, "max_tokens": 12}
        got = (await ask(it, body))["logprobs"]
        assert got["tokens"] == list("abcdefghijkl")
        assert got["token_logprobs"] == [-token / 1000 for token in SCRIPT[:12]]
        assert got["top_logprobs"][2]["c"] == -SCRIPT[2] / 1000
        assert len(got["top_logprobs"][2]) == 5


async def test_a_full_queue_is_said_so_and_passes() -> None:
    """One slot and no queue: of 12 at once some are served and the others told to come back, none of them 5xx."""
    async with stack(CODEC, SCRIPT * 10, "foe", 1, slots=1, queue=0) as it:
        body = {**ASK, "max_tokens": 100}
        for stream in (False, True):
            answers = await asyncio.gather(
                *(it.http.post("/v1/completions", json={**body, "stream": stream}) for _ in range(12))
            )
            statuses = {answer.status_code for answer in answers}
            assert statuses == {200, 429}
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
        assert (await it.http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4, 5, 6])
async def test_a_stop_token_cuts_at_its_first_occurrence(lookahead: int) -> None:
    """Some ids occur twice, and their first occurrences lie at every place of a block."""
    text = "abcabdabceabcfab"
    script = CODEC.encode(text)
    async with stack(CODEC, script, "twin", lookahead) as it:
        for place in range(1, 13):
            got = await ask(it, {"stop_token_ids": [script[place]], "max_tokens": 40})
            assert got["text"] == text[: text.index(text[place])]
            assert got["finish_reason"] == "stop"
            assert got["stop_reason"] == script[place]


async def test_more_than_the_context_is_cut_alike_on_every_door() -> None:
    """A context of 40: whatever is asked for beyond it ends with "length" where the context does."""
    async with stack(CODEC, SCRIPT, "twin", 4, context=40) as it:
        endless = {"max_tokens": 10_000, "ignore_eos": True, "temperature": 0}
        message = {"messages": [{"role": "user", "content": "x"}]}
        lengths = {}
        for name, route, prompt in (
            ("completion", "/v1/completions", {"prompt": "xyz"}),
            ("chat", "/v1/chat/completions", message),
            ("newer", "/v1/chat/completions", {**message, "max_completion_tokens": 9999}),
        ):
            got = (await it.http.post(route, json={**endless, **prompt})).json()
            assert got["choices"][0]["finish_reason"] == "length"
            lengths[name] = got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]
        assert lengths == {"completion": (3, 37), "chat": (3, 37), "newer": (3, 37)}
        request = named(request_for("xyz", endless))
        handle = [delta async for delta in it.orchestrator.generate(request)]
        assert sum(len(delta.tokens) for delta in handle) == 37
        five = await it.http.post("/v1/chat/completions", json={**message, "max_completion_tokens": 5, "max_tokens": 9})
        assert five.json()["usage"]["completion_tokens"] == 5
        for route, prompt in (
            ("/v1/completions", {"prompt": "x" * 40}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 40}]}),
        ):
            for stream in (False, True):
                full = await it.http.post(route, json={**prompt, "stream": stream})
                assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
