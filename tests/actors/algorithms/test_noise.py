"""The noise: same bits everywhere, right law, no dependence between what must be independent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from actors.algorithms import noise
from actors.algorithms.noise import NoiseSource, Stream, gumbel, gumbel_rows, row_key, uniform, words

seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31)
FALSE_ALARM = 1e-7
"""Odds that one statistical assertion of this file fails by chance."""


def reference_word(seed: int, position: int, token: int, stream: Stream = Stream.SHARED) -> int:
    """One 32-bit word in plain Python integers, written from the construction in the module's docstring."""
    mask = 0xFFFFFFFF

    def mix(x: int, rounds: list[tuple[int, int]], last: int) -> int:
        for shift, multiplier in rounds:
            x = (x ^ x >> shift) * multiplier & mask
        return x ^ x >> last

    key = row_key(seed, position, stream)
    low, high = key & mask, key >> 32
    token_word = mix(token + 0x3C6EF372 & mask, [(16, 0x21F0AAAD), (15, 0x735A2D97)], 15)
    return mix((token_word ^ low) * (high | 1) + low & mask, [(16, 0x7FEB352D), (15, 0x2C1B3C6D)], 16)


@settings(max_examples=60, deadline=None)
@given(seeds, positions, st.lists(st.integers(0, 300_000), min_size=1, max_size=5))
def test_words_follow_the_construction(seed: int, position: int, tokens: list[int]) -> None:
    got = words([row_key(seed, position)], torch.tensor(tokens))[0].tolist()
    assert [word & 0xFFFFFFFF for word in got] == [reference_word(seed, position, token) for token in tokens]


def test_known_words() -> None:
    """Pinned, so that a change of the noise (which changes every seeded answer) is noticed."""
    got = words([row_key(42, 7)], torch.tensor([0, 1, 49151]))[0].tolist()
    assert [word & 0xFFFFFFFF for word in got] == [reference_word(42, 7, token) for token in (0, 1, 49151)]
    assert row_key(42, 7) == 0xB22D9C4F9568F550


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(seeds, positions), min_size=1, max_size=6),
    st.integers(1, 70),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_bits_do_not_depend_on_the_shape(rows: list[tuple[int, int]], size: int, dtype: torch.dtype) -> None:
    tokens = torch.randperm(1000, generator=torch.Generator().manual_seed(size))[:size].to(dtype)
    keys = [row_key(seed, position) for seed, position in rows]
    together = words(keys, tokens)
    per_row = words(keys, tokens.expand(len(keys), -1).contiguous())
    assert torch.equal(together, per_row)
    everything = words(keys, torch.arange(1000))
    assert torch.equal(together, everything[:, tokens.long()])
    for n, key in enumerate(keys):
        assert torch.equal(together[n], words([key], tokens)[0])


def test_gumbel_is_the_same_alone_and_in_a_batch() -> None:
    tokens = torch.arange(1003)
    seed, position = torch.tensor([3, 5, 2**62]), torch.tensor([0, 9, 7])
    batch = gumbel(seed, position, tokens)
    for n in range(3):
        assert torch.equal(batch[n], gumbel(seed[n : n + 1], position[n : n + 1], tokens)[0])
    keys = [row_key(3, 0), row_key(5, 9), row_key(2**62, 7)]
    assert torch.equal(batch, gumbel_rows(keys, tokens))
    at_once = NoiseSource(tokens, rows=3).negated(keys).neg()
    torch.testing.assert_close(batch, at_once, rtol=0, atol=2e-6)


def test_gumbel_is_the_closed_form_of_the_words() -> None:
    """g = -log(-log(1 - w / 2^32)), in double precision, at 200,000 words and in both types."""
    tokens = torch.arange(200_000)
    v = (words([row_key(1, 2)], tokens)[0].numpy().astype(np.int64) & 0xFFFFFFFF) / 2.0**32
    expected = -np.log(-np.log1p(-np.clip(v, 2.0**-33, 1 - 2.0**-33)))
    seed, position = torch.tensor([1]), torch.tensor([2])
    double = gumbel(seed, position, tokens, dtype=torch.float64)[0].numpy()
    single = gumbel(seed, position, tokens)[0].numpy()
    assert np.abs(double - expected).max() < 1e-12
    assert np.abs(single - expected)[v < 0.999].max() < 1e-5


