"""Suffix drafts leave the output as plain decoding, whatever their memory holds. Needs the extra `suffix`."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from on_off import sweep
from small_llamas import some_tokens
from test_on_off import TOKENS, grammars, prompts, small_target
from test_speculative_loop import COUNT, MIXED, TREE, generate, plain

from actors.engines.lookup.suffix_draft import SuffixDraft
from actors.engines.lookup.suffix_memory import SuffixMemory, suffix_caches
from actors.messages import OpenSequence
from actors.settings import DraftSettings, MemorySettings, Rule, TreeSettings


def suffix(rule: Rule = "coupled", tree: TreeSettings = TREE, slots: int = 8) -> SuffixDraft:
    memory = SuffixMemory(MemorySettings(), suffix_caches())
    return SuffixDraft(DraftSettings(slots=slots, context=128, tree=tree, rule=rule), memory)


def again(round_: int) -> list[OpenSequence]:
    return [replace(request, sequence=f"{request.sequence}-{round_}") for request in MIXED]


def closed(draft: SuffixDraft, requests: list[OpenSequence]) -> None:
    for request in requests:
        draft.close(request.sequence)


def test_every_setting_alone_and_combined() -> None:
    """60 prompts, answered at once from one memory, offers late, lost and twice."""
    tree = TreeSettings(width=32, branching=2, depth=5, nodes=24)
    rng = random.Random(5)
    drafts = suffix(tree=tree, slots=16)
    found = sweep(small_target(), prompts(60, rng), rng, tokens=TOKENS, grammars=grammars(), draft=lambda _: drafts)
    assert found.tally.same, found.tally.different
    assert found.tally.ties == 0
    assert found.proposed > 10


def test_asked_again_answers_come_from_memory_and_are_the_same() -> None:
    draft = suffix()
    first, second = again(1), again(2)
    before, cold = generate(first, draft)
    closed(draft, first)
    after, warm = generate(second, draft)
    for request, one, other in zip(MIXED, first, second, strict=True):
        assert before[one.sequence] == after[other.sequence] == plain(request), request.sequence
    assert warm.accepted > cold.accepted
    # A whole answer in memory takes ceil(24 / (4 + 1)) = 5 passes; ambiguous runs of one or two tokens cost some more.
    assert 5 <= warm.passes < cold.passes


def test_an_identical_request_of_unlike_tokens_takes_five_passes() -> None:
    """Four drafts and a bonus to a pass: 5, 5, 5, 5 and 4 of 24 tokens, 19 of them drafts, none of which is wrong."""
    draft = suffix()
    request = replace(MIXED[2], prompt=some_tokens(20, 3))
    expected = plain(request)
    assert len({*pairwise(expected)}) == COUNT - 1  # no pair of tokens occurs twice
    generate([request], draft)
    draft.close(request.sequence)
    outputs, tally = generate([replace(request, sequence="again")], draft, steps=8)
    assert outputs["again"] == expected
    assert (tally.passes, tally.proposed, tally.accepted) == (5, 19, 19)


@pytest.mark.parametrize("kind", ["false continuations", "one token"])
def test_poisoned_memory_costs_speed_only(kind: str) -> None:
    draft, rng = suffix(), random.Random(6)
    for n, request in enumerate(MIXED):
        lie = [rng.randrange(3, 97) for _ in range(COUNT)] if kind == "false continuations" else [7] * COUNT
        poison = replace(request, sequence=f"poison-{n}")
        draft.open(poison)
        draft.advance(poison.sequence, lie)
        draft.close(poison.sequence)
    requests = again(1)
    outputs, tally = generate(requests, draft)
    for request, asked in zip(MIXED, requests, strict=True):
        assert outputs[asked.sequence] == plain(request), request.sequence
    assert tally.proposed > tally.accepted
