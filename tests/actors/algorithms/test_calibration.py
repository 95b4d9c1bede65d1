"""Calibration: monotone, close to the truth with samples, and harmless without."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.algorithms.calibration import Calibration, Curve, isotonic

probability = st.floats(0.0, 1.0)


def test_isotonic_pools_adjacent_violators():
    """3, 1 are pooled to their mean 2, weighted; what rises already stays."""
    assert isotonic([0.0, 3.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0]) == [0.0, 2.0, 2.0, 4.0]
    assert isotonic([3.0, 0.0], [1.0, 2.0]) == [1.0, 1.0]


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 5)), min_size=1, max_size=20))
def test_isotonic_is_a_projection(pairs):
    """Non-decreasing, keeps the weighted mean, and leaves its own result alone."""
    values, weights = zip(*pairs, strict=True)
    fitted = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in pairwise(fitted))
    total = sum(v * w for v, w in zip(values, weights, strict=True))
    assert sum(v * w for v, w in zip(fitted, weights, strict=True)) == pytest.approx(total, abs=1e-6)
    assert isotonic(fitted, weights) == pytest.approx(fitted)


@given(probability)
def test_a_draft_is_taken_at_its_word_at_first(raw):
    assert Curve()(raw) == pytest.approx(raw, abs=1e-9)


@settings(max_examples=50)
@given(st.lists(st.tuples(probability, st.booleans()), max_size=200), st.lists(probability, min_size=2, max_size=20))
def test_more_confident_is_never_less_probable(history, asked):
    curve = Curve()
    for raw, came_true in history:
        curve.observe(raw, came_true)
    answers = [curve(raw) for raw in sorted(asked)]
    assert all(a <= b + 1e-12 for a, b in pairwise(answers))
    assert all(0.0 <= a <= 1.0 for a in answers)


def test_it_converges_to_what_comes_true():
    """A draft that says c is right with probability c². With 20,000 guesses about a thousand fall in each bin, whose
    memory of 200 to 400 gives a standard error of at most 0.035 per bin; interpolation and pooling narrow it. A
    deviation of 0.12 is then beyond 3.4 standard errors at each of five points: false alarm below 1 in 250, and the
    seed is fixed."""
    rng = random.Random(7)
    curve = Curve()
    for _ in range(20_000):
        raw = rng.random()
        curve.observe(raw, rng.random() < raw * raw)
    for raw in (0.2, 0.4, 0.6, 0.8, 0.95):
        assert curve(raw) == pytest.approx(raw * raw, abs=0.12)


def test_it_follows_a_change():
    """All true, then all false: after 1,500 of each, what is remembered of the first phase is at most a few per cent
    (the weight of the past halves whenever a bin holds 400)."""
    curve = Curve()
    for _ in range(1500):
        curve.observe(0.5, True)
    assert curve(0.5) > 0.95
    for _ in range(1500):
        curve.observe(0.5, False)
    assert curve(0.5) < 0.05


def test_three_samples_do_not_overturn_the_prior():
    """Three misses at 0.8 against priors of six observations: the bin's own mean, 6·0.8 / 9 = 0.53, lies below the
    bins around 0.6 and 0.7, which hold their priors alone, so the three are pooled: 6·(0.6 + 0.7 + 0.8) / 21 = 0.6."""
    curve = Curve(prior=6.0)
    for _ in range(8):  # what was learned is used from eight observations on: five of another confidence
        curve.observe(0.2, False)
    for _ in range(3):
        curve.observe(0.8, False)
    for _ in range(5):
        curve.observe(0.2, False)
    assert curve(0.8) == pytest.approx(6 * (0.6 + 0.7 + 0.8) / 21)


def test_ranks_are_learned_apart():
    """Of 400 nodes the first child came true in 300, the second in the rest: 0.75 and 0.25, though both claimed 0.5."""
    calibration = Calibration()
    for i in range(400):
        calibration.observe((0.5, 0.5), 0 if i % 4 else 1)
    first, second = calibration.probabilities((0.5, 0.5))
    assert first == pytest.approx(0.75, abs=0.02)
    assert second == pytest.approx(0.25, abs=0.02)


@given(st.lists(probability, min_size=1, max_size=32))
def test_children_exclude_each_other(confidences):
    """At most one child comes true, whatever was claimed."""
    assert sum(Calibration().probabilities(confidences)) <= 1.0 + 1e-9
