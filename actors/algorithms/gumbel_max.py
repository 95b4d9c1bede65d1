"""The most perturbed token of a full row: argmax(z / T + g), found without working the noise out for every token.

With E exponential, g = -log E, so the winner is also the token of least E / exp(z / T): a race of exponential clocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms.noise import NoiseSource, gumbel_of_words

_NEAR = 6.0
"""Tokens whose score is within this of the best are tried first; they hold nearly every winner."""
_MOST = 8
"""The shortcut is left when more than one token in this many would have to be tried."""


class GumbelMax:
    """Races over the tokens 0 to size - 1, with buffers that are used again.

    On a CPU `winner` looks at the noise words of all tokens (integer arithmetic) but takes logarithms only where a
    token can still win: for the best scores, and for the words so small that they beat the best of those.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._source = NoiseSource(size, dtype, device=device)
        self._on_cpu = device.type == "cpu"
        self._most = max(16, size // _MOST)

    def winner(self, z: Tensor, temperature: float, key: int) -> int:
        """argmax(z / temperature + g) of one row [size] with a finite maximum; `key` as of noise.row_key."""
        if self._on_cpu:
            found = self._shortcut(z, temperature, key)
            if found is not None:
                return found
        return _argmax(self._times(z, temperature, key))

    def gap(self, z: Tensor, temperature: float, key: int) -> float:
        """How far the winner's z / temperature + g is ahead of the next."""
        times = self._times(z, temperature, key)
        first, second = times.topk(2).values.tolist() if times.numel() > 1 else (1.0, math.inf)
        return math.log(second / first)

    def draw(self, y: Tensor, key: int) -> int:
        """One token from the distribution y [size], which need not be normalised."""
        return _argmax(self._source.negated_exponential([key])[0].div_(y))

    def _times(self, z: Tensor, temperature: float, key: int) -> Tensor:
        """Negated arrival times [size], but for a factor."""
        handicap = torch.sub(z, z.amax()).mul_(-1 / temperature).exp_()
        return handicap.mul_(self._source.negated_exponential([key])[0])

    def _shortcut(self, z: Tensor, temperature: float, key: int) -> int | None:
        scores = z.numpy()
        edge = float(scores.max()) - _NEAR * temperature
        near = np.flatnonzero(scores >= edge)
        if len(near) > self._most:
            return None
        words = self._source.words([key])[0].numpy().view(np.uint32)
        token, lead = _best_of(near, scores, words, temperature)
        # The others score below the edge: to take the lead they need g > (lead - edge) / T, and E >= v = word / 2^32.
        bound = math.ceil(math.exp(min(0.0, (edge - lead) / temperature)) * 2.0**32)
        far = np.flatnonzero(words <= min(bound, 2**32 - 1))
        if len(far) > self._most:
            return None
        rival, score = _best_of(far, scores, words, temperature) if len(far) else (token, lead)
        return rival if score > lead else token


def _best_of(
    tokens: NDArray[np.int64], z: NDArray[Any], words: NDArray[np.uint32], temperature: float
) -> tuple[int, float]:
    scores = z[tokens] + temperature * gumbel_of_words(words[tokens])
    best = int(scores.argmax())
    return int(tokens[best]), float(scores[best])


def _argmax(row: Tensor) -> int:
    """NumPy's argmax is vectorised, torch's on a CPU is not."""
    return int(row.numpy().argmax()) if row.device.type == "cpu" else int(row.argmax())
