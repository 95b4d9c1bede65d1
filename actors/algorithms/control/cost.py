"""What a pass costs, learned from the passes. Pure: seconds are handed in."""

from __future__ import annotations

import math

RIDGE = 1e-4
"""Passes whose sizes spread by less than a hundredth of their mean tell nothing about the cost of a token."""


class PassCost:
    """Online fit of a pass's seconds, a + b · tokens + c · prompt tokens; of a draft step's, with rows for tokens.

    Prompt tokens have a price of their own: they come in long rows, which engines run at another cost per token than
    the short ones of decoding, and one fit of both would take one for the other.

    Least squares with exponential forgetting. A lone outlier (garbage collection, a compilation) counts as half as
    slow again as expected; two in a row are believed, and so is what a larger pass explains: one of twice the tokens
    may well take twice as long.

    memory: weight of the past after each pass; 0.985 remembers about 67 passes.
    """

    def __init__(self, memory: float = 0.985) -> None:
        self._memory = memory
        self._mass = self._last = 0.0
        self._x = self._p = self._y = 0.0
        self._xx = self._xp = self._pp = self._xy = self._py = 0.0
        self.base = 0.0
        self.slope = 0.0
        """Seconds that one more token, of a draft or committed, adds to a pass."""
        self.prompt_slope = 0.0

    def observe(self, tokens: int, seconds: float, prompt: int = 0) -> None:
        """A pass over `tokens` tokens, and `prompt` ones of prompts besides, took `seconds`."""
        believed = min(seconds, 1.5 * max(self(tokens, prompt), self._last, self._in_proportion(tokens, prompt)))
        self._last = seconds
        keep = self._memory
        self._mass = keep * self._mass + 1.0
        self._x = keep * self._x + tokens
        self._p = keep * self._p + prompt
        self._y = keep * self._y + believed
        self._xx = keep * self._xx + tokens * tokens
        self._xp = keep * self._xp + tokens * prompt
        self._pp = keep * self._pp + prompt * prompt
        self._xy = keep * self._xy + tokens * believed
        self._py = keep * self._py + prompt * believed
        self._fit()

    def _in_proportion(self, tokens: int, prompt: int) -> float:
        """The most that such a pass may take if a usual one takes what it does: all of it by its tokens, or prompts."""
        if self._mass == 0.0 or (tokens and not self._x) or (prompt and not self._p):
            return math.inf  # of a kind that was not seen before
        larger = max(tokens * self._mass / self._x if tokens else 1.0, prompt * self._mass / self._p if prompt else 1.0)
        return self._y / self._mass * max(1.0, larger)

    def _fit(self) -> None:
        """Solve the normal equations of the centred sums; no part of a cost is negative."""
        mass = self._mass
        x, p, y = self._x / mass, self._p / mass, self._y / mass
        xx = max(0.0, self._xx / mass - x * x) + RIDGE * x * x
        pp = max(0.0, self._pp / mass - p * p) + RIDGE * p * p
        xp, xy, py = self._xp / mass - x * p, self._xy / mass - x * y, self._py / mass - p * y
        determinant = xx * pp - xp * xp
        if determinant > RIDGE * xx * pp:
            slope, prompt_slope = (xy * pp - py * xp) / determinant, (py * xx - xy * xp) / determinant
        else:  # no prompts, or always in proportion: what is in a pass has one price
            whole = xx + 2 * xp + pp
            slope = prompt_slope = (xy + py) / whole if whole > 0.0 else 0.0
        if prompt_slope < 0.0:
            slope, prompt_slope = (xy / xx if xx > 0.0 else 0.0), 0.0
        elif slope < 0.0:
            slope, prompt_slope = 0.0, (py / pp if pp > 0.0 else 0.0)
        self.slope = min(max(slope, 0.0), y / x) if x > 0.0 else 0.0
        self.prompt_slope = max(0.0, min(prompt_slope, (y - self.slope * x) / p)) if p > 0.0 else 0.0
        self.base = y - self.slope * x - self.prompt_slope * p

    def __call__(self, tokens: float, prompt: float = 0) -> float:
        """Expected seconds of a pass over `tokens` tokens and `prompt` ones of prompts; 0 while none was observed."""
        return self.base + self.slope * tokens + self.prompt_slope * prompt
