"""Answers of known law through the real parts (see lossy_path.py): model and draft are toys over a few tokens.

Time is simulated, and passes grow dearer with every token in them, so that the lookahead controller cuts paths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from lossy_path import LossyPath, Trouble
from numpy.typing import NDArray
from scipy import stats
from toy_models import ToyModel

from actors.algorithms import sampling
from actors.algorithms.drafting import DraftRow, rank_children
from actors.algorithms.types import Block
from actors.algorithms.verification import verify_blocks
from actors.engines.protocol import Expand, ModelCard, Ranked, Row
from actors.messages import OpenSequence, VerificationResult, prefix_key
from actors.settings import LookaheadSettings, Rule, SamplingSettings, TargetSettings, TreeSettings


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ToyTarget:
    """Implements protocol.TargetModel over a ToyModel; a pass takes 1 + slope * tokens seconds of simulated time."""

    def __init__(self, model: ToyModel, rule: Rule, clock: Clock, slope: float, slots: int) -> None:
        self.model, self.rule, self.clock, self.slope, self.slots = model, rule, clock, slope, slots
        self.openings: dict[int, OpenSequence] = {}
        self.outputs: dict[int, list[int]] = {}

    def card(self) -> ModelCard:
        return ModelCard("toy", self.model.vocabulary, 64, self.slots, trees=True)

    def attach(self, slot: int, opening: OpenSequence) -> None:
        self.openings[slot], self.outputs[slot] = opening, list(opening.committed)

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        logits, blocks = [], []
        for row in rows:
            opening, output, drafts = self.openings[row.slot], self.outputs[row.slot], row.proposal.tokens
            prefix, parents = [*opening.prompt, *output], row.proposal.parents
            branches: list[list[int]] = [[]]  # what each row follows
            for i, token in enumerate(drafts):
                branches.append([*branches[(parents[i] if parents else i - 1) + 1], token])
            logits += [self.model.logits([*prefix, *branch]) for branch in branches]
            supports = row.proposal.supports
            blocks.append(
                Block(
                    opening.sampling,
                    opening.seed,
                    len(prefix),
                    opening.prompt,
                    output,
                    drafts,
                    supports,
                    rule=self.rule,
                    parents=parents,
                    sequence=opening.sequence,
                )
            )
        self.clock.now += 1 + self.slope * sum(len(row.tokens) for row in rows)
        return list(verify_blocks(torch.stack(logits), blocks))

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        self.outputs[slot].extend(tokens)

    def detach(self, slot: int) -> None:
        del self.openings[slot], self.outputs[slot]


class ToyDraft:
    """Implements protocol.DraftModel over a ToyModel."""

    def __init__(self, model: ToyModel, rule: Rule, branching: int) -> None:
        self.model, self.rule, self.branching = model, rule, branching
        self.openings: dict[str, OpenSequence] = {}
        self.committed: dict[str, list[int]] = {}

    def card(self) -> ModelCard:
        return ModelCard("toy", self.model.vocabulary, 64, 64)

    def open(self, opening: OpenSequence) -> None:
        self.openings[opening.sequence] = opening
        self.committed[opening.sequence] = [*opening.prompt, *opening.committed]

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self.committed[sequence].extend(tokens)

    def close(self, sequence: str) -> None:
        del self.openings[sequence], self.committed[sequence]

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        rows, logits = [], []
        for request in requests:
            opening = self.openings[request.sequence]
            prefix = [*self.committed[request.sequence], *request.path]
            rows.append(DraftRow(opening.sampling, opening.seed, len(prefix), prefix_key(prefix)))
            logits.append(self.model.logits(prefix))
        ranked = rank_children(
            torch.stack(logits), rows, branching=self.branching, support=self.model.vocabulary, rule=self.rule
        )
        return [
            Ranked(request.sequence, request.path, r.tokens, r.confidences, r.support)
            for request, r in zip(requests, ranked, strict=True)
        ]


@dataclass
class EnginePath:
    """Runs `count` sequences of `length` tokens at a time through the real parts, over toys."""

    model: ToyModel
    draft: ToyModel
    rule: Rule
    sampling: SamplingSettings
    length: int
    seed: int
    slope: float = 0.02
    trouble: Trouble = field(default_factory=Trouble)
    tree: TreeSettings = field(default_factory=lambda: TreeSettings(width=32, branching=2, depth=5, nodes=24))
    lookahead: LookaheadSettings = field(default_factory=lambda: LookaheadSettings(maximum=4))
    proposed: int = 0
    accepted: int = 0
    seeds: list[int] = field(default_factory=list)
    """The sequences' noise seeds, in order."""

    def run(self, count: int, slots: int = 16) -> list[tuple[int, ...]]:
        """The answers. Every sequence has a noise seed of its own."""
        rng, clock = random.Random(self.seed), Clock()
        path = LossyPath(
            ToyTarget(self.model, self.rule, clock, self.slope, slots),
            ToyDraft(self.draft, self.rule, self.tree.branching),
            TargetSettings(slots=slots, context=64, queue=count, rule=self.rule, lookahead=self.lookahead),
            rng,
            trouble=self.trouble,
            tree=self.tree,
            clock=clock,
        )
        asked = self.sampling.model_copy(update={"max_tokens": self.length})
        self.seeds = [rng.randrange(2**63) for _ in range(count)]
        answers = path.run([OpenSequence(f"s{n}", (0,), asked, seed) for n, seed in enumerate(self.seeds)])
        self.proposed += path.proposed
        self.accepted += path.accepted
        return [tuple(answer.tokens) for answer in answers.values()]


def answer_law(model: ToyModel, temperature: float, length: int) -> NDArray[np.float64]:
    """The law of plain decoding after the prompt (0,), [V] * length."""
    return law_under(model, SamplingSettings(temperature=temperature), length)


def law_under(model: ToyModel, settings: SamplingSettings, length: int) -> NDArray[np.float64]:
    """The same under any settings, with the history of each position."""
    law = np.ones(())
    shape: tuple[int, ...] = ()
    for _ in range(length):
        rows = []
        for prefix in np.ndindex(shape):
            row = model.logits([0, *prefix]).double().clone()
            sampling.adjust(row, settings, sampling.History((0,), prefix, settings), ())
            rows.append(sampling.probabilities(row, settings).numpy())
        law = law[..., None] * np.reshape(rows, (*shape, model.vocabulary))
        shape = law.shape
    return law


def counts(answers: Sequence[tuple[int, ...]], vocabulary: int, length: int) -> NDArray[np.int64]:
    """How often each answer came, [V] * length."""
    cells = np.zeros((vocabulary,) * length, dtype=np.int64)
    np.add.at(cells, tuple(np.array(answers).T), 1)
    return cells


def fit(found: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """p-value of the counts under the law; answers expected fewer than five times are taken together."""
    expected = law.ravel() * found.sum()
    order = np.argsort(expected)
    few = np.searchsorted(np.cumsum(expected[order]), 5.0) + 1 if expected.min() < 5 else 0
    while few < len(order) and expected[order[few]] < 5:
        few += 1
    groups = [order[:few], *order[few:, None]] if few else list(order[:, None])
    pooled = [(found.ravel()[g].sum(), expected[g].sum()) for g in groups]
    return float(stats.chisquare([f for f, _ in pooled], [e for _, e in pooled]).pvalue)
