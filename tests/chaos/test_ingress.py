"""An ingress replica is killed under answers of every kind: clients read an error that they can act on."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import openai
import pytest

from actors.messages import GenerationRequest
from actors.settings import SamplingSettings
from deployments import connect, trial
from deployments.remote import HttpService
from deployments.victims import find

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
TOKENS = 200
"""Passes of an answer without drafts: some seconds, of which the kill needs one."""
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "speculation": False}


def prompt(number: int) -> tuple[int, ...]:
    return trial.request(number).tokens or ()


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


def test_clients_of_a_killed_ingress_replica_read_why_and_when_to_ask_again(emulated_url: str) -> None:
    """The orchestrator of these streams is in the same process; a client that asks again is served by the next one."""

    async def run() -> None:
        begun, service = asyncio.Event(), HttpService(emulated_url)
        with connect(emulated_url) as client:
            ours = asyncio.create_task(asyncio.to_thread(client.generate, [prompt(3)], **ASKED))
            official = asyncio.create_task(streamed(emulated_url, begun))
            unbegun = asyncio.create_task(whole(emulated_url))
            await begun.wait()

            async def all_run() -> bool:
                return (await service.status())["sessions"] == 3

            await trial.until(all_run, 10.0)
            (ingress,) = await find("emulated", "ingress")
            ingress.send(signal.SIGKILL)
            error, answer, (result,) = await official, await unbegun, await ours
        await service.close()
        assert error.code == "ingress_lost"
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ingress_lost")
        assert int(answer.headers["retry-after"]) >= 1
        sampling = SamplingSettings(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        truth = trial.truth(GenerationRequest("x", sampling, tokens=prompt(3)))
        assert (result.error, result.tokens) == (None, list(truth))

    asyncio.run(run())
