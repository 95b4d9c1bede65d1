"""What is read of rows (row_program.py): the coupled rule's token, a draft's best children, the most likely tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms import sampling
from actors.algorithms.candidates import Kept
from actors.algorithms.gumbel_max import GumbelMax
from actors.algorithms.noise import NoiseSource, gumbel_of_words
from actors.algorithms.row_program import NONE, Logits, LogitsRow


class CoupledChoice:
    """The coupled rule's token, argmax(log p + g) of the filtered distribution; the best token where greedy."""

    width = 1

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, at_once: bool) -> None:
        """at_once: as of RowProgram."""
        self._size, self._dtype, self._device = size, dtype, device
        self._on_cpu = not at_once
        self._race: GumbelMax | None = None

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if self._on_cpu:
            return torch.from_numpy(self._on_host(z, rows))[:, None]
        assert isinstance(z, Tensor)
        if not all(row.changes.sampling.greedy for row in rows):
            heat = [0.0 if row.changes.sampling.greedy else row.changes.sampling.temperature for row in rows]
            noise = NoiseSource(self._size, z.dtype, len(rows), z.device).negated([row.key for row in rows])
            z = torch.addcmul(z, noise, torch.tensor(heat, dtype=z.dtype, device=z.device)[:, None], value=-1)
        best, tokens = z.max(-1)
        return torch.where(best.isfinite(), tokens, NONE)[:, None]

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        keys = [row.key for row in rows]
        source = NoiseSource(kept.ids, self._dtype, len(keys))
        if self._on_cpu:  # in double precision, as for one row
            noise = torch.from_numpy(gumbel_of_words(source.words(keys).numpy().view(np.uint32)))
            scores = kept.scaled.double() + noise
        else:
            scores = kept.scaled - source.negated(keys)
        return kept.ids.gather(1, scores.argmax(-1, keepdim=True))

    def _on_host(self, z: Logits, rows: Sequence[LogitsRow]) -> NDArray[np.int64]:
        """NumPy's argmax is vectorised, torch's on a CPU is not; and a single row's noise stays in the cache."""
        lines = z.numpy() if isinstance(z, Tensor) else [row.numpy() for row in z]
        best = lines.argmax(-1) if isinstance(lines, np.ndarray) else np.array([line.argmax() for line in lines])
        for n, row in enumerate(rows):
            settings = row.changes.sampling
            if not np.isfinite(lines[n][best[n]]):
                best[n] = NONE
            elif not settings.greedy:
                if self._race is None:
                    self._race = GumbelMax(self._size, self._dtype, self._device)
                best[n] = self._race.winner(z[n], settings.temperature, row.key)
        return best


