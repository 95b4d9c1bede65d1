"""The draft's side of the acceptance rules: what may follow a prefix, best first.

Knows nothing of trees, models or links. A draft applies what is cheap of the sampling settings (temperature, top_k,
top_p, min_p, logit_bias, allowed ids, min_tokens; penalties where the row brings a history). What it leaves out costs
acceptance, never exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms import sampling
from actors.algorithms.noise import Stream, gumbel_of, row_key
from actors.algorithms.row_edits import BranchHistory, EditedRow
from actors.algorithms.row_program import LogitsRow, RowProgram
from actors.algorithms.row_readings import BestPerturbed, MostLikely
from actors.messages import Support
from actors.settings import Rule, SamplingSettings


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One prefix to be continued.

    position: absolute position of the children. prefix: its key, which makes the draw of a probabilistic rule its own.
    prompt, output: the history, where the draft is to apply penalties; `generated` is the length of the answer so far
    (for min_tokens).
    """

    sampling: SamplingSettings
    seed: int
    position: int
    prefix: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] | None = None
    generated: int | None = None
    eos: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RankedRow:
    """Children of one prefix: target token ids, the sampled one first, with the draft's own confidence in each."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    support: Support | None = None


@torch.no_grad()
def rank_children(
    logits: Tensor,
    rows: Sequence[DraftRow],
    *,
    branching: int,
    support: int,
    rule: Rule,
    vocabulary: Tensor | None = None,
    at_once: bool | None = None,
) -> list[RankedRow]:
    """Rank what may follow each prefix.

    logits: [N, V'], any float type. vocabulary: target token id of each column, int64 [V']; None if they are the same.
    branching: children per row. support: most ids of q, for the probabilistic rules.
    at_once: read all rows together, as suits a device; None asks the logits where they are.

    Coupled and typical: the best of log q + g with the target's own noise, or of log q when greedy; the confidence is
    the softmax of those scores. Rejection and block: one draw from q, restricted to its `support` best ids and
    renormalised *before* the draw, then the other ids by q. Their confidences are those of `expected_confidences`, and
    so are typical's: under these rules what is verified decides over what is committed.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows of logits are needed, not {logits.shape[0]}")
    program = RowProgram(logits, vocabulary, at_once=logits.device.type != "cpu" if at_once is None else at_once)
    size = logits.shape[1]
    shared = [n for n, row in enumerate(rows) if rule in ("coupled", "typical") or row.sampling.greedy]
    drawn = [n for n in range(len(rows)) if n not in set(shared)]
    best = BestPerturbed(min(branching, size), vocabulary)
    raced = program.read([_logits_row(n, rows[n]) for n in shared], best)
    # Typical acceptance takes the shared draw, but its confidences are expectations.
    expected = [n for n in shared if rule == "typical" and not rows[n].sampling.greedy]
    count = min(support, size) if drawn else min(max(support, branching), size)
    reading = MostLikely(count, vocabulary, sums=bool(expected))
    likely = program.read([_logits_row(n, rows[n]) for n in drawn + expected], reading)
    ranked: dict[int, RankedRow] = {}
    for n, found in zip(shared, raced, strict=True):
        ranked[n] = _shared(*best.parts(found))
    for n, found in zip(drawn + expected, likely, strict=True):
        tokens_of_q, scores, total = reading.parts(found)
        if n in ranked and ranked[n].tokens:
            q = np.exp(scores[scores > -np.inf] - total)
            tokens = ranked[n].tokens
            ranked[n] = RankedRow(tokens, tuple(expected_confidences(q.tolist(), len(tokens))))
        elif n not in ranked:
            ranked[n] = _drawn(tokens_of_q, scores, rows[n], branching)
    return [ranked[n] for n in range(len(rows))]


def expected_confidences(q: Sequence[float], count: int) -> list[float]:
    """What q the drawn child and its alternatives have on average over the draw; `q` is sorted, highest first.

    Confidences decide how much of a path is verified. Under the probabilistic rules that may depend on q as a
    distribution, but not on which token was drawn from it: to leave out a token because that very token looks
    unlikely would bias the output. So no confidence of a node depends on its draw, not even by way of a sum.
    """
    expected = [sum(p * p for p in q)]
    drawn_before = 0.0
    for j in range(count - 1):
        # Alternative j is the j-th best id, or the one after it if the draw took an id up to the j-th.
        drawn_before += q[j]
        expected.append(q[j] * (1 - drawn_before) + q[j + 1] * drawn_before)
    return expected


def _logits_row(n: int, ask: DraftRow) -> LogitsRow:
    settings = _cheap(ask)
    history: BranchHistory | None = None
    if sampling.adjusts(settings):
        said = sampling.History(ask.prompt, ask.output or (), settings)
        if ask.generated is not None:
            said.length = ask.generated
        history = BranchHistory(said)
    return LogitsRow(n, row_key(ask.seed, ask.position), EditedRow(settings, history, None, ask.eos))


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


def _shared(tokens: NDArray[np.int64], confidences: NDArray[np.float64]) -> RankedRow:
    """Coupled, typical and greedy: deterministic given the shared noise."""
    sound = confidences > 0  # no NaN, nothing masked
    return RankedRow(tuple(tokens[sound].tolist()), tuple(confidences[sound].tolist()))


def _drawn(ids: NDArray[np.int64], scores: NDArray[np.float64], ask: DraftRow, branching: int) -> RankedRow:
    """Rejection and block: one draw from the very q that is sent along. ids, scores: best first."""
    sound = scores > -np.inf
    if not sound.any():  # a row of NaN, or one that settings leave empty, proposes nothing
        return RankedRow((), ())
    ids, scores = ids[sound], scores[sound]
    weights = np.exp(scores - scores[0])
    q = weights / weights.sum()
    with np.errstate(divide="ignore"):
        draws = np.log(q) + gumbel_of(row_key(ask.seed, ask.position, Stream.DRAFT, ask.prefix), ids)
    first = int(draws.argmax())
    order = [first, *(n for n in range(min(branching, len(q))) if n != first)][:branching]
    probabilities = q.tolist()
    return RankedRow(
        tuple(ids[order].tolist()),
        tuple(expected_confidences(probabilities, len(order))),
        Support(tuple(ids.tolist()), tuple(probabilities)),
    )
