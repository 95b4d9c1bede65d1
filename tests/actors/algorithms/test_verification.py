"""Blocks against one-at-a-time decoding, the field cases at function level, and bad input."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from toy_models import Request, ToyModel, foe_draft, model_draft, noisy_draft, plain, speculated, tokens_of

from actors.algorithms.noise import gumbel
from actors.algorithms.types import Block
from actors.algorithms.verification import LARGEST_MARGIN, verify_blocks
from actors.errors import EngineError, InvalidSettingError
from actors.messages import Support
from actors.settings import Rule, SamplingSettings

FALSE_ALARM = 1e-7
V = 12
EOS = (0,)
tokens = st.integers(0, V - 1)


def unit(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


SETTINGS = st.fixed_dictionaries(
    {"temperature": st.one_of(st.just(0.0), st.just(1e-30), unit(0.01, 10))},
    optional={
        "top_k": st.integers(-1, V + 2),
        "top_p": unit(0.05, 1),
        "min_p": unit(0, 0.9),
        "presence_penalty": unit(-2, 2),
        "frequency_penalty": unit(-2, 2),
        "repetition_penalty": unit(0.3, 3),
        "logit_bias": st.dictionaries(tokens, unit(-100, 100), max_size=3),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=V, unique=True),
        "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(tokens, max_size=2, unique=True),
        "logprobs": st.integers(0, 3),
        "margins": st.booleans(),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=120, deadline=None)
@given(SETTINGS, st.integers(0, 2**63 - 1), st.lists(tokens, min_size=1, max_size=4), st.integers(0, 10**6))
def test_blocks_equal_plain_decoding(fields: dict[str, object], seed: int, prompt: list[int], chance: int) -> None:
    """Every setting, alone and combined; drafts right, wrong and absurd; lookahead 0-5. Exactly equal, also the
    log-probabilities, the margins and where and how an unsatisfiable request ends."""
    request = Request(ToyModel(V, seed=chance % 97), SamplingSettings.model_validate(fields), seed, prompt, eos=EOS)
    rng = random.Random(chance)
    reference = plain(request, 10)
    drafts = [noisy_draft(request, rng), foe_draft(request), model_draft(request, request.model)]
    got = speculated(request, 10, drafts[chance % 3], rng)
    count = min(len(tokens_of(reference)), len(tokens_of(got)))
    assert tokens_of(got)[:count] == tokens_of(reference)[:count]
    assert [a for o in got for a in o.alternatives][:count] == [a for o in reference for a in o.alternatives][:count]
    assert [m for o in got for m in o.margins][:count] == [m for o in reference for m in o.margins][:count]
    errors = [o.error for o in (*reference, *got) if o.error is not None]
    if errors:
        assert count == len(tokens_of(reference))
        assert len({(type(e), str(e)) for e in errors}) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
@pytest.mark.parametrize(
    "penalty", [{}, {"frequency_penalty": 1.2}, {"presence_penalty": 2}, {"repetition_penalty": 1.8}]
)
@pytest.mark.parametrize("lookahead", [1, 4, 8])
def test_twin_and_foe(temperature: float, penalty: dict[str, float], lookahead: int) -> None:
    """Field case 5: a Twin's drafts all stand, a Foe's none, and the answer is the same either way."""
    request = Request(
        ToyModel(V), SamplingSettings.model_validate({"temperature": temperature, **penalty}), 42, [3, 1, 3]
    )
    reference = tokens_of(plain(request, 24))
    for draft, all_stand in ((model_draft(request, request.model), True), (foe_draft(request), False)):
        output: list[int] = []
        while len(output) < 24:
            drafts, _ = draft(request.prompt, output, lookahead)
            outcome = request.verify(output, drafts)
            assert outcome.accepted == (lookahead if all_stand else 0)
            output.extend(outcome.tokens)
        assert output[:24] == reference


def test_a_batch_decides_each_block_as_if_alone() -> None:
    rng = random.Random(3)
    model = ToyModel(V)
    variants = [
        {},
        {"temperature": 0},
        {"top_k": 3},
        {"top_p": 0.5, "frequency_penalty": 1},
        {"temperature": 0, "logit_bias": {3: 5.0}},
        {"temperature": 1.5, "logprobs": 2, "margins": True},
    ]
    rules: list[Rule] = ["coupled", "rejection", "block", "typical"]
    rows, blocks, alone = [], [], []
    for n in range(24):
        prompt = [rng.randrange(V) for _ in range(3)]
        sampling = SamplingSettings.model_validate(variants[n % 6])
        request = Request(model, sampling, n, prompt, rule=rules[n // 6])
        drafts, supports = model_draft(request, ToyModel(V, seed=1, scale=1))(prompt, [], n % 5)
        alone.append(request.verify([], drafts, supports))
        rows += [model.logits([*prompt, *drafts[:i]]) for i in range(len(drafts) + 1)]
        blocks.append(Block(sampling, n, 3, prompt, [], drafts, supports, rule=request.rule))
    assert verify_blocks(torch.stack(rows), blocks) == alone


def test_the_device_path_decides_the_same() -> None:
    """All rows at once, as off the CPU, also those that no walk comes to."""
    model = ToyModel(V, dtype=torch.float64)
    rng = random.Random(8)
    rows, blocks = [], []
    for n in range(20):
        fields = [{}, {"temperature": 0}, {"temperature": 1.7}, {"top_k": 3}, {"temperature": 0, "min_tokens": 2}][
            n % 5
        ]
        drafts = [rng.randrange(V) for _ in range(n % 4)]
        rows += [model.logits([n, *drafts[:i]]) for i in range(len(drafts) + 1)]
        blocks.append(Block(SamplingSettings.model_validate(fields), n, 1, [n], [], drafts))
    expected = verify_blocks(torch.stack(rows), blocks)
    assert verify_blocks(torch.stack(rows), blocks, at_once=True) == expected


def test_a_coupled_token_is_the_argmax_of_log_p_plus_noise() -> None:
    model = ToyModel(V, dtype=torch.float64)
    request = Request(model, SamplingSettings(temperature=0.8), 77, [5, 2])
    output: list[int] = []
    for position in range(2, 40):
        g = gumbel(torch.tensor([77]), torch.tensor([position]), torch.arange(V), dtype=torch.float64)[0]
        log_p = (model.logits([5, 2, *output]) / 0.8).log_softmax(-1)
        output.append(int((log_p + g).argmax()))
    assert tokens_of(plain(request, 38)) == output


def test_seeds_repeat_and_differ() -> None:
    """Field case 3. Twenty seeds give one answer only with odds below 1e-15."""
    sampling = SamplingSettings(temperature=2)
    answers = [tuple(tokens_of(plain(Request(ToyModel(V), sampling, 42, [1]), 16))) for _ in range(5)]
    assert len(set(answers)) == 1
    assert len({tuple(tokens_of(plain(Request(ToyModel(V), sampling, seed, [1]), 16))) for seed in range(20)}) == 20


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.7}, 2),
        ({"min_p": 0.25}, 3),
        ({"logit_bias": {0: -100}}, 4),
        ({"temperature": 2}, 4),
    ],
)
def test_toy_frequencies(rule: Rule, fields: dict[str, object], kept: int) -> None:
    """Field cases 1 and 2: p = (.5, .3, .15, .05) as (0, 1, 2, 3). Nothing outside the kept set ever appears, and the
    frequencies are the renormalised p, at every position of a block. 600 blocks of 4 tokens, lookahead 3, drafts from
    another q. False alarm of a case: 4e-7."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    sampling = SamplingSettings.model_validate(fields)
    expected = p ** (1 / sampling.temperature)
    expected = np.where(np.arange(4) < kept, expected, 0) if "logit_bias" not in fields else np.where(p == 0.5, 0, p)
    expected /= expected.sum()
    logits = torch.tensor(p).log().float()
    counts = np.zeros((4, 4))
    for seed in range(600):
        request = Request(ToyModel(4), sampling, seed, [0], rule=rule)
        for prefix in [request.prompt]:
            request.model.logits = lambda _: logits  # type: ignore[method-assign]
            weaker = ToyModel(4, memory=0, scale=0.5)
            drafts, supports = model_draft(request, weaker)(prefix, [], 3)
            output = list(request.verify([], drafts, supports).tokens)
            while len(output) < 4:
                output.extend(request.verify(output).tokens)
        for position in range(4):
            counts[position, output[position]] += 1
    assert not counts[:, expected == 0].any()
    for row in counts:
        assert stats.chisquare(row[expected > 0], 600 * expected[expected > 0]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-6])
