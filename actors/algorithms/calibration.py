"""Turns a draft's raw confidence into the probability that the token comes true, learned while serving.

Histogram binning with a prior that trusts the draft, made monotone by isotonic regression (pool adjacent violators;
Zadrozny and Elkan, "Transforming classifier scores into accurate multiclass probability estimates", KDD 2002) and
read off by linear interpolation. A separate map per rank, because the second guess of a confident draft is worth
less than its probability says. Knows nothing of trees or tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

EDGES = (0.002, 0.005, 0.012, 0.03, 0.06, 0.1, 0.17, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92, 0.97, 0.99)
"""Bin borders: finer where odds change fast, near zero and one."""


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` in weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, mass, length = value, weight, 1
        while pools and pools[-1][0] >= mean:
            before, before_mass, before_length = pools.pop()
            mean = (before * before_mass + mean * mass) / (before_mass + mass)
            mass += before_mass
            length += before_length
        pools.append((mean, mass, length))
    return [mean for mean, _, length in pools for _ in range(length)]


class Curve:
    """One monotone map from raw confidence to probability, in [0, 1].

    prior: observations that the identity map counts for, in each bin.
    memory: observations per bin after which the oldest half weighs half, so that the map follows a change.
    """

    __slots__ = ("_lines", "_memory", "_prior", "_stale", "_sums", "_trials", "_wins", "_xs", "_ys")

    def __init__(self, prior: float = 6.0, memory: float = 400.0) -> None:
        bins = len(EDGES) + 1
        self._prior = prior
        self._memory = memory
        self._wins = [0.0] * bins
        self._trials = [0.0] * bins
        self._sums = [0.0] * bins
        self._stale = 0
        self._fit()

    def observe(self, raw: float, came_true: bool) -> None:
        """Learn from one guess whose outcome is known."""
        i = bisect_right(EDGES, raw)
        if self._trials[i] >= self._memory:
            self._trials[i] *= 0.5
            self._wins[i] *= 0.5
            self._sums[i] *= 0.5
        self._trials[i] += 1.0
        self._sums[i] += raw
        if came_true:
            self._wins[i] += 1.0
        self._stale += 1

    def __call__(self, raw: float) -> float:
        """The probability that a guess of this raw confidence comes true."""
        if self._stale >= 8:
            self._fit()
        i = bisect_right(self._xs, raw)
        if i == 0:
            return self._ys[0]
        base, slope = self._lines[i - 1]
        return base + raw * slope

    def _fit(self) -> None:
        borders = (0.0, *EDGES, 1.0)
        prior = self._prior
        xs, ys, weights = [0.0], [0.0], [prior]
        for i, (trials, wins, total) in enumerate(zip(self._trials, self._wins, self._sums, strict=True)):
            centre = (borders[i] + borders[i + 1]) / 2
            weight = trials + prior
            x = (total + prior * centre) / weight
            xs.append(x)
            # The prior says "as confident as the draft was", at the confidences that were seen.
            ys.append((wins + prior * x) / weight)
            weights.append(weight)
        xs.append(1.0)
        ys.append(1.0)
        weights.append(0.01 * prior)  # certainty is claimed only where nothing was seen below it to contradict it
        ys = isotonic(ys, weights)
        self._xs, self._ys = xs, ys
        slopes = [
            (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0 for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False)
        ]
        self._lines = [(y - x * slope, slope) for x, y, slope in zip(xs, ys, [*slopes, 0.0], strict=True)]
        self._stale = 0


_FIRST_SHARE = 0.6
"""How often a sampled child comes true, before anything is known."""
_SHARE_RATE = 0.01


class Calibration:
    """Maps by rank: rank 0 is the sampled child, then its alternatives; ranks past the last share one map."""

    __slots__ = ("_curves", "_shares")

    def __init__(self, ranks: int = 9, prior: float = 6.0, memory: float = 400.0) -> None:
        self._curves = [Curve(prior, memory) for _ in range(ranks)]
        self._shares = [_FIRST_SHARE, *[(1 - _FIRST_SHARE) / ranks] * (ranks - 1)]

    def observe(self, confidences: Sequence[float], hit: int | None) -> None:
        """At one node, the children had these raw confidences, and child `hit` came true (None: no child did)."""
        last = len(self._curves) - 1
        for rank, raw in enumerate(confidences):
            place = min(rank, last)
            self._curves[place].observe(raw, rank == hit)
            self._shares[place] += _SHARE_RATE * ((rank == hit) - self._shares[place])

    def shares(self, count: int) -> list[float]:
        """How often the children of a node come true by rank alone, whatever their confidences."""
        return self._shares[:count] + self._shares[-1:] * (count - len(self._shares))

    def probabilities(self, confidences: Sequence[float]) -> list[float]:
        """Probabilities of the children of one node; at most one of them comes true, so their sum is at most one."""
        curves = self._curves
        found = [curve(raw) for curve, raw in zip(curves, confidences, strict=False)]
        if len(confidences) > len(curves):
            found += [curves[-1](raw) for raw in confidences[len(curves) :]]
        total = sum(found)
        return [p / total for p in found] if total > 1.0 else found
