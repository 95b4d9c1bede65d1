"""The draft's side: same noise as the target where shared, its own where not, and q exactly as sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from actors.algorithms.drafting import DraftRow, RankedRow, rank_children
from actors.algorithms.noise import gumbel
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.settings import Rule, SamplingSettings

V = 50
FALSE_ALARM = 1e-7


def logits_of(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def rank(
    logits: torch.Tensor, rule: Rule = "coupled", branching: int = 4, support: int = 8, **row: object
) -> list[RankedRow]:
    fields = {"sampling": SamplingSettings(), "seed": 5, "position": 9, **row}
    rows = [DraftRow(**fields) for _ in range(len(logits))]  # type: ignore[arg-type]
    return rank_children(logits, rows, branching=branching, support=support, rule=rule)


@pytest.mark.parametrize("rule", ["coupled", "typical"])
def test_shared_noise_ranks_as_the_target_would(rule: Rule) -> None:
    logits = logits_of(1)
    (ranked,) = rank(logits, rule, sampling=SamplingSettings(temperature=0.7))
    g = gumbel(torch.tensor([5]), torch.tensor([9]), torch.arange(V), dtype=torch.float64)[0]
    scores = (logits[0] / 0.7).log_softmax(-1) + g
    assert list(ranked.tokens) == scores.topk(4).indices.tolist()
    assert ranked.support is None
    if rule == "coupled":
        assert ranked.confidences == pytest.approx(scores.softmax(-1).topk(4).values.tolist())
    block = Block(SamplingSettings(temperature=0.7), 5, 9, [1], [], rule="coupled")
    assert verify_blocks(logits, [block])[0].tokens == ranked.tokens[:1]


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_confidences_tell_nothing_of_the_draw(rule: Rule) -> None:
    """100 draws from q = (.5, .3, .2): all three tokens, and one confidence, .38 for the one drawn."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    sampling = SamplingSettings()
    found = [
        rank_children(logits, [DraftRow(sampling, seed, 9, prefix=seed)], branching=2, support=3, rule=rule)[0]
        for seed in range(100)
    ]
    assert len({row.tokens[0] for row in found}) == 3
    assert len({row.confidences for row in found}) == 1
    assert found[0].confidences == pytest.approx((0.38, 0.5 * 0.5 + 0.3 * 0.5))


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_greedy_ranks_by_q_alone(rule: Rule) -> None:
    (ranked,) = rank(logits_of(1), rule, sampling=SamplingSettings(temperature=0))
    q = logits_of(1)[0].softmax(-1)
    assert list(ranked.tokens) == q.topk(4).indices.tolist()
    assert ranked.confidences == pytest.approx(q.topk(4).values.tolist())
    assert ranked.support is None


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_support_is_what_was_sampled_from(rule: Rule) -> None:
    """4,000 prefixes: the first child follows the q that is sent, chi-square. False alarm: 1e-7."""
    logits = logits_of(1)
    sampling = SamplingSettings(temperature=0.9)
    rows = [DraftRow(sampling, 5, 9, prefix=n) for n in range(4000)]
    ranked = rank_children(logits.expand(4000, -1), rows, branching=3, support=6, rule=rule)
    support = ranked[0].support
    assert support is not None
    best = (logits[0] / 0.9).topk(6)
    assert list(support.tokens) == best.indices.tolist()
    assert support.probabilities == pytest.approx(best.values.softmax(-1).tolist())
    assert sum(support.probabilities) == pytest.approx(1, abs=1e-12)
    assert all(r.support == support for r in ranked)
    drawn = [support.tokens.index(r.tokens[0]) for r in ranked]
    counts = np.bincount(drawn, minlength=6)
    assert stats.chisquare(counts, 4000 * np.array(support.probabilities)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_alternatives_follow_the_drawn_child_by_q(rule: Rule) -> None:
    logits = logits_of(1)
    for prefix in range(40):
        (ranked,) = rank(logits, rule, branching=4, prefix=prefix)
        assert ranked.support is not None
        assert len(set(ranked.tokens)) == 4
        others = [token for token in ranked.support.tokens if token != ranked.tokens[0]]
        assert list(ranked.tokens[1:]) == others[:3]


def test_confidences_of_a_draw_do_not_depend_on_it() -> None:
    """q = (.5, .3, .2): the drawn child has .25 + .09 + .04 on average, the first alternative .5 unless it was drawn,
    else .3, the second .3 unless one of the first two was drawn, else .2."""
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log().expand(50, -1)
    rows = [DraftRow(SamplingSettings(), 5, 9, prefix=n) for n in range(50)]
    ranked = rank_children(logits, rows, branching=3, support=3, rule="block")
    assert {r.tokens[0] for r in ranked} == {0, 1, 2}
    for r in ranked:
        assert r.confidences == pytest.approx((0.38, 0.5 * 0.5 + 0.3 * 0.5, 0.3 * 0.2 + 0.2 * 0.8))
    assert sum(ranked[0].confidences) == pytest.approx(1)


def test_a_draw_is_repeated_for_its_prefix_and_independent_of_the_shared_noise() -> None:
    """Contingency of the drawn child with the coupled one over 4,000 positions. False alarm: 1e-7."""
    logits = torch.zeros(1, 4, dtype=torch.float64).expand(4000, -1)
    rows = [DraftRow(SamplingSettings(), 5, position, prefix=1) for position in range(4000)]
    drawn = [r.tokens[0] for r in rank_children(logits, rows, branching=1, support=4, rule="rejection")]
    again = [r.tokens[0] for r in rank_children(logits, rows, branching=1, support=4, rule="rejection")]
    coupled = [r.tokens[0] for r in rank_children(logits, rows, branching=1, support=4, rule="coupled")]
    assert drawn == again
    table = np.zeros((4, 4))
    np.add.at(table, (drawn, coupled), 1)
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_cheap_settings_are_applied(rule: Rule) -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])

    def children(**fields: object) -> set[int]:
        return set(
            rank(logits, rule, branching=5, sampling=SamplingSettings.model_validate(fields), eos=(3,))[0].tokens
        )

    assert children() == {0, 1, 2, 3, 4}
    assert children(top_k=2) == {0, 1}
    assert children(min_p=0.2) == {0, 1}
    assert children(top_p=0.7) == {0, 1}
    assert children(allowed_token_ids=(2, 4)) == {2, 4}
    assert children(logit_bias={4: 100}, top_k=1) == {4}
    assert children(bad_words=((0,), (1, 2))) == {1, 2, 3, 4}


