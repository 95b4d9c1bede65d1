"""Sampling settings against transformers' logits processors, OpenAI's formula, and their edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.algorithms import sampling
from actors.settings import SamplingSettings

V = 40
EOS = (39,)
tokens = st.integers(0, V - 1)


def row_of(seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def ours(row: Tensor, settings: SamplingSettings, prompt: list[int], output: list[int]) -> Tensor:
    row = row.clone()
    sampling.adjust(row, settings, sampling.History(prompt, output, settings), EOS)
    return sampling.log_p(row, settings)


def theirs(row: Tensor, settings: SamplingSettings, prompt: list[int], output: list[int]) -> Tensor:
    """The same by transformers' processors, applied in vLLM's order; OpenAI's formula for what they lack."""
    said = torch.tensor([output], dtype=torch.int64)
    scores = row[None].clone()
    if settings.allowed_token_ids is not None:
        banned = sorted(set(range(V)) - set(settings.allowed_token_ids))
        scores = SuppressTokensLogitsProcessor(banned)(said, scores)
    if settings.bad_words:
        words = [list(word) for word in settings.bad_words]
        scores = NoBadWordsLogitsProcessor(words, eos_token_id=None)(said, scores)
    if len(output) < settings.min_tokens:
        scores = SuppressTokensLogitsProcessor([*EOS, *settings.stop_token_ids])(said, scores)
    if settings.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[t], b] for t, b in settings.logit_bias.items()])(said, scores)
    if settings.repetition_penalty != 1:
        history = torch.tensor([[*prompt, *output]], dtype=torch.int64)
        scores = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)(history, scores)
    for token in set(
        output
    ):  # https://platform.openai.com/docs/advanced-usage: mu[j] - c[j] a_frequency - (c[j] > 0) a_presence
        count = output.count(token)
        scores[0, token] -= count * settings.frequency_penalty + settings.presence_penalty
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.min_p > 0:
        warpers.append(MinPLogitsWarper(settings.min_p))
    if settings.top_k > 0:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    return warpers(said, scores)[0].log_softmax(-1)


def unit(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": unit(0.05, 5),
        "top_k": st.integers(1, V + 5),
        "top_p": unit(0.05, 0.999),
        "min_p": unit(0.001, 0.9),
        "presence_penalty": unit(-2, 2),
        "frequency_penalty": unit(-2, 2),
        "repetition_penalty": unit(0.2, 4),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100, width=32).filter(bool), max_size=4),
        "allowed_token_ids": st.lists(tokens, min_size=3, max_size=V, unique=True),
        "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(tokens, max_size=2, unique=True),
    },
)


@settings(max_examples=150, deadline=None)
@given(SETTINGS, st.integers(0, 10_000), st.lists(tokens, max_size=6), st.lists(tokens, max_size=9))
def test_agrees_with_transformers(fields: dict[str, object], seed: int, prompt: list[int], output: list[int]) -> None:
    settings = SamplingSettings.model_validate(fields)
    row = row_of(seed)
    expected = theirs(row, settings, prompt, output)
    assume(bool(expected.isfinite().any()))
    got = ours(row, settings, prompt, output)
    assert torch.equal(got.isfinite(), expected.isfinite())
    kept = expected.isfinite()
    assert (got[kept] - expected[kept]).abs().max() < 1e-9


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-9, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    row = row_of(1).float()
    got = ours(row, SamplingSettings(temperature=temperature, top_k=3, top_p=0.5), [], [])
    assert got.argmax() == row.argmax()
    assert got.exp().sum() == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 10.0])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    row = row_of(2, scale=30).float()
    got = ours(row, SamplingSettings(temperature=temperature), [], [])
    assert not got.isnan().any()
    assert got.exp().sum() == pytest.approx(1, abs=1e-5)


def test_ties_at_the_edge_are_all_kept() -> None:
    row = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for kept in (SamplingSettings(top_k=2), SamplingSettings(top_p=0.5)):
        assert sampling.log_p(row, kept).isfinite().tolist() == [True, True, True, True, False]
    assert sampling.log_p(row, SamplingSettings(top_k=1)).isfinite().tolist() == [True, False, False, False, False]