def test_tiny_temperatures_equal_greedy(temperature: float) -> None:
    """Field case 4."""
    request = Request(ToyModel(V), SamplingSettings(temperature=temperature), 1, [2])
    output: list[int] = []
    for _ in range(10):
        output.append(int(request.model.logits([2, *output]).argmax()))
    assert tokens_of(plain(request, 10)) == output


def test_min_tokens_inside_a_block() -> None:
    """Field case 10: end of text is impossible before min_tokens, possible right after, at every offset of a block."""

    class Ends(ToyModel):
        def logits(self, prefix):  # type: ignore[no-untyped-def]
            row = super().logits(prefix).clone()
            row[0] = 50
            return row

    for least in range(8):
        request = Request(Ends(V), SamplingSettings(temperature=0, min_tokens=least), 1, [2], eos=EOS)
        for lookahead in range(5):
            output = []
            while len(output) <= least:
                output.extend(
                    request.verify(output, model_draft(request, request.model)([2], output, lookahead)[0]).tokens
                )
            assert output.index(0) == least


def test_log_probabilities_are_of_the_raw_logits() -> None:
    """Field case 12: with every setting on, the values are log-softmax of the target's logits at each position."""
    sampling = SamplingSettings(temperature=0.5, top_k=2, logit_bias={1: 3}, frequency_penalty=1, logprobs=5)
    request = Request(ToyModel(V), sampling, 5, [7])
    outcome = request.verify([], model_draft(request, request.model)([7], [], 4)[0])
    assert len(outcome.tokens) == len(outcome.alternatives) == 5
    for i, (token, alternatives) in enumerate(zip(outcome.tokens, outcome.alternatives, strict=True)):
        expected = request.model.logits([7, *outcome.tokens[:i]]).log_softmax(-1)
        assert alternatives.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [t for t, _ in alternatives.top] == expected.topk(5).indices.tolist()
        assert [v for _, v in alternatives.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)


