"""Nearest-rank quantiles by hand."""

from __future__ import annotations

import math

from cluster.observability.quantiles import quantile


def test_quantiles() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([1.0], 0.99) == 1.0
    assert math.isnan(quantile([], 0.5))
    assert quantile([], 0.5, empty=0.0) == 0.0