class BestPerturbed:
    """The `count` best tokens by log q + g, or by log q where greedy, and the softmax of these scores at each.

    vocabulary: the id of each column, as of RowProgram; the tokens read are such ids.
    """

    def __init__(self, count: int, vocabulary: Tensor | None = None) -> None:
        self.width = 2 * count
        self._count, self._vocabulary = count, vocabulary
        self._source: NoiseSource | None = None

    def parts(self, found: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of what was read of a row: tokens and confidences, which are not above 0 where there is nothing."""
        return found[: self._count].astype(np.int64), found[self._count :]

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if not isinstance(z, Tensor) or z.device.type == "cpu":  # a row at a time stays in the cache
            return torch.cat([self._rank(self._perturbed(row[None], [ask])) for row, ask in zip(z, rows, strict=True)])
        return self._rank(self._perturbed(z, rows))

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        tokens = kept.ids if self._vocabulary is None else self._vocabulary[kept.ids]
        noise = NoiseSource(tokens, kept.scaled.dtype, len(rows)).negated([row.key for row in rows])
        return self._rank(kept.scaled - noise, tokens)

    def _perturbed(self, z: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """[R, V]"""
        if all(row.changes.sampling.greedy for row in rows):
            return z
        greedy = torch.tensor([row.changes.sampling.greedy for row in rows], device=z.device)[:, None]
        heat = [1.0 if row.changes.sampling.greedy else row.changes.sampling.temperature for row in rows]
        noise = self._noise(z, len(rows)).negated([row.key for row in rows])
        scaled = z / torch.tensor(heat, dtype=z.dtype, device=z.device)[:, None]
        return scaled.sub_(noise.masked_fill_(greedy, 0.0))

    def _noise(self, z: Tensor, count: int) -> NoiseSource:
        tokens = z.shape[1] if self._vocabulary is None else self._vocabulary
        if count > 1:
            return NoiseSource(tokens, z.dtype, count, z.device)
        if self._source is None:
            self._source = NoiseSource(tokens, z.dtype, 1, z.device)
        return self._source

    def _rank(self, scores: Tensor, ids: Tensor | None = None) -> Tensor:
        best, places = scores.topk(min(self._count, scores.shape[1]))  # [R, B]
        confidences = (best - scores.logsumexp(-1, keepdim=True)).exp()
        tokens = _tokens(places, ids, self._vocabulary)
        missing = self._count - tokens.shape[1]
        return torch.cat([_padded(tokens.double(), missing), _padded(confidences.double(), missing)], 1)


class MostLikely:
    """The `count` best tokens by q, their log q but for a constant, best first, and log of the sum over all of q.

    vocabulary: as of BestPerturbed. sums: whether the sum is wanted (it is 0 otherwise).
    """

    def __init__(self, count: int, vocabulary: Tensor | None = None, *, sums: bool) -> None:
        self.width = 2 * count + 1
        self._count, self._vocabulary, self._sums = count, vocabulary, sums

    def parts(self, found: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        """Of what was read of a row: tokens, scores (-inf where there is nothing) and the log of the sum."""
        if found[0] == NONE or not np.isfinite(found[self._count]):
            return np.zeros(0, dtype=np.int64), np.zeros(0), 0.0
        return found[: self._count].astype(np.int64), found[self._count : -1], float(found[-1])

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if not isinstance(z, Tensor):
            z = torch.stack(list(z))
        heat = [row.changes.sampling.temperature for row in rows]
        if any(temperature != 1 for temperature in heat):
            z = z / torch.tensor(heat, dtype=z.dtype, device=z.device)[:, None]
        return self._rank(z)

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        return self._rank(kept.scaled, kept.ids if self._vocabulary is None else self._vocabulary[kept.ids])

    def _rank(self, scaled: Tensor, ids: Tensor | None = None) -> Tensor:
        best, places = scaled.topk(min(self._count, scaled.shape[1]))  # [R, S]
        tokens = _tokens(places, ids, self._vocabulary)
        missing = self._count - tokens.shape[1]
        total = scaled.logsumexp(-1, keepdim=True) if self._sums else torch.zeros_like(best[:, :1])
        return torch.cat([_padded(tokens.double(), missing), _padded(best.double(), missing, -torch.inf), total], 1)


def _tokens(places: Tensor, ids: Tensor | None, vocabulary: Tensor | None) -> Tensor:
    """Token of each place [R, B]: of candidates with `ids` [R, C], or of columns."""
    if ids is not None:
        return ids.gather(1, places)
    return places if vocabulary is None else vocabulary[places]


class LogProbabilities:
    """log softmax of a row at one token, and at the `count` most likely ids. tokens: by index of the row."""

    def __init__(self, tokens: Mapping[int, int], count: int, *, at_once: bool) -> None:
        self._tokens, self._count, self._on_cpu = tokens, max(1, count), not at_once
        self.width = 2 * self._count + 1

    def parts(self, found: NDArray[np.float64]) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Of what was read of a row: the token's log-probability, then ids with theirs, best first."""
        ids, values = found[: self._count].astype(np.int64).tolist(), found[self._count :].tolist()
        return values[0], tuple((token, value) for token, value in zip(ids, values[1:], strict=True) if token >= 0)

    def of_all(self, z: Logits, rows: Sequence[LogitsRow]) -> Tensor:
        if not self._on_cpu and isinstance(z, Tensor):
            return self._of(z, torch.tensor([self._tokens[row.index] for row in rows], device=z.device))
        lines = [self._one(row, self._tokens[ask.index]) for row, ask in zip(z, rows, strict=True)]
        return torch.tensor(lines, dtype=torch.float64)

    def of_kept(self, kept: Kept, rows: Sequence[LogitsRow]) -> Tensor:
        raise NotImplementedError("log-probabilities are of the model's own logits, which no setting filters")

    def _of(self, z: Tensor, tokens: Tensor) -> Tensor:
        best, ids = z.topk(min(self._count, z.shape[1]))  # [R, count]
        normaliser = z.logsumexp(-1, keepdim=True)
        missing = self._count - best.shape[1]
        values = torch.cat([z.gather(1, tokens[:, None]), best], 1) - normaliser
        return torch.cat([_padded(ids.double(), missing, NONE), _padded(values.double(), missing)], 1)

    def _one(self, z: Tensor, token: int) -> list[float]:
        logprob, best = sampling.log_probabilities(z, token, self._count)
        missing = self._count - len(best)
        return [*(n for n, _ in best), *[NONE] * missing, logprob, *(value for _, value in best), *[0.0] * missing]


def _padded(values: Tensor, missing: int, value: float = 0.0) -> Tensor:
    """[R, B + missing]"""
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values
