"""Quantiles of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float, empty: float = math.nan) -> float:
    """The value below which `share` of the values lie (nearest rank); `empty` where there are none."""
    if not values:
        return empty
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
