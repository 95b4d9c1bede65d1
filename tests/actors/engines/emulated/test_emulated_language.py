"""What emulated models say, against the specification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.engines.emulated.language import (
    Agreement,
    Language,
    draw_key,
    expected_tokens,
    next_token,
    ranked_tokens,
)
from actors.messages import EMPTY_PREFIX, extend_key, prefix_key
from actors.settings import SamplingSettings

COUNT = 20_000
SIX_SIGMA = 6.0  # two-sided odds of one false alarm: 2e-9


def keys(count: int, seed: int = 0) -> Iterator[int]:
    """Keys of prefixes of one long text, as a run through it would meet them."""
    random, key = Random(seed), EMPTY_PREFIX
    for _ in range(count):
        key = extend_key(key, random.randrange(32000))
        yield key


def within(observed: int, trials: int, probability: float) -> bool:
    return abs(observed - trials * probability) <= SIX_SIGMA * sqrt(trials * probability * (1 - probability)) + 1


def ranks(agreement: Agreement, language: Language, count: int = 9, seed: int | None = None) -> Counter[int | None]:
    found: Counter[int | None] = Counter()
    for key in keys(COUNT):
        truth = next_token(key, seed, language)
        tokens, _ = ranked_tokens(draw_key(key, seed, language), truth, language, agreement, count)
        found[tokens.index(truth) if truth in tokens else None] += 1
    return found


@pytest.mark.parametrize("seed", [None, 7])
def test_ranks_have_the_stated_frequencies(seed: int | None) -> None:
    """First guess right 0.8; else within 1/2/4/8 more .40/.55/.72/.85. Odds of a false alarm below 2e-8."""
    found = ranks(Agreement(), Language(), seed=seed)
    assert within(found[0], COUNT, 0.8)
    for guesses, share in ((1, 0.40), (2, 0.55), (4, 0.72), (8, 0.85)):
        assert within(sum(found[rank] for rank in range(1, guesses + 1)), COUNT, 0.2 * share)
    assert within(found[None], COUNT, 0.2 * 0.15)


def test_the_first_guess_is_right_as_often_as_it_claims() -> None:
    """Per tenth of confidence, claims and outcomes agree. Odds of a false alarm below 1e-8."""
    language, agreement = Language(), Agreement(acceptance=0.5, spread=0.5)
    claimed: dict[int, float] = Counter()
    right: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for key in keys(COUNT):
        truth = next_token(key, None, language)
        tokens, claims = ranked_tokens(draw_key(key, None, language), truth, language, agreement, 1)
        tenth = int(claims[0] * 10)
        claimed[tenth] += claims[0]
        right[tenth] += tokens[0] == truth
        total[tenth] += 1
    assert sorted(total) == list(range(10))
    for tenth, trials in total.items():
        assert within(right[tenth], trials, claimed[tenth] / trials)


def test_an_overconfident_draft_claims_more_than_it_keeps() -> None:
    language = Language()
    key = next(keys(1))
    truth = next_token(key, None, language)
    honest = ranked_tokens(key, truth, language, Agreement(acceptance=0.25, spread=0), 9)
    boasting = ranked_tokens(key, truth, language, Agreement(acceptance=0.25, spread=0, overconfidence=2), 9)
    assert honest[0] == boasting[0]
    assert honest[1][0] == pytest.approx(0.25)
    assert boasting[1][0] == pytest.approx(0.5)
    # The rest of the claims share what is left, in the same proportions: 0.5 * 0.40 for the second guess.
    assert boasting[1][1] == pytest.approx(0.5 * 0.40)


def test_tokens_are_spread_over_the_vocabulary() -> None:
    """A 64-cell chi-square stays within six standard deviations (odds of a false alarm about 1e-7)."""
    cells: Counter[int] = Counter(next_token(key, None, Language(vocabulary=129)) // 2 for key in keys(COUNT))
    expected = COUNT / 64
    statistic = sum((cells[cell] - expected) ** 2 / expected for cell in range(64))
    assert abs(statistic - 63) < 6 * sqrt(2 * 63)


def test_answers_end_with_the_stated_probability() -> None:
    """Odds of a false alarm 2e-9."""
    language = Language(eos_probability=0.05)
    ended = sum(next_token(key, None, language) == language.vocabulary - 1 for key in keys(COUNT))
    assert within(ended, COUNT, 0.05)
    assert language.eos == (language.vocabulary - 1,)
    assert Language().eos == ()
    assert not any(next_token(key, None, Language()) == 31999 for key in keys(COUNT))


@given(
    prompt=st.lists(st.integers(0, 31998), min_size=1, max_size=8),
    seed=st.none() | st.integers(0, 2**63 - 1),
    cut=st.integers(0, 12),
)
def test_an_answer_continues_from_any_of_its_prefixes(prompt: list[int], seed: int | None, cut: int) -> None:
    language = Language(eos_probability=0.1)
    whole = expected_tokens(prompt, 12, seed, language)
    head = whole[:cut]
    if len(head) < len(whole):
        assert whole == head + expected_tokens([*prompt, *head], 12 - len(head), seed, language)


@given(
    prefix=st.lists(st.integers(0, 126), max_size=6),
    count=st.integers(1, 32),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
def test_guesses_are_distinct_ordinary_and_fall_in_confidence(prefix: list[int], count: int, seed: int | None) -> None:
    language, key = Language(vocabulary=128), prefix_key(prefix)
    truth = next_token(key, seed, language)
    draws = draw_key(key, seed, language)
    tokens, claims = ranked_tokens(draws, truth, language, Agreement(), count)
    assert len(set(tokens)) == len(tokens) == len(claims) == count
    assert all(0 <= token < 127 for token in tokens)
    assert list(claims[1:]) == sorted(claims[1:], reverse=True)
    assert sum(claims) <= 1 + 1e-9


def test_seed_salt_and_greedy_are_different_tongues() -> None:
    prompt = [5, 6, 7]
    answers = [
        expected_tokens(prompt, 20, None, Language()),
        expected_tokens(prompt, 20, 0, Language()),
        expected_tokens(prompt, 20, 1, Language()),
        expected_tokens(prompt, 20, None, Language(salt=1)),
        expected_tokens(prompt, 20, 0, Language(salt=1)),
    ]
    assert len(set(answers)) == 5
    # Chance agreement of two answers is 20/32000 expected matches; four would be odds below 1e-9.
    matches = sum(a == b for a, b in zip(answers[0], answers[1], strict=True))
    assert matches < 4


def test_a_language_is_told_by_its_fingerprint() -> None:
    assert Language().fingerprint == Language().fingerprint
    assert len({Language().fingerprint, Language(salt=1).fingerprint, Language(eos_probability=0.1).fingerprint}) == 3


def test_min_tokens_and_ignore_eos_are_kept() -> None:
    language = Language(eos_probability=1.0)
    end = language.vocabulary - 1
    assert expected_tokens([1], 5, None, language) == (end,)
    late = expected_tokens([1], 5, None, language, SamplingSettings(min_tokens=3))
    assert len(late) == 4
    assert late[3] == end
    assert end not in late[:3]
    assert expected_tokens([1], 5, None, language, SamplingSettings(ignore_eos=True)) == (end,) * 5


def test_a_stop_token_waits_for_min_tokens() -> None:
    language = Language()
    plain = expected_tokens([1, 2], 6, None, language)
    stopped = expected_tokens([1, 2], 6, None, language, SamplingSettings(stop_token_ids=(plain[1],)))
    assert stopped == plain[:2]
    held = expected_tokens([1, 2], 6, None, language, SamplingSettings(stop_token_ids=(plain[1],), min_tokens=4))
    assert held[0] == plain[0]
    assert plain[1] not in held[:4]
    assert held[1] == plain[1] + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"acceptance": 0.9, "spread": 0.2},
        {"corrections": (0.5, 0.4, 0.6, 0.7)},
        {"acceptance": 1.5},
        {"unknown": 1},
    ],
)
def test_impossible_agreements_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Agreement.model_validate(wrong)
