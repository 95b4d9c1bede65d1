"""What a pass costs, learned from the passes. Pure: seconds are handed in."""

from __future__ import annotations

RIDGE = 1e-4
"""Passes whose sizes spread by less than a hundredth of their mean tell nothing about the cost of a token."""


class PassCost:
    """Online fit of a pass's seconds, a + b · tokens; of a draft step's, with rows for tokens.

    Least squares with exponential forgetting. A lone outlier (garbage collection, a compilation) counts as half as
    slow again as expected; two in a row are believed.

    memory: weight of the past after each pass; 0.985 remembers about 67 passes.
    """

    def __init__(self, memory: float = 0.985) -> None:
        self._memory = memory
        self._mass = self._x = self._y = self._xx = self._xy = 0.0
        self._last = 0.0
        self.base = 0.0
        self.slope = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens took `seconds`."""
        believed = min(seconds, 1.5 * max(self(tokens), self._last)) if self._mass else seconds
        self._last = seconds
        keep = self._memory
        self._mass = keep * self._mass + 1.0
        self._x = keep * self._x + tokens
        self._y = keep * self._y + believed
        self._xx = keep * self._xx + tokens * tokens
        self._xy = keep * self._xy + tokens * believed
        self._fit()

    def _fit(self) -> None:
        x, y = self._x / self._mass, self._y / self._mass
        spread = max(0.0, self._xx / self._mass - x * x) + RIDGE * x * x
        joint = self._xy / self._mass - x * y
        # Neither part of a cost is negative.
        self.slope = min(max(joint / spread, 0.0), y / x)
        self.base = y - self.slope * x

    def __call__(self, tokens: float) -> float:
        """Expected seconds of a pass over `tokens` tokens; 0 while nothing was observed."""
        return self.base + self.slope * tokens
