"""Many rows at once against each block by itself: every sampling setting, alone and combined."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ranking import rank_alone
from torch import Tensor

from actors.algorithms import block_rows
from actors.algorithms.draft_tree import follow
from actors.algorithms.drafting import DraftRow, RankedRow, rank_children
from actors.algorithms.types import Block
from actors.algorithms.verification import Grammar, verify_alone, verify_blocks
from actors.errors import InvalidSettingError
from actors.messages import Alternatives, Support, VerificationResult
from actors.settings import Rule, SamplingSettings

VOCABULARIES = (12, 700, 3000)
"""Below and above what is sorted whole (512), and above the candidates of a device (1024)."""
ALONE: list[dict[str, object]] = [
    {},
    {"temperature": 0},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.99999},
    {"top_p": 0.9, "temperature": 5},
    {"min_p": 0.05},
    {"min_p": 1},
    {"min_p": 1e-9},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "top_p": 0.9},
    {"logit_bias": {1: 100, 3: -100}},
    {"logit_bias": {2: 4}, "temperature": 0},
    {"allowed_token_ids": (1, 2, 5)},
    {"allowed_token_ids": (1, 2, 5), "top_k": 4},
    {"bad_words": ((3,), (1, 2), (2, 1, 4))},
    {"min_tokens": 7},
    {"min_tokens": 7, "stop_token_ids": (5, 6), "temperature": 0},
    {"logprobs": 3, "top_p": 0.9},
]


@pytest.fixture(scope="module", autouse=True)
def _also_few_blocks_together() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_rows, "FEW_BLOCKS", 0)
        yield


class OddGrammar:
    """Allows a third of the tokens, another one after each path; nothing after some; one path it cannot tell about."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def mask(self, path: Sequence[int]) -> Tensor:
        drawn = np.random.default_rng([self._seed, *(token % 2**32 for token in path)])
        if path and drawn.random() < 0.05:
            raise InvalidSettingError("the grammar cannot be followed: odd", "response_format")
        dense = 0.0 if drawn.random() < 0.05 else 0.3
        return torch.from_numpy(drawn.random(self._size) < dense)


