"""Ranking children with one row of logits at a time: what the batched `drafting.rank_children` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms import sampling
from actors.algorithms.drafting import DraftRow, RankedRow, expected_confidences
from actors.algorithms.noise import NoiseSource, Stream, gumbel_of, row_key
from actors.messages import Support
from actors.settings import Rule, SamplingSettings


@torch.no_grad()
def rank_alone(
    logits: Tensor,
    rows: Sequence[DraftRow],
    *,
    branching: int,
    support: int,
    rule: Rule,
    vocabulary: Tensor | None = None,
) -> list[RankedRow]:
    """As `rank_children`."""
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows of logits are needed, not {logits.shape[0]}")
    scores = logits if logits.dtype == torch.float64 else logits.float()
    ids = torch.arange(logits.shape[1], device=logits.device) if vocabulary is None else vocabulary
    ranker = _Ranker(ids, scores.dtype, branching, support, vocabulary is None)
    shared = rule in ("coupled", "typical")
    return [
        ranker.shared(scores[n], row, rule) if shared or row.sampling.greedy else ranker.drawn(scores[n], row)
        for n, row in enumerate(rows)
    ]


class _Ranker:
    """Buffers and settings shared by the rows of a step."""

    def __init__(self, ids: Tensor, dtype: torch.dtype, branching: int, support: int, same_ids: bool) -> None:
        self._ids = ids
        self._dtype = dtype
        self._branching = min(branching, len(ids))
        self._support = min(support, len(ids))
        self._columns = sampling.Columns(len(ids), None if same_ids else ids)
        self._noise: NoiseSource | None = None

    def shared(self, row: Tensor, ask: DraftRow, rule: Rule) -> RankedRow:
        """Coupled, typical and greedy: deterministic given the shared noise."""
        scores, columns = self._shaped(row, ask)
        q = scores
        if not ask.sampling.greedy:
            key = row_key(ask.seed, ask.position)
            if columns is None and self._noise is None:
                self._noise = NoiseSource(self._ids, self._dtype)
            noise = self._noise if columns is None else NoiseSource(self._ids[columns], self._dtype)
            assert noise is not None
            scores = scores - noise.negated([key])[0]
        best, places = scores.topk(min(self._branching, len(scores)))
        if rule == "typical" and not ask.sampling.greedy:
            likely = q.softmax(-1).topk(min(max(self._support, self._branching), len(q))).values.tolist()
            expected = expected_confidences(likely, len(best))
            confidences = [c if score > -torch.inf else 0.0 for c, score in zip(expected, best.tolist(), strict=True)]
        else:
            confidences = (best - scores.logsumexp(-1)).exp().tolist()
        return self._ranked(places if columns is None else columns[places], confidences)

    def drawn(self, row: Tensor, ask: DraftRow) -> RankedRow:
        """Rejection and block: one draw from the very q that is sent along."""
        scores, kept = self._shaped(row, ask)
        best, places = scores.topk(min(self._support, len(scores)))
        columns = places if kept is None else kept[places]
        sound = best > -torch.inf
        scores_of_kept: NDArray[np.float64] = best[sound].double().cpu().numpy()
        if not len(scores_of_kept):  # a row of NaN, or one that settings leave empty, proposes nothing
            return RankedRow((), ())
        ids: NDArray[np.int64] = self._ids[columns[sound]].cpu().numpy()
        weights = np.exp(scores_of_kept - scores_of_kept[0])
        q = weights / weights.sum()
        with np.errstate(divide="ignore"):
            draws = np.log(q) + gumbel_of(row_key(ask.seed, ask.position, Stream.DRAFT, ask.prefix), ids)
        first = int(draws.argmax())
        order = [first, *(n for n in range(min(self._branching, len(q))) if n != first)][: self._branching]
        probabilities = q.tolist()
        return RankedRow(
            tuple(ids[order].tolist()),
            tuple(expected_confidences(probabilities, len(order))),
            Support(tuple(ids.tolist()), tuple(probabilities)),
        )

    def _ranked(self, columns: Tensor, confidences: list[float]) -> RankedRow:
        sound = [n for n, confidence in enumerate(confidences) if confidence > 0]  # no NaN, nothing masked
        tokens = self._ids[columns].tolist()
        return RankedRow(tuple(tokens[n] for n in sound), tuple(confidences[n] for n in sound))

    def _shaped(self, row: Tensor, ask: DraftRow) -> tuple[Tensor, Tensor | None]:
        """Scores, not normalised, -inf where settings forbid; and their columns, where filters leave only some."""
        settings = self._cheap(ask)
        if sampling.adjusts(settings):
            row = row.clone()
            history = sampling.History(ask.prompt, ask.output or (), settings)
            if ask.generated is not None:
                history.length = ask.generated
            sampling.adjust(row, settings, history, ask.eos, self._columns)
        if settings.greedy:
            return row, None
        if sampling.filters(settings) and bool(row.amax().isfinite()):
            columns, scaled = sampling.kept(row, settings)
            return scaled, columns
        return row / settings.temperature, None

    @staticmethod
    def _cheap(ask: DraftRow) -> SamplingSettings:
        """What this row can apply: everything with a history, otherwise what needs none."""
        settings = ask.sampling
        if ask.output is not None:
            return settings
        without: dict[str, object] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        without["bad_words"] = tuple(word for word in settings.bad_words if len(word) == 1)
        if ask.generated is None:
            without["min_tokens"] = 0
        changed = {name: value for name, value in without.items() if getattr(settings, name) != value}
        return settings.model_copy(update=changed) if changed else settings
