"""min_p, top_k and top_p over many rows at once, by the few candidates of each row that they can keep.

`sampling.kept` says the same of one row. Neither sorts a vocabulary: what these filters keep nearly always stands among
the tokens near the best one, so they are taken out first, and all the rest is arithmetic over [R, C] with C some
hundreds. Where that was too few for a row it is not `sure`, and the caller must ask otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.settings import SamplingSettings

_NEAR = 8.0
"""On a CPU, candidates lie within this of the best score (over temperature)."""
_FARTHEST = 32.0
"""And within twice this, where top_k asks for more of them."""
_MOST = 4096
"""On a CPU, most candidates of a row."""
_ROUNDING = 1e-4
"""Of the sum of a row's probabilities in float32."""
_WIDTH = 1024
"""On a device, candidates of each row."""
_CHUNK_ON_CPU = 2**18
"""Scores that are worked on together on a CPU, so that they stay in the cache."""
_CHUNK_ON_DEVICE = 2**26
"""Scores of which a device holds copies at a time: 256 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the filters leave of some rows, best first. All tensors are [R, C] but for `rows`.

    rows: which of the rows asked for these are, int64 [R] on the host.
    ids: columns, int64. scaled: logits over temperature, -inf where a place is empty or its token not kept.
    sure: bool [R]; False where the candidates did not reach as far as the filters do, or a score is no number.
    """

    rows: NDArray[np.int64]
    ids: Tensor
    scaled: Tensor
    sure: Tensor


@dataclass(frozen=True, slots=True)
class _Candidates:
    """ids, scaled, weights: [R, C], best first. weights: softmax over the whole row.

    complete: [R, 1]; every token of the row whose score is `complete` or more is among them.
    """

    rows: NDArray[np.int64]
    ids: Tensor
    scaled: Tensor
    weights: Tensor
    complete: Tensor


