"""Two tensor-parallel ranks of the transformers engine, each in a process of its own on this machine's CPU."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_llama import random_llama

from actors.engines.lookup.prompt_lookup import PromptLookupDraft
from actors.engines.protocol import Proposal, Row
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.ranks import LeadingLM, RankGroup, Rendezvous, follow
from actors.engines.transformers.target import TransformersTarget
from actors.errors import EngineError, UnavailableError
from actors.messages import OpenSequence
from actors.orchestrator.admission import Admission
from actors.settings import DraftSettings, OrchestratorSettings, SamplingSettings, TargetSettings
from actors.text.answer_comparison import Comparison, Reference
from actors.text.emulated_codec import EmulatedCodec
from cluster.models.weights import load_module

VOCABULARY = 96
SETTINGS = TargetSettings(slots=4, context=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four heads over two key heads, so one key head for each rank."""
    path = tmp_path_factory.mktemp("ranks")
    random_llama(VOCABULARY, hidden_size=64, intermediate_size=96).save_pretrained(path)
    return str(path)


def one_rank(folder: str) -> TransformersTarget:
    return TransformersTarget(CausalLM(load_module(folder, torch.float32), name="one", packed=None), SETTINGS)


def second(folder: str, meeting: Rendezvous) -> None:
    """What the process of rank 1 runs."""
    torch.set_num_threads(1)
    group = RankGroup.join(1, meeting)
    follow(CausalLM(load_module(folder, torch.float32, ranks=2), name="second", packed=None), group)


class Pair:
    """A target whose second rank is a child process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.child: Any = None
        self.model: LeadingLM | None = None

    def _invite(self, meeting: Rendezvous) -> None:
        self.child = multiprocessing.get_context("spawn").Process(target=second, args=(self._folder, meeting))
        self.child.start()

    def build(self) -> TransformersTarget:
        group = RankGroup.lead("127.0.0.1", 2, self._invite)
        module = load_module(self._folder, torch.float32, ranks=2)
        self.model = LeadingLM(module, name="two", packed=None, group=group)
        return TransformersTarget(self.model, SETTINGS)


@pytest.fixture
def pair(folder: str) -> Iterator[Pair]:
    pair = Pair(folder)
    yield pair
    if pair.child is not None:
        pair.child.kill()
        pair.child.join()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def options(make_target: Callable[[], TransformersTarget]) -> dict[str, Any]:
    return {
        "make_target": make_target,
        "make_draft": lambda: PromptLookupDraft(DraftSettings()),
        "target_settings": SETTINGS,
        "settings": OrchestratorSettings(discovery_period_s=0.02, unavailable_timeout_s=0.2),
        "admission": Admission(EmulatedCodec(VOCABULARY), VOCABULARY, 96),
    }


async def test_two_ranks_say_what_one_says_and_a_dead_rank_fails_the_replica(
    folder: str, pair: Pair, start: Any, request_for: Any
) -> None:
    prompts = [tuple(range(5 + i, 9 + 2 * i)) for i in range(6)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9}]
    async with start(**options(lambda: one_rank(folder))) as one:
        while not one.orchestrator.ready():
            await asyncio.sleep(0.01)
        references = []
        for i, prompt in enumerate(prompts):
            request = request_for(f"one-{i}", prompt, margins=True, ignore_eos=True, **kinds[i % 3])
            deltas = [delta async for delta in one.orchestrator.generate(request)]
            tokens = [token for delta in deltas for token in delta.tokens]
            references.append(Reference(tokens, [margin for delta in deltas for margin in delta.margins]))
    async with start(**options(pair.build)) as two:
        await two.actors["target-0"].card()
        while not two.orchestrator.ready():
            await asyncio.sleep(0.01)
        requests = [request_for(f"two-{i}", p, ignore_eos=True, **kinds[i % 3]) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*(two.tokens(request) for request in requests))
        comparison = Comparison()
        for i, (reference, answer) in enumerate(zip(references, answers, strict=True)):
            comparison.add(f"prompt {i}", reference, answer)
        assert comparison.same, str(comparison.different)
        assert comparison.tokens > 200

        pair.child.kill()
        pair.child.join()
        with pytest.raises(UnavailableError):
            await two.tokens(request_for("after", prompts[0]))
        with pytest.raises(EngineError, match="a rank of the tensor-parallel group"):
            await two.actors["target-0"].ping()


def test_each_rank_holds_its_share(folder: str, pair: Pair) -> None:
    target = pair.build()
    assert 2 * target.cache_bytes == one_rank(folder).cache_bytes
    assert pair.model is not None
    pair.model.disband()
    pair.child.join(60)
    assert pair.child.exitcode == 0


def test_a_branch_that_came_true_is_copied_on_every_rank(folder: str, pair: Pair) -> None:
    """Its nodes stood beside the prefix; what follows attends to their keys, half of which the other rank holds."""
    prompt, truth = tuple(range(5, 14)), list[int]()
    targets = [one_rank(folder), pair.build()]
    for target in targets:
        sampling = SamplingSettings(temperature=0, max_tokens=20)
        target.attach(0, OpenSequence("s", prompt, sampling, seed=0))
    for i in range(9):
        truth += decided(targets[0], Row(0, (truth[-1],) if i else prompt, len(prompt) + i - 1 if i else 0))
    wrong = (truth[0] + 1) % VOCABULARY
    branch = Proposal((wrong, *truth[:3]), (0.6, 0.3, 0.9, 0.9), (), (-1, -1, 1, 2))
    said = decided(targets[1], Row(0, prompt + branch.tokens, 0, branch))
    assert said == truth[:4]
    while len(said) < 9:
        said += decided(targets[1], Row(0, (said[-1],), len(prompt) + len(said) - 1))
    assert said == truth
    assert pair.model is not None
    pair.model.disband()
    pair.child.join(60)


def decided(target: TransformersTarget, row: Row) -> list[int]:
    """What a pass over one row commits."""
    (result,) = target.forward([row])
    assert result is not None
    target.record(row.slot, result.tokens)
    return list(result.tokens)


def test_a_group_that_does_not_come_together_is_an_error() -> None:
    with pytest.raises(EngineError, match="did not meet"):
        RankGroup.lead("127.0.0.1", 2, lambda meeting: None, patience_s=0.5)
