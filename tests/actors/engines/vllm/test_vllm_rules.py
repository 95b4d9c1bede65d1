"""The probabilistic rules on a real vLLM: each pass decides what the embedded engine decides from the same drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pass_exchanges import Decision, RecordingExchange
from transformers import LlamaForCausalLM
from vllm_stack import EOS, checkpoint, draft, model, module, prompts, settings, stack

from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.messages import VerificationResult
from actors.settings import Rule


@pytest.mark.parametrize("rule", ["block", "typical"])
async def test_a_pass_decides_what_the_embedded_engine_decides(tmp_path: Path, rule: Rule) -> None:
    """In float32, whose rounding moves a probability by about 1e-5: one decision in 1e4 may fall differently, so three
    of the 600 at most that are made here would be odds of 4e-5.
    """
    asked = prompts(12)
    folder = checkpoint(tmp_path)
    async with stack(model(folder), lambda: draft(0.03, rule), settings(rule), RecordingExchange) as running:
        answers = await running.ask_all(asked, temperature=0.4, top_p=0.95, max_tokens=48)
        decisions: list[Decision] = running.target.exchange.decisions
    embedded, committed = module(), {f"ask-{i + 1}": list(prompt) for i, prompt in enumerate(asked)}
    different = full = 0
    for decision in decisions:
        tokens = committed[decision.result.sequence]
        assert decision.result.position == len(tokens)
        expected = decide(embedded, decision, tokens, rule)
        found = (decision.result.tokens, decision.result.accepted)
        different += found != (expected.tokens, expected.accepted)
        full += 0 < decision.result.accepted < decision.result.proposed
        tokens.extend(decision.result.tokens)
    said = [tokens[len(prompt) :][:48] for prompt, tokens in zip(asked, committed.values(), strict=True)]
    assert [answer.tokens for answer in answers] == said
    assert len(decisions) > 12 * 10  # at most 5 tokens a pass
    assert full > 5  # blocks were cut in the middle too
    assert different < 3


@torch.inference_mode()
def decide(embedded: LlamaForCausalLM, decision: Decision, tokens: Sequence[int], rule: Rule) -> VerificationResult:
    """The outcome from a forward pass of our own over the committed tokens and the drafts that were verified."""
    opening, k = decision.opening, decision.result.proposed
    drafts = decision.drafts.tokens[:k]
    rows = embedded(input_ids=torch.tensor([[*tokens, *drafts]])).logits[0, len(tokens) - 1 :]  # [k + 1, V]
    prompt, output = tokens[: len(opening.prompt)], tokens[len(opening.prompt) :]
    supports = decision.drafts.supports[:k]
    block = Block(opening.sampling, opening.seed, len(tokens), prompt, output, drafts, supports, rule, (EOS,))
    [outcome] = verify_blocks(rows, [block])
    return outcome
