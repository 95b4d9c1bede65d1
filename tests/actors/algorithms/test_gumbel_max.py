"""The shortcut to the most perturbed token against working out every score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from actors.algorithms.gumbel_max import GumbelMax
from actors.algorithms.noise import Stream, gumbel, row_key

FALSE_ALARM = 1e-7
CPU = torch.device("cpu")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.001, 10),
    st.sampled_from([0.0, 0.3, 3.0, 8.0]),
    st.sampled_from([1, 2, 50, 3000, 20_000]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_winner_is_the_argmax(
    seed: int, temperature: float, scale: float, size: int, dtype: torch.dtype, masked: bool
) -> None:
    """Flat, ordinary and peaked rows, hot and cold, with and without masked tokens. Where float32 scores of the two
    best lie within rounding of each other, either may win."""
    z = (torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)
    if masked:
        z[1::3] = -torch.inf
    g = gumbel(torch.tensor([seed]), torch.tensor([5]), torch.arange(size), dtype=torch.float64)[0]
    scores = z.double() + temperature * g
    winner = GumbelMax(size, dtype, CPU).winner(z, temperature, row_key(seed, 5))
    rounding = 1e-5 * temperature if dtype == torch.float32 else 1e-12
    assert scores[winner] >= scores.max() - rounding


def test_the_shortcut_is_taken_and_agrees_with_the_long_way() -> None:
    z = torch.randn(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    race = GumbelMax(20_000, torch.float64, CPU)
    for position in range(300):
        key = row_key(1, position)
        short = race._shortcut(z, 1.0, key)
        assert short is not None
        assert short == int(race._times(z, 1.0, key).argmax())


def test_a_far_token_can_win() -> None:
    """30,000 tokens seven below the best: together they weigh 27 times as much, so they nearly always win."""
    z = torch.full((30_001,), -7.0)
    z[0] = 0
    race = GumbelMax(30_001, torch.float32, CPU)
    wins = sum(race.winner(z, 1.0, row_key(2, position)) != 0 for position in range(400))
    share = 30_000 * np.exp(-7) / (1 + 30_000 * np.exp(-7))
    assert stats.binomtest(wins, 400, share).pvalue > FALSE_ALARM


def test_gap_is_the_lead_in_scores() -> None:
    z = torch.randn(500, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    g = gumbel(torch.tensor([8]), torch.tensor([1]), torch.arange(500), dtype=torch.float64)[0]
    best = (z / 0.5 + g).topk(2).values
    assert GumbelMax(500, torch.float64, CPU).gap(z, 0.5, row_key(8, 1)) == pytest.approx(float(best[0] - best[1]))


def test_draw_follows_y() -> None:
    """20,000 draws from a distribution that is not normalised, chi-square; zero is never drawn. False alarm: 1e-7."""
    y = torch.tensor([0.2, 0.0, 0.1, 0.3, 0.0, 0.001])
    race = GumbelMax(6, torch.float32, CPU)
    drawn = [race.draw(y, row_key(4, position, Stream.CORRECTION)) for position in range(20_000)]
    counts = np.bincount(drawn, minlength=6)
    assert counts[1] == counts[4] == 0
    kept = [0, 2, 3, 5]
    expected = y.numpy()[kept] / y.numpy().sum() * 20_000
    assert stats.chisquare(counts[kept], expected.astype(float) * (20_000 / expected.sum())).pvalue > FALSE_ALARM