def test_history_is_used_where_the_row_brings_it() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])
    sampling = SamplingSettings(temperature=0, frequency_penalty=2, bad_words=((0, 1),), min_tokens=3)
    (without,) = rank(logits, sampling=sampling, eos=(0,))
    assert without.tokens[0] == 0
    (known,) = rank(logits, sampling=sampling, eos=(2,), output=[0, 0])  # 0: 4 - 4, 1: a bad word, 2: too early
    assert known.tokens[0] == 3
    (length,) = rank(logits, sampling=sampling, eos=(0,), generated=2)
    assert length.tokens[0] == 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_reduced_vocabulary_proposes_target_ids(rule: Rule) -> None:
    """Columns 0, 1, 2 stand for 30, 10, 20; the noise is that of the target's ids."""
    logits = logits_of(1)[:, :3]
    vocabulary = torch.tensor([30, 10, 20])
    rows = [DraftRow(SamplingSettings(), 5, 9)]
    (ranked,) = rank_children(logits, rows, branching=3, support=3, rule=rule, vocabulary=vocabulary)
    assert set(ranked.tokens) == {10, 20, 30}
    if rule == "coupled":
        g = gumbel(torch.tensor([5]), torch.tensor([9]), vocabulary, dtype=torch.float64)[0]
        assert ranked.tokens[0] == vocabulary[(logits[0].log_softmax(-1) + g).argmax()]
    else:
        assert ranked.support is not None
        assert set(ranked.support.tokens) == {10, 20, 30}


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_broken_row_proposes_nothing(rule: Rule, bad: float) -> None:
    logits = logits_of(2)
    logits[0] = bad
    first, second = rank(logits, rule)
    assert first == RankedRow((), ())
    assert len(second.tokens) == 4


def test_rows_must_match() -> None:
    with pytest.raises(ValueError, match="1 rows"):
        rank_children(torch.zeros(2, 3), [DraftRow(SamplingSettings(), 1, 1)], branching=1, support=1, rule="coupled")


def test_more_children_than_tokens() -> None:
    for rule in ("coupled", "rejection"):
        (ranked,) = rank_children(
            torch.zeros(1, 3), [DraftRow(SamplingSettings(), 1, 1)], branching=8, support=8, rule=rule
        )
        assert sorted(ranked.tokens) == [0, 1, 2]