class TestMargins:
    """The smallest change of a logit that would change the choice."""

    @staticmethod
    def margin(logits: list[float], **fields: object) -> float:
        sampling = SamplingSettings.model_validate({"margins": True, "temperature": 0, **fields})
        row = torch.tensor([logits], dtype=torch.float64)
        (margin,) = verify_blocks(row, [Block(sampling, 1, 1, [0], [])])[0].margins
        return margin

    def test_greedy(self) -> None:
        assert self.margin([1.0, 3.0, 2.25]) == pytest.approx(0.75)

    def test_no_runner_up(self) -> None:
        assert self.margin([1.0, 3.0], allowed_token_ids=(1,)) == LARGEST_MARGIN

    def test_edge_of_top_k(self) -> None:
        """top_k = 1 keeps the best alone, so its lead of 1e-6 decides, whatever the noise."""
        assert self.margin([1.0, 1.000001, -9], temperature=1, top_k=1) == pytest.approx(1e-6, rel=1e-3)

    @pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.4}])
    def test_small_changes_below_the_margin_change_nothing(self, fields: dict[str, object]) -> None:
        rng = np.random.default_rng(1)
        for trial in range(40):
            row = torch.from_numpy(rng.standard_normal((1, 6)))
            sampling = SamplingSettings.model_validate({"margins": True, **fields})
            block = Block(sampling, trial, 1, [0], [])
            outcome = verify_blocks(row, [block])[0]
            # Two logits may move towards one another, and mass moves at most by the same amount.
            size = outcome.margins[0] / 2 * 0.99
            for _ in range(10):
                moved = row + torch.from_numpy(rng.uniform(-size, size, (1, 6)))
                assert verify_blocks(moved, [block])[0].tokens == outcome.tokens

    def test_draws_have_none(self) -> None:
        row = torch.zeros(1, 4)
        outcome = verify_blocks(row, [Block(SamplingSettings(margins=True), 1, 1, [0], [], rule="rejection")])[0]
        assert outcome.margins == ()