def chunks(count: int, size: int, device: torch.device) -> Iterator[range]:
    """Rows [count, size], so many at a time that copies of them are cheap to hold."""
    scores = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ON_DEVICE
    step = max(1, scores // size)
    for start in range(0, count, step):
        yield range(start, min(count, start + step))


def filter_rows(parts: Iterable[Tensor], settings: Sequence[SamplingSettings]) -> list[Kept]:
    """Apply each row's min_p, top_k and top_p, on a CPU; there is at least one filter in each (`sampling.filters`).

    parts: adjusted logits, a row [V] at a time, float32 or float64. settings: one per row.
    """
    near: list[_Near] = []
    spare: Tensor | None = None
    for row, each in zip(parts, settings, strict=True):
        if spare is None:  # memory from the system costs more than the arithmetic
            spare = torch.empty_like(row)
        near.append(_nearest(row, each, len(near), spare))
    return [_keep(_gather(group), [settings[row.row] for row in group]) for group in _by_size(near)]


def filter_chunk(z: Tensor, settings: Sequence[SamplingSettings], first: int, *, whole: bool = False) -> Kept:
    """As `filter_rows`, of rows [R, V] on any device without waiting for it. first: number of the first of them.

    whole: sort all of each row, so that all are sure.
    """
    temperatures = torch.tensor([each.temperature for each in settings], dtype=z.dtype, device=z.device)
    return _keep(_best(z / temperatures[:, None], settings, first, whole), settings)


# -- candidates: on a device the best of each row, on a CPU those near its best one ----------------------------------


def _best(scaled: Tensor, settings: Sequence[SamplingSettings], first: int, whole: bool) -> _Candidates:
    size = scaled.shape[1]
    most = max((each.top_k for each in settings if each.top_k < size), default=0) + 1
    width = size if whole else min(size, max(_WIDTH, most))
    best, ids = scaled.topk(width)  # [R, C]
    weights = scaled.softmax(-1).gather(1, ids) if any(each.top_p < 1 for each in settings) else best
    # Of those that score as the last one does some may be missing.
    complete = torch.full_like(best[:, -1:], -math.inf) if width == size else _above(best[:, -1:])
    return _Candidates(np.arange(first, first + scaled.shape[0]), ids, best, weights, complete)


def _above(scores: Tensor) -> Tensor:
    return torch.nextafter(scores, torch.full_like(scores, math.inf))


@dataclass(frozen=True, slots=True)
class _Near:
    """One row's candidates [M] on a CPU, in no order."""

    row: int
    ids: NDArray[np.int64]
    scaled: Tensor
    weights: Tensor
    complete: float


def _nearest(row: Tensor, settings: SamplingSettings, number: int, spare: Tensor) -> _Near:
    """NumPy compares and finds several times faster than torch does on a CPU."""
    scaled = row if settings.temperature == 1 else row / settings.temperature
    scores = scaled.numpy()
    best = scores.max()
    reach = min(_NEAR, -math.log(settings.min_p) + 1) if settings.min_p > 0 else _NEAR
    complete = best - reach
    ids = np.flatnonzero(scores >= complete)
    while len(ids) < settings.top_k < len(scores) and reach < _FARTHEST:  # a model that is sure of itself has few
        reach *= 2
        complete = best - reach
        ids = np.flatnonzero(scores >= complete)
    if len(ids) < settings.top_k and len(ids) == np.count_nonzero(scores > -np.inf):
        complete = -np.inf
    if len(ids) > _MOST or not np.isfinite(best):
        return _too_few(number, scaled)
    places = torch.from_numpy(ids)
    near = scaled[places]
    weights = near
    if settings.top_p < 1 and not _limits(settings):
        weights = torch.softmax(scaled, -1, out=spare)[places]
        if complete > -np.inf and float(weights.sum()) < settings.top_p - _ROUNDING:
            return _too_few(number, scaled)
    return _Near(number, ids, near, weights, float(complete))


def _too_few(number: int, scaled: Tensor) -> _Near:
    """A row that is not sure, whatever the settings."""
    return _Near(number, np.zeros(1, dtype=np.int64), scaled[:1], scaled[:1], math.inf)


def _by_size(near: list[_Near]) -> Iterator[list[_Near]]:
    """Groups of rows whose numbers of candidates differ by a factor of four at most."""
    groups: dict[int, list[_Near]] = {}
    for row in near:
        groups.setdefault(max(7, len(row.ids).bit_length()) // 2, []).append(row)
    yield from groups.values()


def _gather(group: Sequence[_Near]) -> _Candidates:
    """Candidates of a few rows as [R, C], where C is the largest number of them."""
    counts = np.array([len(row.ids) for row in group])
    width, total = int(counts.max()), int(counts.sum())
    lines = np.repeat(np.arange(len(group)), counts)
    ends = counts.cumsum()
    places = torch.from_numpy(lines * width + np.arange(total) - np.repeat(ends - counts, counts))
    scores = torch.cat([row.scaled for row in group])
    scaled = scores.new_full((len(group), width), -math.inf)
    weights, ids = torch.zeros_like(scaled), torch.zeros_like(scaled, dtype=torch.int64)
    scaled.view(-1)[places] = scores
    weights.view(-1)[places] = torch.cat([row.weights for row in group])
    ids.view(-1)[places] = torch.from_numpy(np.concatenate([row.ids for row in group]))
    scaled, order = scaled.sort(-1, descending=True)
    complete = torch.tensor([row.complete for row in group], dtype=scaled.dtype)[:, None]
    rows = np.array([row.row for row in group])
    return _Candidates(rows, ids.gather(1, order), scaled, weights.gather(1, order), complete)


# -- the filters ---------------------------------------------------------------------------------------------------


def _limits(settings: SamplingSettings) -> bool:
    """Whether top_p goes by the mass of what min_p and top_k leave."""
    return settings.min_p > 0 or settings.top_k > 0


def _keep(candidates: _Candidates, settings: Sequence[SamplingSettings]) -> Kept:
    scaled, complete = candidates.scaled, candidates.complete
    width = scaled.shape[1]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=scaled.device)[:, None]

    best = scaled[:, :1]
    lowest = torch.full_like(best, -math.inf)  # [R, 1]: the score of the last token that min_p and top_k leave
    if any(each.min_p > 0 for each in settings):
        drops = column([math.log(each.min_p) if each.min_p > 0 else -math.inf for each in settings])
        lowest = (best.double() + drops).to(scaled.dtype)
    if any(each.top_k > 0 for each in settings):
        places = column([each.top_k - 1 for each in settings], torch.int64)
        kth = scaled.gather(1, places.clamp(0, width - 1))
        # Where there are fewer candidates than top_k, all are kept; whether that is right `complete` tells.
        kth = torch.where((places >= 0) & (places < width), kth, -math.inf)
        lowest = torch.maximum(lowest, kth)
    inside = scaled >= lowest  # [R, C]
    sure = lowest >= complete
    edge = lowest
    if any(each.top_p < 1 for each in settings):
        limited = column([_limits(each) for each in settings], torch.bool)
        within = scaled.masked_fill(~inside, -math.inf).softmax(-1)
        weights = (
            torch.where(limited, within, candidates.weights) if any(map(_limits, settings)) else candidates.weights
        )
        wanted = column([each.top_p if each.top_p < 1 else math.inf for each in settings])
        last = (weights.cumsum(-1, dtype=torch.float64) < wanted).sum(-1, keepdim=True)  # [R, 1]
        whole = inside.sum(-1, keepdim=True) - 1
        nucleus = scaled.gather(1, torch.minimum(last, whole).clamp_(min=0))
        edge = torch.where(wanted < 1, torch.maximum(lowest, nucleus), lowest)
        reached = (last < width) & (nucleus >= complete)
        sure = torch.where(wanted < 1, torch.where(limited, sure, reached), sure)
        sure |= complete == -math.inf
    sure = (sure & best.isfinite())[:, 0]
    return Kept(candidates.rows, candidates.ids, scaled.masked_fill(scaled < edge, -math.inf), sure)