def some_settings(drawn: np.random.Generator, size: int) -> dict[str, object]:
    """Each setting in every other request, of any value that matters."""

    def maybe(value: object) -> list[object]:
        return [value] if drawn.random() < 0.3 else []

    few = [int(token) for token in drawn.integers(0, min(size, 12), 4)]
    choices: dict[str, list[object]] = {
        "temperature": [float(drawn.choice([0.0, 0.3, 1.0, 1.0, 1.7, 6.0]))],
        "top_k": maybe(int(drawn.choice([1, 2, 7, 50, 600, 2000]))),
        "top_p": maybe(float(drawn.uniform(0.02, 1))),
        "min_p": maybe(float(10 ** drawn.uniform(-6, 0))),
        "presence_penalty": maybe(float(drawn.uniform(-2, 2))),
        "frequency_penalty": maybe(float(drawn.uniform(-2, 2))),
        "repetition_penalty": maybe(float(drawn.uniform(0.5, 2))),
        "logit_bias": maybe({few[0]: float(drawn.uniform(-5, 20)), few[1]: -100.0}),
        "allowed_token_ids": maybe(tuple({*few, *range(size // 2)})),
        "bad_words": maybe(((few[0],), (few[1], few[2]), (few[0], few[1], few[3]))),
        "min_tokens": maybe(int(drawn.integers(0, 8))),
        "stop_token_ids": maybe((few[3],)),
        "logprobs": maybe(2),
        "margins": [bool(drawn.random() < 0.1)],
    }
    return {name: found[0] for name, found in choices.items() if found}


def block_of(
    fields: dict[str, object],
    drawn: np.random.Generator,
    rows: Tensor,
    grammar: Grammar | None,
    right: float,
    rule: Rule = "coupled",
) -> Block:
    """A block over `rows` [k + 1, V] whose drafts are the reference's own tokens with probability `right`."""
    size = rows.shape[1]
    prompt = [int(token) for token in drawn.integers(0, min(size, 12), drawn.integers(1, 6))]
    output = [int(token) for token in drawn.integers(0, min(size, 12), drawn.integers(0, 6))]
    seed, drafts, supports = int(drawn.integers(2**62)), [], []
    sampling = SamplingSettings.model_validate(fields)

    def block() -> Block:
        position = len(prompt) + len(output)
        return Block(sampling, seed, position, prompt, output, drafts, supports, rule=rule, eos=(0,))

    for i in range(rows.shape[0] - 1):
        taken = verify_alone(rows[: i + 1], block(), grammar).tokens
        wrong = int(drawn.choice([drawn.integers(size), drawn.integers(size), -1, size, 2**40]))
        drafts = [*drafts, taken[i] if len(taken) > i and drawn.random() < right else wrong]
        supports = [*supports, some_support(drafts[-1], drawn, size)] if rule in ("rejection", "block") else []
    return block()


def some_support(token: int, drawn: np.random.Generator, size: int) -> Support:
    """q with `token` in it, or sometimes without, which makes it one-hot."""
    others = drawn.permutation(size)[: int(drawn.integers(1, 9))].tolist()
    tokens = tuple({token, *others}) if drawn.random() < 0.9 else tuple(others)
    q = drawn.dirichlet(np.ones(len(tokens)))
    return Support(tokens, tuple(q.tolist()))


def compare(
    cases: Sequence[dict[str, object]],
    seed: int,
    size: int,
    dtype: torch.dtype,
    *,
    at_once: bool,
    right: float = 0.8,
    rules: Sequence[Rule] = ("coupled",),
) -> list[tuple[VerificationResult, VerificationResult]]:
    """(reference, found) of each case as a block of one batch, some of them under a grammar."""
    drawn = np.random.default_rng(seed)
    blocks, grammars, parts = [], [], []
    for number, fields in enumerate(cases):
        rows = torch.from_numpy(drawn.standard_normal((int(drawn.integers(1, 5)), size)) * drawn.choice([0.5, 2, 6]))
        if drawn.random() < 0.03:
            rows[-1, int(drawn.integers(size))] = float(drawn.choice([np.nan, np.inf]))
        rows = rows.to(dtype)
        grammar = OddGrammar(size, seed) if drawn.random() < 0.2 else None
        blocks.append(block_of(fields, drawn, rows, grammar, right, rules[number % len(rules)]))
        grammars.append(grammar)
        parts.append(rows)
    found = verify_blocks(torch.cat(parts), blocks, grammars, at_once=at_once)
    pairs = []
    for *case, got in zip(parts, blocks, grammars, found, strict=True):
        expected = verify_alone(*case)
        if at_once:  # another sum of the same numbers
            expected.alternatives, got.alternatives = rounded(expected), rounded(got)
        pairs.append((expected, got))
    return pairs


def rounded(result: VerificationResult) -> tuple[Alternatives, ...]:
    digits = 9
    return tuple(
        Alternatives(round(each.logprob, digits), tuple((n, round(value, digits)) for n, value in each.top))
        for each in result.alternatives
    )


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("size", VOCABULARIES)
def test_every_setting_alone(size: int, at_once: bool) -> None:
    for seed in range(4):
        for expected, got in compare(ALONE, seed, size, torch.float64, at_once=at_once):
            assert repr(got) == repr(expected)  # as text, errors and NaN compare by value


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(VOCABULARIES), st.booleans())
def test_settings_combined(seed: int, size: int, at_once: bool) -> None:
    drawn = np.random.default_rng(seed)
    cases = [some_settings(drawn, size) for _ in range(int(drawn.integers(1, 9)))]
    for expected, got in compare(cases, seed, size, torch.float64, at_once=at_once):
        assert repr(got) == repr(expected)  # as text, errors and NaN compare by value


def tree_of(
    fields: dict[str, object], drawn: np.random.Generator, size: int, grammar: Grammar | None
) -> tuple[Tensor, Block]:
    """A random tree whose nodes are often the reference's own tokens, with rows of logits at random for each."""
    nodes = int(drawn.integers(1, 9))
    rows = torch.from_numpy(drawn.standard_normal((nodes + 1, size)) * 3)
    sampling, seed = SamplingSettings.model_validate(fields), int(drawn.integers(2**62))
    parents = [int(drawn.integers(-1, i)) for i in range(nodes)]
    paths: list[list[int]] = [[]]  # the nodes up to each row
    tokens: list[int] = []
    for parent in parents:
        branch = paths[parent + 1]
        along = Block(sampling, seed, 2, [1], [3], [tokens[node] for node in branch], eos=(0,))
        taken = verify_alone(rows[[0, *(node + 1 for node in branch)]], along, grammar).tokens
        right = len(taken) > len(branch) and drawn.random() < 0.7
        tokens.append(
            taken[len(branch)] if right else int(drawn.choice([drawn.integers(size), drawn.integers(8), size]))
        )
        paths.append([*branch, len(tokens) - 1])
    return rows, Block(sampling, seed, 2, [1], [3], tokens, eos=(0,), parents=parents)


@pytest.mark.parametrize("at_once", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(VOCABULARIES))
def test_trees_equal_the_accepted_branch_alone(at_once: bool, seed: int, size: int) -> None:
    """What a tree commits is what its accepted branch would have committed as a path, whatever stands beside it."""
    drawn = np.random.default_rng(seed)
    grammar = OddGrammar(size, seed) if seed % 4 == 0 else None
    cases = [tree_of({**some_settings(drawn, size), "margins": False}, drawn, size, grammar) for _ in range(4)]
    logits = torch.cat([rows for rows, _ in cases])
    found = verify_blocks(logits, [block for _, block in cases], [grammar] * len(cases), at_once=at_once)
    for (rows, block), got in zip(cases, found, strict=True):
        path = follow(block.drafts, block.parents, got.tokens[: got.accepted])
        branch = dataclasses.replace(block, drafts=[block.drafts[node] for node in path], parents=())
        expected = verify_alone(rows[[0, *(node + 1 for node in path)]], branch, grammar)
        assert (got.tokens, got.accepted, repr(got.error)) == (expected.tokens, expected.accepted, repr(expected.error))
        assert rounded(got) == rounded(expected)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_every_setting_alone_under_the_rules_that_need_p(rule: Rule) -> None:
    for seed in range(4):
        for expected, got in compare(ALONE, seed, 3000, torch.float64, at_once=True, rules=[rule]):
            assert repr(got) == repr(expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(VOCABULARIES))
def test_settings_combined_and_rules_mixed(seed: int, size: int) -> None:
    drawn = np.random.default_rng(seed)
    cases = [some_settings(drawn, size) for _ in range(int(drawn.integers(1, 9)))]
    rules: list[Rule] = ["rejection", "block", "coupled", "typical"]
    for expected, got in compare(cases, seed, size, torch.float64, at_once=True, rules=rules):
        assert repr(got) == repr(expected)


@pytest.mark.parametrize("at_once", [False, True])
def test_float32_differs_at_ties_alone(at_once: bool) -> None:
    """Of some 2,000 rows. Masses and scores are of type float32 and the order of sums differs, so that an edge of top_p
    may fall otherwise where the mass before a token is within 1e-6 of it: about one row in 10^5 of these."""
    different = 0
    for seed in range(40):
        drawn = np.random.default_rng(seed)
        cases = [some_settings(drawn, 3000) for _ in range(20)]
        for expected, got in compare(cases, seed, 3000, torch.float32, at_once=at_once):
            different += got.tokens != expected.tokens
    assert different <= 1


def rankings(
    cases: Sequence[dict[str, object]], seed: int, size: int, rule: Rule, *, at_once: bool, mapped: bool
) -> list[tuple[RankedRow, RankedRow]]:
    """(reference, found) of each case as a row of one batch; mapped: the draft has some of the target's ids alone."""
    drawn = np.random.default_rng(seed)
    logits = torch.from_numpy(drawn.standard_normal((len(cases), size)) * drawn.choice([0.5, 2, 6], (len(cases), 1)))
    if drawn.random() < 0.2:
        logits[0, int(drawn.integers(size))] = np.nan
    vocabulary = torch.from_numpy(drawn.permutation(2 * size)[:size]) if mapped else None
    rows = []
    for n, fields in enumerate(cases):
        sampling = SamplingSettings.model_validate(fields)
        prompt, output = drawn.integers(0, 12, 4).tolist(), drawn.integers(0, 12, drawn.integers(6)).tolist()
        knows = drawn.random()
        rows.append(
            DraftRow(
                sampling, seed, 9 + n, n, prompt, output if knows < 0.6 else None, len(output) if knows < 0.8 else None
            )
        )
    branching, support = int(drawn.choice([1, 4])), int(drawn.choice([1, 8, 32]))
    expected = rank_alone(logits, rows, branching=branching, support=support, rule=rule, vocabulary=vocabulary)
    got = rank_children(
        logits, rows, branching=branching, support=support, rule=rule, vocabulary=vocabulary, at_once=at_once
    )
    if bool(logits[0].isnan().any()) and not got[0].tokens:  # a broken row may propose nothing
        expected[0] = got[0]
    return list(zip(expected, got, strict=True))


def assert_same_ranking(expected: RankedRow, got: RankedRow) -> None:
    assert got.tokens == expected.tokens
    assert got.confidences == pytest.approx(expected.confidences, rel=1e-9)
    assert (got.support is None) == (expected.support is None)
    if got.support is not None and expected.support is not None:
        assert got.support.tokens == expected.support.tokens
        assert got.support.probabilities == pytest.approx(expected.support.probabilities, rel=1e-9)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rule", ["coupled", "typical", "rejection", "block"])
@pytest.mark.parametrize("size", VOCABULARIES)
def test_ranking_with_every_setting_alone(size: int, rule: Rule, at_once: bool) -> None:
    for seed in range(3):
        for expected, got in rankings(ALONE, seed, size, rule, at_once=at_once, mapped=seed == 2):
            assert_same_ranking(expected, got)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(VOCABULARIES),
    st.sampled_from(["coupled", "typical", "rejection", "block"]),
    st.booleans(),
    st.booleans(),
)
def test_ranking_with_settings_combined(seed: int, size: int, rule: Rule, at_once: bool, mapped: bool) -> None:
    drawn = np.random.default_rng(seed)
    cases = [some_settings(drawn, size) for _ in range(int(drawn.integers(1, 9)))]
    for expected, got in rankings(cases, seed, size, rule, at_once=at_once, mapped=mapped):
        assert_same_ranking(expected, got)


@pytest.mark.parametrize("rules", [["coupled"], ["rejection", "block"]])
def test_nothing_waits_for_a_device_in_between(rules: list[Rule]) -> None:
    """No number of a tensor is asked for, no shape depends on one, whatever the settings: each round is one copy."""
    drawn = np.random.default_rng(1)
    parts = [torch.from_numpy(drawn.standard_normal((4, 700)) * 3) for _ in ALONE]
    blocks = [
        block_of(fields, drawn, rows, None, 0.8, rules[n % len(rules)])
        for n, (fields, rows) in enumerate(zip(ALONE, parts, strict=True))
    ]
    logits = torch.cat(parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        verify_blocks(logits, blocks, at_once=True)
    called = {event.key for event in profile.key_averages()}
    assert "aten::topk" in called
    assert not called & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
