"""Whatever a client combines, it gets the same answer with speculation as without: over HTTP, streamed and whole.

A real model with a draft of the same weights, so that blocks are long; bodies are drawn at random from odd values.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from pace import Pace
from small_model import CODEC, target, twin
from stack import Stack, stack

from actors import telemetry

PREDICTION = {"type": "content", "content": "hello, hello: {} \u00e9"}
VALUES: dict[str, list[Any]] = {
    "n": [2, 3],
    "temperature": [0, 1e-30, 1e-5, 0.3, 10],
    "top_k": [1, 3],
    "top_p": [1e-9, 0.5],
    "min_p": [0.1, 1],
    "seed": [0, 2**63 - 1, -(2**63), -1],
    "presence_penalty": [2, -2],
    "frequency_penalty": [2, -2],
    "repetition_penalty": [1e-3, 10],
    "logit_bias": [{"40": -100, "50": 100}, {"0": 100}, {"0": -100}],
    "min_tokens": [1, 9],
    "stop": [["a"], [" ", "!"], ["\u00e9\u00e9", "xy"]],
    "stop_token_ids": [[44], [0]],
    "allowed_token_ids": [list(range(2, 80)), [0, 50]],
    "bad_words": [["he", "a b"], ["x"]],
    "ignore_eos": [True],
    "max_tokens": [1, 2, 17],
    "prediction": [PREDICTION],
    "response_format": [{"type": "json_object"}],
    "logprobs": [0, 3],
    "echo": [True],
}


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    rng, found = random.Random(seed), []
    while len(found) < count:
        chosen = rng.sample(list(VALUES), rng.randrange(1, 9))
        body = {name: rng.choice(VALUES[name]) for name in chosen}
        body.setdefault("seed", rng.randrange(2**63))
        body.setdefault("max_tokens", 24)
        body["prompt"] = rng.choice(["hello", [5, 6, 300 % CODEC.vocabulary], ["a", "hehe"]])
        contradicts = body.get("min_tokens", 0) > body["max_tokens"] or ("echo" in body and "logprobs" in body)
        if not contradicts:
            found.append(body)
    return found


async def whole(it: Stack, body: dict[str, Any]) -> tuple[int, Any]:
    got = await it.http.post("/v1/completions", json=body)
    told = got.json()
    if got.status_code != 200:
        return got.status_code, told["error"]
    details = told["usage"]["completion_tokens_details"]
    predicted = (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"])
    choices = [(c["text"], c["finish_reason"], c.get("stop_reason"), rounded(c["logprobs"])) for c in told["choices"]]
    return 200, (choices, told["usage"]["completion_tokens"], predicted)


def rounded(logprobs: dict[str, Any] | None) -> Any:
    """Passes of other shapes differ in the last bits, in float64 too."""
    text = json.dumps(logprobs)
    return json.loads(text, parse_float=lambda written: round(float(written), 6))


async def streamed(it: Stack, body: dict[str, Any]) -> dict[int, tuple[str, str]]:
    got = await it.http.post("/v1/completions", json={**body, "stream": True})
    lines = [line for line in got.text.split("\n\n") if line.startswith("data: {")]  # no comments, no end
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {
        i: (
            "".join(c["text"] for c in choices if c["index"] == i),
            "".join(c["finish_reason"] or "" for c in choices if c["index"] == i),
        )
        for i in {c["index"] for c in choices}
    }


@pytest.mark.parametrize("lookahead", [1, 4])
async def test_the_answer_is_that_without_speculation(lookahead: int) -> None:
    pace = Pace(patience_s=0.1)  # plain neighbours leave the drafts nothing to do in every tenth pass
    engines = {"make_target": lambda s: pace.target(target(s)), "make_draft": lambda s: pace.draft(twin(s))}
    async with stack(CODEC, (), "twin", lookahead, slots=12, **engines) as it:

        async def check(body: dict[str, Any]) -> bool:
            plain = await whole(it, {**body, "speculation": False})
            assert await whole(it, body) == plain, body
            if plain[0] != 200:
                return False
            told = {i: (text, finish) for i, (text, finish, _, _) in enumerate(plain[1][0])}
            assert await streamed(it, body) == told, body
            return True

        served = await asyncio.gather(*map(check, bodies(30, seed=lookahead)))
        assert sum(served) > 20
        assert it.recorder.total(telemetry.ACCEPTED) > 50