def test_extreme_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(keys: list[int], token_words: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        out.copy_(torch.tensor([[0, 1, -1, -(2**31), 2**31 - 1]], dtype=torch.int32))

    monkeypatch.setattr("actors.algorithms.noise._fill_words", fill)
    for dtype in (torch.float32, torch.float64):
        g = gumbel_rows([0], torch.arange(5), dtype=dtype)[0].tolist()
        assert all(map(math.isfinite, g))
        assert g[0] == pytest.approx(-math.log(2.0**-33), abs=1e-4)
        assert g[1] == pytest.approx(-math.log(2.0**-32), abs=1e-4)
        assert g[3] == pytest.approx(-math.log(math.log(2)), abs=1e-6)
        assert g[0] > g[1] > g[4] > g[3] - 1e-9 > g[2]


@pytest.mark.parametrize("stream", [Stream.SHARED, Stream.DRAFT, Stream.CORRECTION])
def test_words_are_uniform(stream: Stream) -> None:
    """Chi-square over 4096 cells of the high and of the low bits, 1e6 words. False alarm: 1e-7 each."""
    keys = [row_key(seed, position, stream) for seed in range(5) for position in range(4)]
    got = words(keys, torch.arange(50_000)).numpy().astype(np.int64).ravel() & 0xFFFFFFFF
    for cells in (got >> 20, got & 0xFFF):
        assert stats.chisquare(np.bincount(cells, minlength=4096)).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, 5, Stream.SHARED, 0), (1, 6, Stream.SHARED, 0)),
        ((1, 5, Stream.SHARED, 0), (2, 5, Stream.SHARED, 0)),
        ((1, 5, Stream.SHARED, 0), (5, 1, Stream.SHARED, 0)),
        ((1, 5, Stream.SHARED, 0), (1 + 2**62, 5, Stream.SHARED, 0)),
        ((1, 5, Stream.DRAFT, 0), (1, 5, Stream.CORRECTION, 0)),
        ((1, 5, Stream.SHARED, 0), (1, 5, Stream.CORRECTION, 0)),
        ((1, 5, Stream.DRAFT, 10), (1, 5, Stream.DRAFT, 11)),
    ],
)
def test_rows_are_independent(first: tuple[int, int, Stream, int], second: tuple[int, int, Stream, int]) -> None:
    """A 16 x 16 contingency table of two rows at the same tokens, 300,000 pairs. False alarm: 1e-7 each."""
    a, b = (
        words([row_key(*row)], torch.arange(300_000))[0].numpy().astype(np.int64) >> 28 & 15 for row in (first, second)
    )
    table = np.bincount(a * 16 + b, minlength=256).reshape(16, 16)
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_neighbouring_tokens_positions_and_seeds_are_independent() -> None:
    """Contingency tables of each word with its neighbours along three axes, 1e5 pairs each. False alarm: 1e-7 each."""
    cube = np.stack([words([row_key(s, p) for p in range(50)], torch.arange(50)).numpy() for s in range(50)])
    cube = cube.astype(np.int64) >> 28 & 15
    for axis in range(3):
        a, b = np.take(cube, range(49), axis).ravel(), np.take(cube, range(1, 50), axis).ravel()
        table = np.bincount(a * 16 + b, minlength=256).reshape(16, 16)
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_every_bit_of_the_seed_matters() -> None:
    keys = {row_key(1 << bit, 0) for bit in range(63)} | {row_key(0, 1 << bit) for bit in range(32)}
    assert len(keys) == 63 + 32
    flips = [bin(row_key(0, 0) ^ key).count("1") for key in keys]
    assert 16 < min(flips) <= max(flips) < 48


def test_gumbel_max_draws_from_p() -> None:
    """argmax(log p + g) over 40,000 positions against p, chi-square. False alarm: 1e-7."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 40_000
    g = gumbel(torch.full((count,), 9), torch.arange(count), torch.arange(5))
    drawn = np.bincount((p.log() + g).argmax(-1).numpy(), minlength=5)
    assert stats.chisquare(drawn, p.numpy().astype(float) * count).pvalue > FALSE_ALARM


def test_uniforms() -> None:
    """Kolmogorov-Smirnov against the uniform law, and no correlation with the next position. False alarm: 1e-7 each."""
    got = np.array([uniform(11, position, Stream.ACCEPTANCE) for position in range(20_000)])
    assert 0 < got.min() < got.max() < 1
    assert stats.kstest(got, "uniform").pvalue > FALSE_ALARM
    assert stats.pearsonr(got[:-1], got[1:]).pvalue > FALSE_ALARM


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=4), st.integers(1, 50))
def test_the_device_path_makes_the_same_words(rows: list[tuple[int, int]], size: int) -> None:
    keys = [row_key(seed, position) for seed, position in rows]
    out = torch.empty(len(keys), size, dtype=torch.int32)
    noise._fill_words_at_once(keys, noise.mix_tokens(torch.arange(size)), out, torch.empty_like(out))
    assert torch.equal(out, words(keys, torch.arange(size)))


def test_gumbel_of_a_few_tokens() -> None:
    tokens = np.array([3, 49_000, 17])
    expected = gumbel(torch.tensor([6]), torch.tensor([4]), torch.from_numpy(tokens), dtype=torch.float64)[0]
    assert noise.gumbel_of(row_key(6, 4), tokens) == pytest.approx(expected.tolist(), abs=1e-12)
