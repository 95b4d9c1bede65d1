"""Trees in one pass of the transformers engine against full forward passes of each branch by itself, in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from small_llamas import VOCABULARY, causal_lm, full_logits, module, opening, some_tokens

from actors.engines.protocol import Proposal, Row
from actors.engines.transformers import causal_lm as causal_lm_module
from actors.engines.transformers.graphs import run_again
from actors.engines.transformers.slots import Layout, SlotCache, SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.messages import VerificationResult
from actors.settings import LookaheadSettings, TargetSettings

SETTINGS = TargetSettings(slots=4, context=64, lookahead=LookaheadSettings(tree=16))


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """By full forward passes, without slots."""
    reference, tokens = module(), list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def others(token: int, count: int) -> list[int]:
    return [(token + 1 + i) % VOCABULARY for i in range(count)]


def bushy(truth: Sequence[int], rng: random.Random) -> Proposal:
    """The truth among wrong siblings, in any order, each with children of its own."""
    tokens: list[int] = []
    parents: list[int] = []
    at = -1
    for token in truth:
        siblings = [token, *others(token, 2)]
        rng.shuffle(siblings)
        first = len(tokens)
        tokens += siblings
        parents += [at] * 3
        wrong = first + (siblings.index(token) + 1) % 3
        tokens.append(token)  # below a wrong sibling, too
        parents.append(wrong)
        at = first + siblings.index(token)
    return Proposal(tuple(tokens), (0.5,) * len(tokens), (), tuple(parents))


def decide(target: TransformersTarget, rows: Sequence[Row]) -> list[VerificationResult]:
    results = target.forward(rows)
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


class BatchedLayout(Layout):
    """As on an accelerator: short rows attend as one padded batch."""

    def __init__(self, cache: SlotCache, rows: Sequence[SlotRow]) -> None:
        super().__init__(cache, rows)
        self.batch()


@pytest.mark.parametrize("way", ["by slot", "as a batch", "as a graph"])
def test_every_node_gets_the_logits_of_its_own_branch(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Two trees and a chunk of a prompt in one pass."""
    model, reference, rng = causal_lm(), module(), random.Random(0)
    if way == "as a batch":
        monkeypatch.setattr(causal_lm_module, "Layout", BatchedLayout)
    if way == "as a graph":
        model = causal_lm_module.CausalLM(module(), name="graphed", record=run_again)
    target = TransformersTarget(model, SETTINGS)
    prompts = [some_tokens(9, 1), some_tokens(5, 2)]
    seen: list[torch.Tensor] = []
    run = model.run

    def spy(*arguments: object) -> torch.Tensor:
        seen.append(run(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(model, "run", spy)
    rows = []
    for slot, prompt in enumerate(prompts):
        target.attach(slot, opening(f"s{slot}", prompt, temperature=0))
        target.forward([Row(slot, prompt[:-1], 0, decide=False)])
        proposal = bushy([rng.randrange(VOCABULARY) for _ in range(3)], rng)
        rows.append(Row(slot, (prompt[-1], *proposal.tokens), len(prompt) - 1, proposal))
    target.attach(3, opening("s3", some_tokens(20, 3), temperature=0))
    rows.insert(1, Row(3, some_tokens(20, 3)[:5], 0, decide=False))
    target.forward(rows)
    logits = iter(seen[-1])
    for slot, row in ((0, rows[0]), (1, rows[2])):
        branches: list[list[int]] = [[]]
        for token, parent in zip(row.proposal.tokens, row.proposal.parents, strict=True):
            branches.append([*branches[parent + 1], token])
        for branch in branches:
            expected = full_logits(reference, [*prompts[slot], *branch])[-1]
            assert torch.allclose(next(logits), expected, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_path_that_came_true_is_left_in_the_prefix(depth: int) -> None:
    """Decoding goes on from it, by plain tokens, as if it had always been there; in two slots at once."""
    target, rng = TransformersTarget(causal_lm(), SETTINGS), random.Random(depth)
    prompts = [some_tokens(7, 4), some_tokens(11, 5)]
    truths = [greedy(prompt, depth + 6) for prompt in prompts]
    rows = []
    for slot, prompt in enumerate(prompts):
        target.attach(slot, opening(f"s{slot}", prompt, temperature=0))
        proposal = bushy(truths[slot][:depth], rng)
        rows.append(Row(slot, (*prompt, *proposal.tokens), 0, proposal))
    results = decide(target, rows)
    for slot, result in enumerate(results):
        assert result.tokens == tuple(truths[slot][: depth + 1])
        assert result.accepted == depth
        target.record(slot, result.tokens)
    said = [list(result.tokens) for result in results]
    for _ in range(5):
        steps = [Row(slot, (said[slot][-1],), len(prompt) + len(said[slot]) - 1) for slot, prompt in enumerate(prompts)]
        for slot, result in enumerate(decide(target, steps)):
            said[slot] += result.tokens
            target.record(slot, result.tokens)
    assert said == truths


def test_trees_follow_each_branchs_own_history() -> None:
    """Bad words, penalties and min_tokens: the same answer by trees of anything as by plain decoding."""
    rng = random.Random(9)
    settings: list[dict[str, object]] = [
        {"temperature": 0, "repetition_penalty": 1.8},
        {"temperature": 0.9, "frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0, "bad_words": ((5,), (8, 9), (11, 12, 13))},
        {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": (3, 4, 5, 6, 7)},
    ]
    for n, fields in enumerate(settings):
        prompt = some_tokens(6, n)
        target = TransformersTarget(causal_lm(), SETTINGS)
        target.attach(0, opening("plain", prompt, seed=n, **fields))
        plain: list[int] = []
        for i in range(9):
            row = Row(0, (plain[-1],) if i else prompt, len(prompt) + i - 1 if i else 0)
            plain += decide(target, [row])[0].tokens
            target.record(0, plain[-1:])
        target.attach(1, opening("tree", prompt, seed=n, **fields))
        said: list[int] = []
        while len(said) < 9:
            proposal = bushy(plain[len(said) : len(said) + 3], rng)
            start = len(prompt) + len(said) - 1 if said else 0
            row = Row(1, (*(said[-1:] or prompt), *proposal.tokens), start, proposal)
            result = decide(target, [row])[0]
            assert result.accepted == min(3, 9 - len(said))
            said += result.tokens
            target.record(1, result.tokens)
        assert said[:9] == plain


def test_without_trees_the_card_says_so() -> None:
    assert TransformersTarget(causal_lm(), SETTINGS).card().trees
    assert not TransformersTarget(causal_lm(), SETTINGS, trees=False).card().trees
