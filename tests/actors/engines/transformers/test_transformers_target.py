"""The embedded target decides what plain decoding of its model would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from small_llamas import EOS, VOCABULARY, causal_lm, full_logits, module, opening, some_tokens

from actors.engines.protocol import Proposal, Row
from actors.engines.transformers.target import TransformersTarget
from actors.errors import InvalidSettingError, PromptError
from actors.messages import Support, VerificationResult
from actors.settings import TargetSettings

SETTINGS = TargetSettings(slots=4, context=64)


def greedy_continuation(prompt: Sequence[int], count: int) -> list[int]:
    """By full forward passes, without slots."""
    reference, tokens = module(), list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def decide(target: TransformersTarget, row: Row) -> VerificationResult:
    outcome = target.forward([row])[0]
    assert outcome is not None
    return outcome


def test_card_names_what_the_draft_must_match() -> None:
    card = TransformersTarget(causal_lm(eos=(EOS,)), SETTINGS).card()
    assert (card.vocabulary, card.context, card.slots, card.eos) == (VOCABULARY, 64, 4, (EOS,))


def test_a_block_is_accepted_up_to_the_first_wrong_token() -> None:
    target, prompt = TransformersTarget(causal_lm(), SETTINGS), some_tokens(6, 1)
    truth = greedy_continuation(prompt, 5)
    target.attach(2, opening("s", prompt, temperature=0))
    wrong = (truth[2] + 1) % VOCABULARY
    block = (truth[0], truth[1], wrong, truth[3])
    outcome = decide(target, Row(2, prompt + block, 0, Proposal(block)))
    assert (outcome.tokens, outcome.accepted) == (tuple(truth[:3]), 2)
    # Rolled back: the next row starts at the correction, and what was cached of the wrong tokens is overwritten.
    target.record(2, outcome.tokens)
    block = tuple(truth[3:])
    outcome = decide(target, Row(2, (truth[2], *block), 8, Proposal(block)))
    assert outcome.tokens[:2] == block
    assert outcome.accepted == 2


def test_prefill_chunks_and_decoding_rows_share_a_pass() -> None:
    target = TransformersTarget(causal_lm(), SETTINGS)
    long, short = some_tokens(20, 2), some_tokens(3, 3)
    target.attach(0, opening("long", long, temperature=0))
    target.attach(1, opening("short", short, temperature=0))
    first = target.forward([Row(0, long[:12], 0, decide=False), Row(1, short, 0)])
    assert first[0] is None
    assert first[1] is not None
    assert first[1].tokens == tuple(greedy_continuation(short, 1))
    target.record(1, first[1].tokens)
    second = target.forward([Row(1, first[1].tokens, 3), Row(0, long[12:], 12)])
    assert second[0] is not None
    assert second[1] is not None
    assert second[0].tokens == (greedy_continuation(short, 2)[1],)
    assert second[1].tokens == tuple(greedy_continuation(long, 1))


def test_a_pass_of_prefill_alone_decides_nothing() -> None:
    target = TransformersTarget(causal_lm(), SETTINGS)
    target.attach(0, opening("s", some_tokens(20, 2)))
    assert target.forward([Row(0, some_tokens(20, 2)[:9], 0, decide=False)]) == [None]


def test_the_history_of_a_resumed_sequence_counts_for_penalties() -> None:
    """The greedy token with a frequency penalty of 2 on a history, computed by hand from the full logits."""
    prompt, committed = some_tokens(5, 4), (10, 10, 10, 11)
    logits = full_logits(module(), prompt + committed)[-1].clone()
    logits[10] -= 3 * 2.0
    logits[11] -= 2.0
    target = TransformersTarget(causal_lm(), SETTINGS)
    target.attach(0, replace(opening("s", prompt, temperature=0, frequency_penalty=2.0), committed=committed))
    assert decide(target, Row(0, prompt + committed, 0)).tokens == (int(logits.argmax()),)


def test_the_probabilistic_rules_reach_the_supports() -> None:
    """q is one-hot on a token with p far from 0 and 1: over 400 seeds, it is accepted about p of the time.

    A binomial deviation of 5 standard errors: false alarm below 1e-6.
    """
    prompt = some_tokens(5, 5)
    p = full_logits(module(), prompt)[-1].softmax(-1)
    token = int(p.argmax())
    settings = TargetSettings(slots=1, context=64, rule="rejection")
    target = TransformersTarget(causal_lm(), settings)
    proposal = Proposal((token,), (0.5,), (Support((token,), (1.0,)),))
    accepted = 0
    for seed in range(400):
        target.attach(0, opening("s", prompt, seed, temperature=1.0))
        accepted += decide(target, Row(0, (*prompt, token), 0, proposal)).accepted
    expected = float(p[token])
    assert 0.02 < expected < 0.98
    assert abs(accepted / 400 - expected) < 5 * (expected * (1 - expected) / 400) ** 0.5


def test_prompts_and_settings_that_the_model_cannot_take_are_refused() -> None:
    target = TransformersTarget(causal_lm(), SETTINGS)
    with pytest.raises(PromptError, match="empty"):
        target.attach(0, opening("s", ()))
    with pytest.raises(PromptError, match="outside"):
        target.attach(0, opening("s", (VOCABULARY,)))
    with pytest.raises(InvalidSettingError, match="logit_bias"):
        target.attach(0, opening("s", (1,), logit_bias={VOCABULARY: 1.0}))
    with pytest.raises(InvalidSettingError, match="grammar"):
        target.attach(0, opening("s", (1,), grammar="root"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_types_of_numbers(dtype: torch.dtype) -> None:
    """The committed token's score is within the type's rounding of the best one in float64."""
    prompt = some_tokens(9, 6)
    target = TransformersTarget(causal_lm(dtype=dtype), SETTINGS)
    target.attach(0, opening("s", prompt, temperature=0))
    token = decide(target, Row(0, prompt, 0)).tokens[0]
    logits = full_logits(module(), prompt)[-1]
    assert float(logits.amax() - logits[token]) < 40 * torch.finfo(dtype).eps * float(logits.abs().amax())


def test_cache_is_allocated_once() -> None:
    target = TransformersTarget(causal_lm(), SETTINGS)
    before = target.cache_bytes
    # 2 layers, keys and values, 4 slots, 2 key heads, head size 8, 8 bytes; a slot may hold a few spare cells, and 64
    # for the nodes of a tree
    assert 128 <= before / (2 * 2 * 4 * 2 * 8 * 8) <= 128 + 16
    target.attach(0, opening("s", some_tokens(9, 1)))
    target.forward([Row(0, some_tokens(9, 1), 0)])
    assert target.cache_bytes == before
