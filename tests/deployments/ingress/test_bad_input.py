"""What cannot be served is refused with the parameter named, and the engine goes on: the whole path over a real model.

What the door can tell from the body alone is in test_http.py; here are values that only model, grammar and settings
together show to be wrong.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from small_model import CODEC, target
from stack import Stack, stack

from cluster.config.deployment import load_config

GOOD = {"prompt": "abc", "max_tokens": 6, "temperature": 0}


@pytest.fixture
async def served() -> AsyncIterator[Stack]:
    """The draft proposes nonsense, a letter over and over, so that blocks are verified all the time."""
    async with stack(CODEC, CODEC.encode("aaaaaaaaaaaa"), "twin", 3, make_target=target) as it:
        yield it


NAN, INFINITY = float("nan"), float("inf")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
RANGES: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in FLOATS for value in (NAN, INFINITY, -INFINITY, -3, 11, "1", True)),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"logit_bias": {"5": NAN}}, "logit_bias[5]"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"min_tokens": 7}, "min_tokens"),
    ({"prompt": [99999]}, "prompt"),
]
FORBIDS_ALL = {
    # JSON must begin with a brace or white space, none of which may be said.
    "response_format": {"response_format": {"type": "json_object"}, "allowed_token_ids": list(CODEC.encode("xyz"))},
    # Nothing but the end of text is allowed, and that not yet.
    "allowed_token_ids": {"allowed_token_ids": [0], "min_tokens": 3},
    "bad_words": {"allowed_token_ids": list(CODEC.encode("x")), "bad_words": ["x"]},
}


async def refused(it: Stack, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        content = json.dumps({**GOOD, **body, "stream": stream})
        got = await it.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert got.status_code == 400, (body, got.text)
        error = got.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, (body, error)


async def test_values_out_of_range(served: Stack) -> None:
    expected = (await served.http.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"]
    for body, param in RANGES:
        await refused(served, body, param)
    again = await served.http.post("/v1/completions", json=GOOD)
    assert again.json()["choices"][0]["text"] == expected


async def test_settings_that_leave_nothing_to_say(served: Stack) -> None:
    """Found when the first token is chosen; the neighbours in the pass do not notice."""
    expected = (await served.http.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"]
    for name, body in FORBIDS_ALL.items():
        param = "allowed_token_ids" if name == "bad_words" else name
        await refused(served, body, param)
    again = await served.http.post("/v1/completions", json=GOOD)
    assert again.json()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
        (
            {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ],
)
async def test_grammars_that_nothing_satisfies(served: Stack, body: dict[str, Any], param: str) -> None:
    await refused(served, body, param)
    assert (await served.http.post("/v1/completions", json=GOOD)).status_code == 200


def test_an_unknown_rule_is_refused_where_rules_are_chosen() -> None:
    with pytest.raises(Exception, match=r"rule: .*'coupled', 'rejection', 'block' or 'typical'"):
        load_config({"rule": "lossy"})
