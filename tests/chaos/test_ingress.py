"""An ingress replica is lost under answers of every kind: clients read an error that they can act on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import openai
import pytest

from actors.messages import GenerationRequest
from actors.settings import SamplingSettings
from benchmarks.support import emulated_application
from benchmarks.support.processes import find
from deployments import connect
from deployments.client.http_service import HttpService
from deployments.client.results import Result

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
T = TypeVar("T")
TOKENS = 200
"""Passes of an answer without drafts: some seconds, of which the kill needs one."""
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "speculation": False}


def prompt(number: int) -> tuple[int, ...]:
    return emulated_application.request(number).tokens or ()


async def streamed(url: str, begun: asyncio.Event) -> openai.APIError:
    """What the official client raises in the middle of a stream."""
    extra = {"ignore_eos": True, "speculation": False}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="emulated", prompt=list(prompt(1)), max_tokens=TOKENS, temperature=0, stream=True, extra_body=extra
        )
        try:
            async for _ in stream:
                begun.set()
        except openai.APIError as error:
            return error
    raise AssertionError("the stream came to its end")


async def whole(url: str) -> httpx.Response:
    """What is answered to a request whose answer had not begun."""
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/v1/completions", json={"prompt": list(prompt(2)), **ASKED}, timeout=60)


@dataclass
class Seen:
    """What the clients of a lost ingress replica saw, and how many seconds after it was struck."""

    error: openai.APIError
    answer: httpx.Response
    result: Result
    seconds: list[float]


async def lose_the_ingress(url: str, how: signal.Signals) -> Seen:
    """Three clients are in the middle of an answer: the official one, one that waits for the whole, and ours."""
    begun, service = asyncio.Event(), HttpService(url)
    seconds = list[float]()
    with connect(url) as client:

        async def timed(work: Awaitable[T]) -> T:
            found = await work
            seconds.append(time.monotonic() - struck)
            return found

        ours = asyncio.create_task(asyncio.to_thread(client.generate, [prompt(3)], **ASKED))
        official, unbegun = asyncio.create_task(streamed(url, begun)), asyncio.create_task(whole(url))
        await begun.wait()

        async def all_run() -> bool:
            return (await service.status())["sessions"] == 3

        await emulated_application.until(all_run, 60.0)
        (ingress,) = await find("emulated", "ingress")
        struck = time.monotonic()
        ingress.send(how)
        error, answer, (result,) = await asyncio.gather(timed(official), timed(unbegun), timed(ours))
    await service.close()
    return Seen(error, answer, result, seconds)


def check(seen: Seen) -> None:
    """Two errors that say why, and when to ask again; and the right tokens for who did."""
    assert seen.error.code == "ingress_lost"
    assert (seen.answer.status_code, seen.answer.json()["error"]["code"]) == (503, "ingress_lost")
    assert int(seen.answer.headers["retry-after"]) >= 1
    sampling = SamplingSettings(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    truth = emulated_application.truth(GenerationRequest("x", sampling, tokens=prompt(3)))
    assert (seen.result.error, seen.result.tokens) == (None, list(truth))


def test_clients_of_a_killed_ingress_replica_read_why_and_when_to_ask_again(emulated_url: str) -> None:
    """The orchestrator of these streams is in the same process; a client that asks again is served by the next one."""
    check(asyncio.run(lose_the_ingress(emulated_url, signal.SIGKILL)))


@pytest.mark.slow
def test_clients_of_a_frozen_one_read_the_same_when_serve_has_found_it(emulated_url: str) -> None:
    """It never wakes up: Serve's health checks find it, and end it."""
    seen = asyncio.run(lose_the_ingress(emulated_url, signal.SIGSTOP))
    print("told after " + ", ".join(f"{one:.1f} s" for one in seen.seconds))
    check(seen)
