"""What a pass costs, learned from the passes. Pure: seconds are handed in."""

from __future__ import annotations


class PassCost:
    """Online fit of a pass's seconds, a + b · tokens; of a draft step's, with rows for tokens.

    Passes are gathered by size, each size with a running mean that outliers pull little; the line is fitted through
    these. A size that is no longer seen keeps a tenth of its weight, so that the slope is not forgotten while
    all passes are alike; a stale size corrects itself, since a wrong slope leads to passes of other sizes.
    """

    def __init__(self, memory: float = 0.95) -> None:
        self._memory = memory
        self._sizes: dict[int, list[float]] = {}  # size class -> [weight, tokens, seconds]
        self.base = 0.0
        self.slope = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens took `seconds`."""
        for entry in self._sizes.values():
            entry[0] = max(entry[0] * self._memory, min(entry[0], 0.1))
        # A class spans about a fifth of its size: neighbours differ by less than the noise of a pass.
        size_class = tokens if tokens < 10 else int(tokens / 2 ** (tokens.bit_length() - 4)) + 8 * tokens.bit_length()
        entry = self._sizes.setdefault(size_class, [0.0, float(tokens), seconds])
        # One slow pass (garbage collection, a compilation) counts as one that is half as slow again at most.
        seconds = min(seconds, 1.5 * entry[2])
        entry[0] = min(entry[0] + 0.2, 1.0)
        share = max(0.1, 0.2 / entry[0]) if entry[0] < 1.0 else 0.1
        entry[1] += share * (tokens - entry[1])
        entry[2] += share * (seconds - entry[2])
        self._fit()

    def _fit(self) -> None:
        entries = self._sizes.values()
        mass = sum(w for w, _, _ in entries)
        mean_x = sum(w * x for w, x, _ in entries) / mass
        mean_y = sum(w * y for w, _, y in entries) / mass
        spread = sum(w * (x - mean_x) ** 2 for w, x, _ in entries)
        joint = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in entries)
        # Neither part of a cost is negative.
        self.slope = min(max(joint / spread, 0.0), mean_y / mean_x) if spread > 0 else 0.0
        self.base = mean_y - self.slope * mean_x

    def __call__(self, tokens: float) -> float:
        """Expected seconds of a pass over `tokens` tokens; 0 while nothing was observed."""
        return self.base + self.slope * tokens
