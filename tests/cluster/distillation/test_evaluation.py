"""Measures of a draft, on pairs whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch
from small_targets import EOS, VOCABULARY, llama, prompts

from actors.engines.transformers.causal_lm import CausalLM
from actors.settings import Rule
from cluster.distillation.evaluation import Acceptance, acceptance, agreement, is_better


def model(vocabulary: torch.Tensor | None = None, seed: int = 0) -> CausalLM:
    return CausalLM(llama(seed).double(), name="tiny", eos=(EOS,), vocabulary=vocabulary)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted(rule: Rule, temperature: float) -> None:
    """In float64. Nine tokens by passes of at most four: 4 + 4 + 1, or 4 + 4 + 4 where the last pass overshoots."""
    found = acceptance(model(), model(), prompts(3), rule=rule, temperature=temperature, tokens=12, lookahead=3, seed=5)
    # Rejection and block draw from the support's 32 best of 61 ids, so q is not quite p.
    if rule in ("coupled", "typical") or temperature == 0:
        assert (found.rate, found.length, found.blocks) == (1.0, 4.0, 9)
        assert found.tested == 27
    else:
        assert found.rate > 0.9


def test_a_draft_that_knows_no_word_of_the_target_is_never_accepted() -> None:
    """The draft may only say the end of text, which a target that was told to ignore it hardly ever says."""
    found = acceptance(
        model(),
        model(torch.tensor([EOS])),
        prompts(3),
        rule="coupled",
        temperature=0.0,
        tokens=6,
        lookahead=2,
    )
    assert found.length == pytest.approx(1 + found.rate * found.tested / found.blocks)
    assert found.rate < 0.5


def test_agreement_of_a_model_with_itself_and_with_another() -> None:
    assert agreement(model(), model(), prompts(5), 8, slots=2).share == 1.0
    other = agreement(model(), model(seed=1), prompts(20), 8)
    assert other.share < 0.5
    assert other.error == pytest.approx(math.sqrt(other.share * (1 - other.share) / other.tokens))
    half = agreement(model(), model(torch.arange(VOCABULARY // 2)), prompts(20), 8)
    assert half.share < 1.0


def row(length: float, error: float) -> Acceptance:
    return Acceptance("coupled", 0.0, 4, 0.5, 0.01, length, error, 100, 100)


def test_better_means_by_more_than_chance() -> None:
    assert is_better(row(2.2, 0.03), row(2.1, 0.04))  # 0.1 against 1.64 * 0.05 = 0.082
    assert not is_better(row(2.18, 0.03), row(2.1, 0.04))
    assert not is_better(row(2.1, 0.0), row(2.1, 0.0))
