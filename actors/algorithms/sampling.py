"""From a row of logits to log p: the sampling settings, at one position, with the history of that position.

The order is vLLM's: allowed ids (and a grammar's mask), bad words, min_tokens, logit_bias, repetition, frequency and
presence penalty, then temperature, min_p, top_k, top_p. Presence and frequency count the answer's tokens only (as
OpenAI's and vLLM's do), repetition the prompt's too (as Hugging Face's does). `ignore_eos` changes when an answer
stops, not what is drawn, and min_tokens masks the end-of-text ids all the same (both as in vLLM).

Everything up to the penalties changes which token is most likely (`adjust`); the rest (`kept`, `log_p`) only
matters when drawing. Ties at the edge of top_k or top_p are all kept, so that the result depends on no sorting order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.settings import SamplingSettings

_FEW = 512
_MANY = 4096
_NEAR = 8.0
_BUCKETS = 2048
_RANGE = 20.0
"""The buckets span the best score down to this much below it; one more takes the rest."""
_RIVALS = 64


def adjusts(sampling: SamplingSettings) -> bool:
    """Whether `adjust` would change anything."""
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.logit_bias
        or penalises(sampling)
    )


def filters(sampling: SamplingSettings) -> bool:
    """Whether min_p, top_k or top_p leave tokens out."""
    return sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1


def penalises(sampling: SamplingSettings) -> bool:
    """Whether what was said before changes a row."""
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1


class History:
    """What has been said before a position. It follows a block, one draft token after another.

    Penalties go by arrays, of the few hundred ids that were said: a step costs a copy of them at most.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingSettings) -> None:
        self._longest = max((len(word) for word in sampling.bad_words), default=1) - 1
        self.length = len(output)
        self.tail = list(output[-self._longest :]) if self._longest else []
        counts = Counter(output) if penalises(sampling) else Counter[int]()
        self._places = {token: n for n, token in enumerate(counts)}
        self.answered = _ids(counts)
        """int64: the ids of the answer so far, each once."""
        self.times: NDArray[np.float64] = np.fromiter(counts.values(), np.float64, len(counts))
        """How often each of them was said."""
        self._prompt = set(prompt) if sampling.repetition_penalty != 1 else set[int]()
        self.said = _ids(self._prompt | counts.keys()) if sampling.repetition_penalty != 1 else self.answered
        """int64: those of the prompt too, for the repetition penalty."""
        self._counting = penalises(sampling)

    def place(self, token: int) -> int | None:
        """Where `token` stands in `answered`; None if it was not said, or nothing is counted."""
        return self._places.get(token)

    def in_prompt(self, token: int) -> bool:
        """Whether the prompt holds it, where repetition is penalised."""
        return token in self._prompt

    def append(self, token: int) -> None:
        """`token` was said."""
        self.length += 1
        if self._longest:
            self.tail = [*self.tail, token][-self._longest :]
        if self._counting:
            self._count(token)

    def _count(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self.times[place] += 1
            return
        self._places[token] = len(self._places)
        self.answered = np.append(self.answered, token)
        self.times = np.append(self.times, 1.0)
        if token not in self._prompt:
            self.said = np.append(self.said, token)


def adjust(
    row: Tensor, sampling: SamplingSettings, history: History, eos: Sequence[int], columns: Columns | None = None
) -> None:
    """Apply masks, bias and penalties to `row` [V] in place; what cannot be chosen becomes -inf.

    columns: where a row holds only some of the vocabulary. Ids that the row does not hold are ignored; engines
    refuse ids outside the vocabulary when a request arrives (`check_ids`).
    """
    columns = columns or Columns(row.shape[-1])
    if sampling.allowed_token_ids is not None:
        allowed = columns.of(sampling.allowed_token_ids, row)
        kept = row[allowed]
        row.fill_(-math.inf)
        row[allowed] = kept
    if sampling.bad_words:
        banned = [word[-1] for word in sampling.bad_words if word and _ends_with(history.tail, word[:-1])]
        row[columns.of(banned, row)] = -math.inf
    if history.length < sampling.min_tokens:
        row[columns.of((*eos, *sampling.stop_token_ids), row)] = -math.inf
    if sampling.logit_bias:
        row[columns.of(sampling.logit_bias, row)] += columns.values(sampling.logit_bias, row)
    if penalises(sampling):
        _penalise(row, sampling, history, columns)


def _penalise(row: Tensor, sampling: SamplingSettings, history: History, columns: Columns) -> None:
    scores = row.numpy() if row.device.type == "cpu" else None
    if sampling.repetition_penalty != 1:
        factor = sampling.repetition_penalty
        said, _ = columns.places(history.said)
        if scores is not None:  # the same arithmetic, without torch's price per call
            now = scores[said]
            scores[said] = np.where(now > 0, now / factor, now * factor)
        else:
            on_device = torch.from_numpy(said).to(row.device)
            values = row[on_device]
            row[on_device] = torch.where(values > 0, values / factor, values * factor)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(history.answered):
        answered, kept = columns.places(history.answered)
        losses = sampling.frequency_penalty * history.times[kept] + sampling.presence_penalty
        if scores is not None:
            scores[answered] -= losses.astype(scores.dtype)
        else:
            row[torch.from_numpy(answered).to(row.device)] -= torch.from_numpy(losses).to(row.device, row.dtype)


class Columns:
    """Which column of a row belongs to a token: the id itself, or where `ids` [V'] has it."""

    def __init__(self, size: int, ids: Tensor | None = None) -> None:
        self._size = size
        self._ids = ids
        self._by_token: dict[int, int] | None = None

    @property
    def _column(self) -> dict[int, int] | None:
        """None where ids are columns. Made when it is asked for first: it takes longer than the rest of a draft step,
        and most settings need none."""
        if self._ids is not None and self._by_token is None:
            self._by_token = {token: n for n, token in enumerate(self._ids.tolist())}
        return self._by_token

    def of(self, tokens: Iterable[int], row: Tensor) -> Tensor:
        """int64: the columns of those tokens that the row holds, in their order."""
        found = [self._find(token) for token in tokens]
        return torch.tensor([n for n in found if n is not None], dtype=torch.int64, device=row.device)

    def array(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """As `of`, on the host."""
        return self.places(np.array(tokens, dtype=np.int64))[0]

    def values(self, by_token: Mapping[int, float], row: Tensor) -> Tensor:
        """The values of those tokens that the row holds, in their order."""
        found = [value for token, value in by_token.items() if self._find(token) is not None]
        return torch.tensor(found, dtype=row.dtype, device=row.device)

    def places(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Columns of those `tokens` that the row holds, and which these are."""
        column = self._column
        if column is None:
            kept = tokens < self._size
            return tokens[kept], kept
        found = np.array([column.get(token, -1) for token in tokens.tolist()], dtype=np.int64)
        kept = found >= 0
        return found[kept], kept

    def _find(self, token: int) -> int | None:
        column = self._column
        if column is not None:
            return column.get(token)
        return token if token < self._size else None


def kept(row: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p leave of an adjusted row [V]: ids, int64 [M], and their logits over temperature."""
    size = row.shape[-1]
    if 0 < sampling.top_k < min(size, _FEW):
        best, ids = _top(row, sampling.top_k + 1, sampling.temperature)
        if best[-1] < best[-2]:  # no tie at the edge, so these are all
            scaled = best[:-1] / sampling.temperature
            inside = scaled >= _min_p_edge(scaled, sampling)
            if sampling.top_p < 1:
                inside &= scaled >= _nucleus(scaled[inside], sampling.top_p)[0]
            return ids[:-1][inside], scaled[inside]
    scaled = row if sampling.temperature == 1 else row / sampling.temperature
    lowest = _min_p_edge(scaled, sampling)
    if 0 < sampling.top_k < size:
        lowest = max(lowest, float(scaled.topk(sampling.top_k).values[-1]))
    if sampling.top_p < 1:
        within = None if lowest == -math.inf else _at_least(scaled, lowest)
        edge, near = _nucleus(scaled if within is None else scaled[within], sampling.top_p)
        lowest = max(lowest, edge)
        if near is not None:  # they hold all that is kept, so the others need not be looked at again
            near = near if within is None else within[near]
            ids = near[scaled[near] >= lowest]
            return ids, scaled[ids]
    ids = _at_least(scaled, lowest)
    return ids, scaled[ids]


def _top(row: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
    """As torch.topk. It costs less among the tokens near the best one, where they are enough."""
    near = _at_least(row, largest(row) - _NEAR * temperature)
    if count <= len(near) <= _MANY:
        best, places = row[near].topk(count)
        return best, near[places]
    best, ids = row.topk(count)
    return best, ids


def _min_p_edge(scaled: Tensor, sampling: SamplingSettings) -> float:
    return largest(scaled) + math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


def _nucleus(scaled: Tensor, top_p: float) -> tuple[float, Tensor | None]:
    """Score of the last token of the smallest set that holds `top_p` of the tokens given, [M].

    A token is kept while the mass before it is below top_p. Sorting is what costs: usually the tokens near the best
    one hold enough, and these come along (int64, places in `scaled`); otherwise buckets by score find the few among
    which the mass crosses top_p.
    """
    best, wanted = largest(scaled), top_p
    weights = scaled.softmax(-1)
    near: Tensor | None = None
    if len(scaled) > _FEW:
        near = _at_least(scaled, best - _NEAR)
        if len(near) <= _MANY and float(weights[near].sum()) > wanted:
            scaled, weights = scaled[near], weights[near]
        else:
            near = None
            bucket = (best - scaled).mul_(_BUCKETS / _RANGE).clamp_(max=_BUCKETS).to(torch.int32)
            mass = torch.bincount(bucket, weights.double(), _BUCKETS + 1).cumsum(0)
            crossing = int((mass < wanted).sum().clamp(max=_BUCKETS))
            wanted -= float(mass[crossing - 1]) if crossing else 0.0
            inside = _where(bucket == crossing)
            if len(inside) == 0:  # rounding: the whole mass falls a little short of what is wanted
                return -math.inf, None
            scaled, weights = scaled[inside], weights[inside]
    order = scaled.argsort(descending=True)
    mass = weights[order].cumsum(0, dtype=torch.float64)
    last = int((mass < wanted).sum().clamp(max=len(order) - 1))
    return float(scaled[order[last]]), near


def largest(row: Tensor) -> float:
    """NumPy's maximum is vectorised, torch's on a CPU is not."""
    return float(row.numpy().max()) if row.device.type == "cpu" else float(row.amax())


def _ids(tokens: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64, len(tokens))


def _at_least(scaled: Tensor, lowest: float) -> Tensor:
    """Places of the scores from `lowest` on. NumPy compares several times faster than torch on a CPU."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(scaled.numpy() >= lowest))
    return _where(scaled >= lowest)


def _where(mask: Tensor) -> Tensor:
    """Indices of what is true. On a CPU NumPy finds them several times faster."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def margin(scaled: Tensor, scores: Tensor, chosen: int, sampling: SamplingSettings) -> float:
    """How much two logits (over temperature) must move towards each other before another token is chosen.

    scaled: [V]. scores: [V], `scaled` with its noise, of all tokens. Another token is chosen when it comes to lead
    inside the kept set, perhaps getting in at the same time, or when the chosen one falls out. A lower bound, but for
    moves that change the kept sets of two filters at once.
    """
    possible = scaled > -math.inf
    chosen = int(possible[:chosen].sum())
    scaled, scores = scaled[possible], scores[possible]
    inside = torch.full_like(scaled, math.inf)  # distance to the edge of min_p and top_k; negative outside
    if sampling.min_p > 0:
        inside = scaled - scaled.amax() - math.log(sampling.min_p)
    if 0 < sampling.top_k < len(scaled):
        best = scaled.topk(sampling.top_k + 1).values
        inside = torch.minimum(inside, torch.where(scaled >= best[-2], scaled - best[-1], scaled - best[-2]))
    needed = torch.maximum(scores[chosen] - scores, -inside)
    needed[chosen] = inside[chosen]
    if sampling.top_p == 1:
        return float(needed.amin())
    kept = torch.where(inside >= 0, scaled, -math.inf)
    order = kept.argsort(descending=True)
    values, mass = kept[order], kept.softmax(-1)[order]
    smallest = min(float(needed[chosen]), _to_cross(values, mass, order, chosen, sampling.top_p, falls=True))
    for token in needed.argsort()[:_RIVALS].tolist():
        if token != chosen and float(needed[token]) < smallest:
            to_rise = _to_cross(values, mass, order, token, sampling.top_p, falls=False) if inside[token] >= 0 else 0.0
            smallest = min(smallest, max(float(needed[token]), to_rise))
    return max(0.0, smallest)


def _to_cross(values: Tensor, mass: Tensor, order: Tensor, token: int, top_p: float, *, falls: bool) -> float:
    """How far `token` must move to cross the edge of top_p: passing others, while their mass moves too.

    A move of e changes the mass of any set by at most e / 4 (the slope of the logistic function).
    """
    others = order != token
    steps = (values[~others] - values[others]) * (1 if falls else -1)
    if falls:  # the mass before it grows as it sinks
        before = mass[others].cumsum(0)
        return float(torch.maximum(steps, 4 * (top_p - before)).clamp_(min=0).amin()) if len(steps) else math.inf
    before = mass[others].cumsum(0) - mass[others]  # what is before it once it has passed this one
    rises = torch.maximum(steps, 4 * (before - top_p)).clamp_(min=0)
    stays = 4 * (float(mass[others][values[others] > values[~others]].sum()) - top_p)
    return max(0.0, min(stays, float(rises.amin()) if len(rises) else math.inf))


def log_p(row: Tensor, sampling: SamplingSettings) -> Tensor:
    """log p [V] of an adjusted row [V]: temperature, min_p, top_k and top_p, normalised, -inf outside the support.

    Greedy settings give the one-hot distribution of the most likely token. The row must have a finite entry.
    """
    if sampling.greedy:
        certain = torch.full_like(row, -math.inf)
        certain[row.argmax()] = 0
        return certain
    if not filters(sampling):
        return (row / sampling.temperature).log_softmax(-1)
    ids, scaled = kept(row, sampling)
    return torch.full_like(row, -math.inf).index_copy_(0, ids, scaled.log_softmax(-1))


def probabilities(row: Tensor, sampling: SamplingSettings) -> Tensor:
    """p [V] of an adjusted row [V]: the exponential of `log_p`, in fewer steps."""
    if sampling.greedy:
        return log_p(row, sampling).exp_()
    if filters(sampling):
        ids, scaled = kept(row, sampling)
        return torch.zeros_like(row).index_copy_(0, ids, scaled.softmax(-1))
    return (row if sampling.temperature == 1 else row / sampling.temperature).softmax(-1)


def log_probabilities(row: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """log softmax of a row [V] at `token`, and at the `count` most likely ids, best first."""
    best, ids = _top(row, max(1, min(count, row.shape[-1])), 1.0)
    # One pass of softmax costs half of what logsumexp does; the largest probability is the most exact of it.
    normaliser = float(best[0]) - math.log(float(row.softmax(-1)[ids[0]]))
    scores = [score - normaliser for score in best.tolist()]
    return float(row[token]) - normaliser, list(zip(ids.tolist(), scores, strict=True))[:count]


def check_ids(sampling: SamplingSettings, vocabulary: int) -> str | None:
    """The name of a setting that holds an id outside the vocabulary, or allows none inside it; None if all is well."""
    fields: dict[str, Sequence[int]] = {
        "logit_bias": tuple(sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": tuple(token for word in sampling.bad_words for token in word),
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, ids in fields.items():
        if any(not 0 <= token < vocabulary for token in ids):
            return name
    return "allowed_token_ids" if sampling.allowed_token_ids == () else None


def _ends_with(tail: Sequence[int], prefix: Sequence[int]) -> bool:
    return not prefix or tuple(tail[-len(prefix) :]) == tuple(prefix)