class TestBadInput:
    def test_rows_must_add_up(self) -> None:
        with pytest.raises(ValueError, match="2 rows"):
            verify_blocks(torch.zeros(3, 4), [Block(SamplingSettings(), 1, 1, [0], [], [2])])

    @pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_broken_row_is_an_error_of_that_block_alone(self, rule: Rule, temperature: float, bad: float) -> None:
        logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        logits[1] = bad
        blocks = [Block(SamplingSettings(temperature=temperature), 1, 1, [0], [], rule=rule) for _ in range(3)]
        first, broken, last = verify_blocks(logits, blocks)
        assert isinstance(broken.error, EngineError)
        assert broken.tokens == ()
        assert first.error is None
        assert last.error is None

    @pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
    def test_settings_that_leave_nothing_name_themselves(self, rule: Rule) -> None:
        sampling = SamplingSettings(allowed_token_ids=(2,), bad_words=((2,),))
        outcome = verify_blocks(torch.zeros(1, 4), [Block(sampling, 1, 1, [0], [], rule=rule)])[0]
        assert isinstance(outcome.error, InvalidSettingError)
        assert outcome.error.param == "allowed_token_ids"
        assert "bad_words" in str(outcome.error)

    def test_tokens_before_an_impossible_position_stand(self) -> None:
        sampling = SamplingSettings(temperature=0, allowed_token_ids=(2, 3), bad_words=((3, 2), (3, 3)))
        logits = torch.tensor([[0.0, 0, 1, 2], [0, 0, 1, 2]])
        outcome = verify_blocks(logits, [Block(sampling, 1, 1, [0], [], [3])])[0]
        assert outcome.tokens == (3,)
        assert outcome.accepted == 1
        assert isinstance(outcome.error, InvalidSettingError)

    @pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
    @pytest.mark.parametrize("absurd", [-1, 4, 2**40])
    def test_drafts_outside_the_vocabulary_are_rejected(self, rule: Rule, absurd: int) -> None:
        logits = torch.zeros(3, 4)
        supports = [Support((absurd,), (1.0,))] * 2
        block = Block(SamplingSettings(), 1, 1, [0], [], [absurd, 1], supports, rule=rule)
        outcome = verify_blocks(logits, [block])[0]
        assert outcome.accepted == 0
        assert len(outcome.tokens) == 1
        assert 0 <= outcome.tokens[0] < 4

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_any_float_type(self, dtype: torch.dtype) -> None:
        logits = torch.tensor([[0.0, 9.0, 1.0]], dtype=dtype)
        block = Block(SamplingSettings(temperature=0, logprobs=1), 1, 1, [0], [])
        assert verify_blocks(logits, [block])[0].tokens == (1,)

    def test_logits_are_left_as_they_were(self) -> None:
        logits = torch.randn(2, V)
        before = logits.clone()
        sampling = SamplingSettings(logit_bias={1: 5}, top_k=3, repetition_penalty=2, min_tokens=3)
        verify_blocks(logits, [Block(sampling, 1, 1, [0], [], [1])])
        assert torch.equal(logits, before)
