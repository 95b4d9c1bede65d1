"""How much of what a client predicted came true (OpenAI's Predicted Outputs), whoever drafted it.

Knows nothing of drafts: the answer alone decides, so the figures are the same with speculation and without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PredictionTally:
    """Follows an answer through `prediction`, token by token, in O(log n) each.

    Where the two part, they meet again at the nearest place ahead where the answer's last two tokens occur.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._ends: dict[tuple[int, int], list[int]] = {}
        for i in range(len(prediction) - 1):
            self._ends.setdefault((prediction[i], prediction[i + 1]), []).append(i + 2)
        self._reached = 0
        """How much of the prediction the answer has come past."""
        self._last: int | None = None
        self._together = False
        self.accepted = 0
        """Tokens of the prediction that are in the answer."""

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that are not in the answer, so far."""
        return len(self._prediction) - self.accepted

    def follow(self, tokens: Sequence[int]) -> None:
        """The answer went on with `tokens`."""
        if not self._prediction:
            return
        for token in tokens:
            self._step(token)
            self._last = token

    def _step(self, token: int) -> None:
        if self._reached < len(self._prediction) and self._prediction[self._reached] == token:
            self._reached += 1
            self.accepted += 1
            self._together = True
            return
        missed = 1 if self._together else 2  # the token before was counted if it was met
        ends = self._ends.get((self._last, token), []) if self._last is not None else []
        place = bisect_left(ends, self._reached + missed)
        if place < len(ends):
            self._reached = ends[place]
            self.accepted += missed
            self._together = True
        else:
            self._together = False
