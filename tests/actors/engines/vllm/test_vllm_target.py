"""A vLLM target with a remote draft, in front of a real vLLM: what it says does not depend on drafts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from vllm_stack import Answer, Stack, checkpoint, engines, model, module, prompts, stack

from actors.errors import EngineError, InvalidSettingError
from actors.settings import SamplingSettings
from actors.text.answer_comparison import Comparison, Reference

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(Path(tmp_path_factory.mktemp("tiny")))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tiny(folder: str) -> AsyncIterator[Stack]:
    """One engine for all tests of this module: it takes a quarter of a minute to start."""
    async with stack(model(folder)) as running:
        yield running


def compared(off: list[Answer], on: list[Answer]) -> Comparison:
    comparison = Comparison()
    for i, (one, other) in enumerate(zip(off, on, strict=True)):
        comparison.add(f"prompt {i}", Reference(one.tokens, one.margins), other.tokens)
    return comparison


def usage(answers: list[Answer]) -> tuple[int, int]:
    """Drafts proposed and accepted."""
    found = [answer.last.usage for answer in answers]
    return sum(u.proposed_tokens for u in found if u), sum(u.accepted_tokens for u in found if u)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_on_equals_off_over_100_prompts(tiny: Stack, temperature: float) -> None:
    asked = prompts(100)
    off = await tiny.ask_all(asked, temperature=temperature, max_tokens=24, speculation=False, margins=True)
    on = await tiny.ask_all(asked, temperature=temperature, max_tokens=24)
    comparison = compared(off, on)
    proposed, accepted = usage(on)
    print(f"temperature {temperature:g}: {comparison}; {accepted} of {proposed} drafts accepted")
    assert comparison.same, str(comparison.different)
    assert comparison.ties <= 2
    assert usage(off) == (0, 0)
    assert accepted > 600  # of 2400 tokens: the drafts were used
    assert proposed > accepted  # and some were wrong


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 0.3},
        {"logit_bias": {17: -100.0, 40: 3.0}},
        {"frequency_penalty": 1.5},
        {"presence_penalty": -1.0},
        {"repetition_penalty": 1.4},
        {"top_k": 5},
        {"top_p": 0.6},
        {"allowed_token_ids": tuple(range(20, 60))},
        {"bad_words": ((15,), (20, 21))},
        {"min_tokens": 30, "ignore_eos": False},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
async def test_every_setting_works_with_drafts(tiny: Stack, sampling: dict[str, Any], temperature: float) -> None:
    """Among them those that vLLM drops, or refuses, when it speculates."""
    asked = prompts(6, seed=3)
    off = await tiny.ask_all(asked, temperature=temperature, speculation=False, margins=True, **sampling)
    on = await tiny.ask_all(asked, temperature=temperature, **sampling)
    comparison = compared(off, on)
    assert comparison.same, str(comparison.different)
    plain = await tiny.ask_all(asked, temperature=temperature, speculation=False)
    assert usage(on)[1] > 0
    said = {token for answer in on for token in answer.tokens}
    if "logit_bias" in sampling:
        assert 17 not in said
    if "allowed_token_ids" in sampling:
        assert said <= set(range(20, 60))
    if "bad_words" in sampling:
        assert 15 not in said
        assert not any(pair == (20, 21) for a in on for pair in zip(a.tokens, a.tokens[1:], strict=False))
    if temperature or ("min_p" not in sampling and "top_k" not in sampling and "top_p" not in sampling):
        assert [a.tokens for a in plain] != [a.tokens for a in on] or "min_tokens" in sampling


async def test_an_answer_ends_where_plain_decoding_ends(tiny: Stack) -> None:
    """Every offset inside a block: a stop token is the last one, a cap leaves exactly so many."""
    prompt = prompts(1, seed=5)[0]
    reference = (await tiny.ask(prompt, speculation=False, max_tokens=16)).tokens
    for count in range(1, 13):
        capped = await tiny.ask(prompt, max_tokens=count)
        assert (capped.tokens, capped.last.finish) == (reference[:count], "length")
        assert capped.last.usage is not None
        assert capped.last.usage.completion_tokens == count
        stop = reference[count - 1]
        stopped = await tiny.ask(prompt, max_tokens=16, stop_token_ids=(stop,))
        assert (stopped.tokens, stopped.last.finish) == (reference[: reference.index(stop) + 1], "stop")


async def test_log_probabilities_are_the_targets(tiny: Stack) -> None:
    prompt = prompts(1, seed=6)[0]
    on = await tiny.ask(prompt, logprobs=3, temperature=0.8)
    off = await tiny.ask(prompt, logprobs=3, temperature=0.8, speculation=False)
    assert on.tokens == off.tokens
    assert usage([on])[1] > 0
    with torch.inference_mode():
        logits = module()(input_ids=torch.tensor([[*prompt, *on.tokens]])).logits[0].log_softmax(-1)
    assert len(on.alternatives) == len(on.tokens) == len(off.alternatives)
    for i, (token, one, other) in enumerate(zip(on.tokens, on.alternatives, off.alternatives, strict=True)):
        row = logits[len(prompt) + i - 1]
        best = row.topk(3)
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert other.logprob == pytest.approx(one.logprob, abs=1e-3)


async def test_sixteen_mixed_requests_at_once(tiny: Stack) -> None:
    """Twice as many as there are slots; each says what it says alone."""
    asked = prompts(16, seed=7)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "max_tokens": 60},
        {"temperature": 0.7, "top_p": 0.8, "logprobs": 2, "max_tokens": 9},
        {"frequency_penalty": 1.0, "stop_token_ids": tuple(range(60, 80))},
        {"temperature": 1.0, "speculation": False},
        {"logit_bias": {9: 4.0}, "min_p": 0.05, "temperature": 1.2},
    ]
    mixed = [kinds[i % len(kinds)] for i in range(16)]
    together = await asyncio.gather(
        *(tiny.ask(prompt, seed=i, **kind) for i, (prompt, kind) in enumerate(zip(asked, mixed, strict=True)))
    )
    alone = [
        await tiny.ask(prompt, seed=i, margins=True, **kind)
        for i, (prompt, kind) in enumerate(zip(asked, mixed, strict=True))
    ]
    comparison = compared(alone, together)
    assert comparison.same, str(comparison.different)
    assert [a.last.finish for a in together] == [a.last.finish for a in alone]


async def test_an_answer_goes_on_from_where_another_replica_left_it(tiny: Stack) -> None:
    """With a committed prefix, the tokens that follow are those that would have followed."""
    from actors.messages import GenerationRequest

    prompt = prompts(1, seed=8)[0]
    whole = (await tiny.ask(prompt, seed=3, temperature=0.9, frequency_penalty=0.5)).tokens
    sampling = SamplingSettings(temperature=0.9, frequency_penalty=0.5, max_tokens=40, ignore_eos=True, seed=3)
    request = GenerationRequest(id="resumed", sampling=sampling, tokens=prompt, committed=tuple(whole[:11]))
    rest = [token async for delta in tiny.orchestrator.generate(request) for token in delta.tokens]
    assert rest == whole[11:]
    over = GenerationRequest(id="over", sampling=sampling, tokens=prompt, committed=tuple(whole))
    [last] = [delta async for delta in tiny.orchestrator.generate(over)]
    assert (last.tokens, last.finish) == ((), "length")


async def test_what_cannot_be_chosen_ends_the_request_and_nothing_else(tiny: Stack) -> None:
    prompt = prompts(1, seed=9)[0]
    with pytest.raises(InvalidSettingError, match="no token is left"):
        await tiny.ask(prompt, allowed_token_ids=(4,), bad_words=((4,),))
    neighbour = asyncio.create_task(tiny.ask(prompt))
    with pytest.raises(InvalidSettingError, match="no token is left"):
        await tiny.ask(prompt, allowed_token_ids=(4,), bad_words=((4,),))
    assert len((await neighbour).tokens) == 40


async def test_closed_streams_give_everything_back(tiny: Stack) -> None:
    """Requests dropped at random moments leave no sequence anywhere, and the next answers are as ever."""
    asked = prompts(40, seed=10)
    reference = await tiny.ask_all(asked[:4])
    chance = random.Random(1)

    async def broken_off(prompt: tuple[int, ...], after: int) -> None:
        seen = 0
        task = asyncio.current_task()
        assert task is not None
        from actors.messages import GenerationRequest

        sampling = SamplingSettings(temperature=0.0, max_tokens=100, ignore_eos=True, seed=0)
        request = GenerationRequest(id=f"broken-{prompt}-{after}", sampling=sampling, tokens=prompt)
        stream = tiny.orchestrator.generate(request)
        async for delta in stream:
            seen += len(delta.tokens)
            if seen >= after:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(broken_off(prompt, chance.randrange(1, 40)) for prompt in asked))
    while tiny.target.active or tiny.target.queued:
        await asyncio.sleep(0.01)
    assert [a.tokens for a in await tiny.ask_all(asked[:4])] == [a.tokens for a in reference]
    assert tiny.target.cached_positions == 0


async def test_two_ranks_say_what_one_says_and_a_dead_rank_fails_the_replica(tiny: Stack, folder: str) -> None:
    asked = prompts(12, seed=1)
    alone = engines()
    async with stack(model(folder, tensor_parallel_size=2)) as two:
        comparison = Comparison()
        for temperature in (0.0, 1.0):
            one = await tiny.ask_all(asked, temperature=temperature, speculation=False, margins=True)
            for speculation in (True, False):
                answers = await two.ask_all(asked, temperature=temperature, speculation=speculation)
                for i, (expected, answer) in enumerate(zip(one, answers, strict=True)):
                    comparison.add(f"{temperature} {i}", Reference(expected.tokens, expected.margins), answer.tokens)
                assert (usage(answers)[1] > 100) == speculation
        print(f"two ranks against one: {comparison}")
        assert comparison.same, str(comparison.different)

        running = asyncio.create_task(two.ask(asked[0], max_tokens=150))
        workers = [pid for pid in engines() - alone if not psutil.Process(pid).children()]
        assert len(workers) == 2
        os.kill(workers[-1], signal.SIGKILL)
        problem = None
        while problem is None:  # until the health check notices
            try:
                await two.target.ping()
            except EngineError as error:
                problem = error
            await asyncio.sleep(0.02)
        assert "vLLM died" in str(problem)
        running.cancel()
    assert engines() == alone


async def test_the_exchange_is_one_question_a_pass(tiny: Stack) -> None:
    """Whatever the number of sequences (what it takes is in `make bench-vllm`): 40 tokens are 40 passes at most."""
    for count in (1, 8):
        before = tiny.target.exchange.passes
        await tiny.ask_all(prompts(count, seed=11))
        assert 8 <= tiny.target.exchange.passes - before <= 40 + count  # a prompt may come a pass after another