def test_toy_field_case() -> None:
    """p = (.5, .3, .15, .05): top_k = 2 gives 5/8 and 3/8; top_p = .7 keeps the first two as well (.5 < .7)."""
    row = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    for kept in (SamplingSettings(top_k=2), SamplingSettings(top_p=0.7)):
        assert sampling.log_p(row, kept).exp().tolist() == pytest.approx([0.625, 0.375, 0, 0])
    # top_p counts the mass after top_k: .5/.8 = .625 is not yet .63, but is .62
    assert sampling.log_p(row, SamplingSettings(top_k=2, top_p=0.62)).exp().tolist() == pytest.approx([1, 0, 0, 0])
    assert sampling.log_p(row, SamplingSettings(top_k=2, top_p=0.63)).isfinite().sum() == 2
    assert sampling.log_p(row, SamplingSettings(min_p=0.3)).exp().tolist() == pytest.approx(
        [1 / 1.9, 0.6 / 1.9, 0.3 / 1.9, 0]
    )


def test_nucleus_of_a_flat_distribution_needs_a_full_sort() -> None:
    """5,000 equal steps: more than any shortcut's candidates, so the whole row is sorted."""
    row = -torch.arange(5000, dtype=torch.float64) * 1e-4
    p = row.softmax(-1)
    before = p.cumsum(0) - p
    kept = sampling.log_p(row, SamplingSettings(top_p=0.8)).isfinite()
    assert torch.equal(kept, before < 0.8)
    assert 1024 < int(kept.sum()) < 5000


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), unit(0.1, 12), unit(0.01, 0.9999), st.integers(600, 3000))
def test_nucleus_by_buckets_is_that_of_a_sort(seed: int, scale: float, top_p: float, size: int) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    p, order = row.softmax(-1).sort(descending=True)
    before = p.cumsum(0) - p
    assume(bool(((before - top_p).abs() > 1e-12).all()))
    ids, scaled = sampling.kept(row, SamplingSettings(top_p=top_p))
    assert ids.tolist() == sorted(order[before < top_p].tolist())
    assert torch.equal(scaled, row[ids])


def test_masked_entries_stay_masked() -> None:
    row = row_of(3)
    row[:35] = -math.inf
    got = ours(
        row,
        SamplingSettings(logit_bias={0: 100.0}, repetition_penalty=2, presence_penalty=-2, top_k=20),
        [0, 36],
        [0, 1],
    )
    assert not got.isfinite()[:35].any()
    assert not got.isnan().any()


def test_penalties_count_the_answer_once_and_the_prompt_only_for_repetition() -> None:
    row = torch.tensor([1.0, 2.0, -3.0, 4.0])
    history = ([0, 0, 2], [1, 1, 1])

    def adjusted(**fields: float) -> list[float]:
        settings, got = SamplingSettings.model_validate(fields), row.clone()
        sampling.adjust(got, settings, sampling.History(*history, settings), ())
        return got.tolist()

    assert adjusted(presence_penalty=0.5) == [1.0, 1.5, -3.0, 4.0]
    assert adjusted(frequency_penalty=0.5) == [1.0, 0.5, -3.0, 4.0]
    assert adjusted(repetition_penalty=2.0) == [0.5, 1.0, -6.0, 4.0]
    # repetition first, then frequency and presence: 2 / 2 - 3 * 0.5 - 0.25
    assert adjusted(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25) == [0.5, -0.75, -6.0, 4.0]


def test_history_follows_a_block() -> None:
    settings = SamplingSettings(bad_words=((5, 6, 7),), frequency_penalty=1, repetition_penalty=2)
    history = sampling.History([1], [5], settings)
    history.append(6)
    fresh = sampling.History([1], [5, 6], settings)
    assert (history.length, history.tail, history.answered.tolist()) == (fresh.length, fresh.tail, [5, 6])
    assert (history.times.tolist(), sorted(history.said.tolist())) == (fresh.times.tolist(), [1, 5, 6])
    row = torch.zeros(8)
    sampling.adjust(row, settings, history, ())
    assert row[7] == -math.inf


def test_reduced_vocabulary_uses_target_ids() -> None:
    ids = torch.tensor([10, 20, 30])
    settings = SamplingSettings(logit_bias={20: 5, 25: 9}, frequency_penalty=1, allowed_token_ids=(20, 30, 35))
    row = torch.zeros(3)
    sampling.adjust(row, settings, sampling.History([], [30, 30, 11], settings), (), sampling.Columns(3, ids))
    assert row.tolist() == [-math.inf, 5.0, -2.0]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, V)}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ((1, V + 3),)}, "bad_words"),
        ({"stop_token_ids": (V,)}, "stop_token_ids"),
        ({"stop_token_ids": (V - 1,)}, None),
    ],
)
def test_ids_outside_the_vocabulary_are_named(fields: dict[str, object], name: str | None) -> None:
    assert sampling.check_ids(SamplingSettings.model_validate(fields), V) == name
