"""Draft and target in one loop, without actors: what comes out is plain decoding, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from small_llamas import EOS, VOCABULARY, causal_lm, full_logits, module, opening, some_tokens

from actors.algorithms.outcome_tree import Forest
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.engines.lookup.prompt_lookup import PromptLookupDraft
from actors.engines.protocol import DraftModel, Expand, ModelCard, Proposal, Ranked, Row
from actors.engines.transformers.draft import TransformersDraft
from actors.engines.transformers.target import TransformersTarget
from actors.messages import OpenSequence, prefix_key
from actors.settings import DraftSettings, Rule, TargetSettings, TreeSettings

COUNT = 24
TREE = TreeSettings(width=6, branching=3, depth=6, nodes=24, min_reach=0.001)


class Foe:
    """A draft that proposes two tokens drawn without looking at anything."""

    def __init__(self) -> None:
        self._drawn = 0

    def card(self) -> ModelCard:
        return ModelCard("foe", VOCABULARY, 128, 16)

    def open(self, opening: OpenSequence) -> None: ...

    def advance(self, sequence: str, tokens: Sequence[int]) -> None: ...

    def close(self, sequence: str) -> None: ...

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        answers = []
        for request in requests:
            self._drawn += 1
            tokens = (self._drawn * 7919 % VOCABULARY, self._drawn * 104729 % VOCABULARY)
            answers.append(Ranked(request.sequence, request.path, tokens, (0.6, 0.3)))
        return answers


def draft_of(kind: str, rule: Rule) -> DraftModel:
    settings = DraftSettings(slots=8, context=128, prefill_chunk=16, tree=TREE, rule=rule)
    if kind == "foe":
        return Foe()
    if kind == "lookup":
        return PromptLookupDraft(settings)
    if kind == "narrow":
        return TransformersDraft(causal_lm(vocabulary=torch.arange(0, VOCABULARY, 2)), settings)
    return TransformersDraft(causal_lm(0 if kind == "twin" else 5), settings)


@dataclass
class Tally:
    proposed: int = 0
    accepted: int = 0
    passes: int = 0


def generate(
    requests: Sequence[OpenSequence],
    draft: DraftModel | None,
    rule: Rule = "coupled",
    steps: int = 3,
    lookahead: int = 4,
) -> tuple[dict[str, list[int]], Tally]:
    """Run all requests side by side until each has COUNT tokens. Each pass sees what `steps` draft steps made."""
    target = TransformersTarget(causal_lm(eos=(EOS,)), TargetSettings(slots=8, context=128, rule=rule))
    forest, tally = Forest(TREE), Tally()
    slots = {request.sequence: slot for slot, request in enumerate(requests)}
    outputs: dict[str, list[int]] = {request.sequence: [] for request in requests}
    known: dict[str, dict[int, Ranked]] = {}
    for request in requests:
        target.attach(slots[request.sequence], request)
        if draft is not None:
            draft.open(request)
            forest.open(request.sequence, prefix_key(request.prompt), len(request.prompt))
        known[request.sequence] = {}
    cached = dict.fromkeys(slots, 0)
    while running := [request for request in requests if len(outputs[request.sequence]) < COUNT]:
        assert tally.passes < 40 * COUNT
        if draft is not None:
            for _ in range(steps):
                asked = [a for a in forest.frontier(TREE.width) if len(outputs[a.sequence]) < COUNT]
                answers = draft.expand(asked)
                forest.grow(answers)
                for answer in answers:
                    request = next(r for r in requests if r.sequence == answer.sequence)
                    so_far = (*request.prompt, *outputs[answer.sequence], *answer.path)
                    known[answer.sequence][prefix_key(so_far)] = answer
        rows = []
        for request in running:
            sequence = request.sequence
            tokens = [*request.prompt, *outputs[sequence]]
            proposal = path_of(known[sequence], tokens, min(lookahead, COUNT - len(outputs[sequence]) - 1))
            start = cached[sequence]
            rows.append(Row(slots[sequence], (*tokens[start:], *proposal.tokens), start, proposal))
        tally.passes += 1
        for request, row, outcome in zip(running, rows, target.forward(rows), strict=True):
            assert outcome is not None
            sequence = request.sequence
            tally.proposed += len(row.proposal.tokens)
            tally.accepted += outcome.accepted
            length = len(request.prompt) + len(outputs[sequence])
            target.record(row.slot, outcome.tokens)
            outputs[sequence].extend(outcome.tokens)
            cached[sequence] = length + len(outcome.tokens) - 1
            if draft is not None:
                draft.advance(sequence, outcome.tokens)
                forest.commit(sequence, length, outcome.tokens)
    return outputs, tally


def path_of(known: dict[int, Ranked], tokens: Sequence[int], limit: int) -> Proposal:
    """The sampled chain past `tokens`."""
    key, drafts, confidences, supports = prefix_key(tokens), [], [], []
    while len(drafts) < limit and key in known and known[key].tokens:
        answer = known[key]
        drafts.append(answer.tokens[0])
        confidences.append(answer.confidences[0])
        if answer.support is not None:
            supports.append(answer.support)
        key = prefix_key(answer.tokens[:1], key)
    return Proposal(tuple(drafts), tuple(confidences), tuple(supports))


def plain(request: OpenSequence, rule: Rule = "coupled") -> list[int]:
    """By one full forward pass per token, without slots, drafts or cache."""
    reference, output = module(), []
    for _ in range(COUNT):
        logits = full_logits(reference, (*request.prompt, *output))[-1:].clone()
        block = Block(
            request.sampling,
            request.seed,
            len(request.prompt) + len(output),
            request.prompt,
            output,
            rule=rule,
            eos=(EOS,),
        )
        output.extend(verify_blocks(logits, [block])[0].tokens)
    return output


MIXED = [
    opening("greedy", some_tokens(9, 1), temperature=0),
    opening("seeded", some_tokens(4, 2), 11, temperature=0.8),
    opening("hot", some_tokens(13, 3), 12, temperature=1.3, top_p=0.95),
    opening("top-k", some_tokens(1, 4), 13, temperature=0.7, top_k=5, min_p=0.02),
    opening(
        "penalties",
        some_tokens(6, 5),
        14,
        temperature=0.6,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    ),
    opening("greedy-penalties", some_tokens(6, 5) * 3, temperature=0, repetition_penalty=1.3),
    opening("biased", some_tokens(5, 6), 15, logit_bias={7: 4.0, 9: -100.0}, min_tokens=8, bad_words=((7, 7),)),
]


@pytest.mark.parametrize("kind", ["twin", "other", "narrow", "lookup", "foe"])
def test_any_draft_leaves_the_output_as_plain_decoding(kind: str) -> None:
    outputs, tally = generate(MIXED, draft_of(kind, "coupled"))
    assert tally.proposed > 0
    for request in MIXED:
        assert outputs[request.sequence] == plain(request), request.sequence


def test_batched_plain_decoding_is_plain_decoding() -> None:
    outputs, tally = generate(MIXED, None)
    assert tally.passes == COUNT
    for request in MIXED:
        assert outputs[request.sequence] == plain(request), request.sequence


def test_a_twin_is_always_accepted() -> None:
    """Equal weights, equal noise, equal settings: the draft's best is the target's choice, greedy and sampled."""
    requests = [
        opening("a", some_tokens(8, 1), temperature=0),
        opening("b", some_tokens(5, 2), 3, temperature=1.0),
        opening("c", some_tokens(6, 3), 4, temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    ]
    _, tally = generate(requests, draft_of("twin", "coupled"), steps=8)
    assert tally.accepted == tally.proposed > 0
    assert tally.passes < COUNT / 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_twin_is_always_accepted_by_the_probabilistic_rules(rule: Rule) -> None:
    """p = q where top_k keeps fewer ids than q's support, so min(1, p/q) = 1 up to rounding.

    A rejection needs a uniform draw within some 1e-7 of 1: false alarm below 1e-4 over all draws here.
    """
    requests = [opening(f"s{i}", some_tokens(5, i), i, temperature=0.9, top_k=8) for i in range(4)]
    _, tally = generate(requests, draft_of("twin", rule), rule=rule, steps=8)
    assert tally.accepted == tally.proposed > 0


def test_batch_neighbours_and_lookahead_do_not_matter() -> None:
    alone, _ = generate([MIXED[1]], draft_of("other", "coupled"), steps=1, lookahead=2)
    beside, _ = generate(MIXED, draft_of("other", "coupled"), steps=5, lookahead=6)
    assert alone["seeded"] == beside["seeded"]
