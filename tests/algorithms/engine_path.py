"""The real path of a token, without actors: outcome forest, offers, mailbox, lookahead controller, scheduler, rules.

Model and draft are toys over a few tokens, so that the law of an answer is known. Offers and commits come late, twice,
in disorder or not at all, by a seeded generator; time is simulated, and passes grow dearer with every token in them,
so that the controller cuts paths.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from toy_models import ToyModel

from actors.algorithms.drafting import DraftRow, rank_children
from actors.algorithms.lookahead import LookaheadController
from actors.algorithms.outcomes import Forest
from actors.algorithms.types import Block, Outcome
from actors.algorithms.verification import verify_blocks
from actors.engines.protocol import Expand, ModelCard, Ranked, Row
from actors.mailbox import Mailbox
from actors.messages import Expansion, OfferBatch, Opening, prefix_key
from actors.scheduler import Scheduler
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
        self.openings: dict[int, Opening] = {}
        self.outputs: dict[int, list[int]] = {}

    def card(self) -> ModelCard:
        return ModelCard("toy", self.model.vocabulary, 64, self.slots)

    def attach(self, slot: int, opening: Opening) -> None:
        self.openings[slot], self.outputs[slot] = opening, list(opening.committed)

    def forward(self, rows: Sequence[Row]) -> list[Outcome | None]:
        logits, blocks = [], []
        for row in rows:
            opening, output, drafts = self.openings[row.slot], self.outputs[row.slot], row.proposal.tokens
            prefix = [*opening.prompt, *output]
            logits += [self.model.logits([*prefix, *drafts[:i]]) for i in range(len(drafts) + 1)]
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
                )
            )
        self.clock.now += 1 + self.slope * sum(len(row.tokens) for row in rows)
        return list(verify_blocks(torch.stack(logits), blocks))

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        self.outputs[slot].extend(tokens)

    def detach(self, slot: int) -> None:
        del self.openings[slot], self.outputs[slot]


@dataclass
class Trouble:
    """Odds, per message, of what may happen to it."""

    dropped: float = 0.05
    repeated: float = 0.1
    latest: int = 1
    """Passes that an offer may be late, at most."""
    late_commit: float = 0.1
    """The draft hears of a pass one pass too late."""


@dataclass
class EnginePath:
    """Runs `count` sequences of `length` tokens at a time through the real parts."""

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
    steps: tuple[int, ...] = (0, 2, 4, 6)
    """Draft steps in the time of one pass: one of these."""
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    lengths: set[int] = field(default_factory=set)
    """Lookaheads that occurred."""
    seeds: list[int] = field(default_factory=list)
    """The sequences' noise seeds, in order."""

    def run(self, count: int, slots: int = 16) -> list[tuple[int, ...]]:
        """The answers. Every sequence has a noise seed of its own."""
        rng, trouble = random.Random(self.seed), self.trouble
        clock = Clock()
        mailbox, controller = Mailbox(self.model.vocabulary), LookaheadController(self.lookahead)
        settings = TargetSettings(slots=slots, context=64, queue=count, rule=self.rule, lookahead=self.lookahead)
        target = ToyTarget(self.model, self.rule, clock, self.slope, slots)
        scheduler = Scheduler(target, settings, mailbox, controller, clock)
        forest = Forest(self.tree)
        sampling = self.sampling.model_copy(update={"max_tokens": self.length})
        openings = {
            f"s{n}": Opening(f"s{n}", (0,), sampling, seed=rng.randrange(2**63), committed=()) for n in range(count)
        }
        self.seeds = [opening.seed for opening in openings.values()]
        todo = iter(openings.values())
        answers: dict[str, list[int]] = {}
        running: set[str] = set()
        offers: list[tuple[int, OfferBatch]] = []
        commits: list[tuple[int, str, int, tuple[int, ...]]] = []
        committed: dict[str, list[int]] = {}
        for now in itertools.count():
            for opening in itertools.islice(todo, slots - len(running)):
                name = opening.sequence
                scheduler.open("owner", opening)
                forest.open(name, prefix_key(opening.prompt), 1)
                running.add(name)
                answers[name], committed[name] = [], []
            if not running:
                break
            for _ in range(rng.choice(self.steps)):
                for name, expansions in self._draft_step(forest, openings, committed).items():
                    offers += self._sent(rng, now, name, expansions)
            arrived = [batch for due, batch in offers if due <= now]
            offers = [(due, batch) for due, batch in offers if due > now]
            rng.shuffle(arrived)
            for batch in arrived:
                mailbox.offer(batch)
            for ruling in scheduler.step().rulings:
                verdict = ruling.verdict
                self.passes += 1
                self.proposed += verdict.proposed
                self.accepted += verdict.accepted
                self.lengths.add(verdict.proposed)
                answers[verdict.sequence].extend(verdict.tokens)
                if verdict.finish is not None:
                    running.discard(verdict.sequence)
                    forest.close(verdict.sequence)
                    mailbox.close(verdict.sequence)
                else:
                    commits.append(
                        (now + (rng.random() < trouble.late_commit), verdict.sequence, verdict.position, verdict.tokens)
                    )
            for _, name, position, tokens in [c for c in commits if c[0] <= now]:
                if name in running and forest.commit(name, position, tokens) == "advanced":
                    committed[name] = answers[name][: forest.position(name) - 1]
            commits = [c for c in commits if c[0] > now]
        return [tuple(answers[name]) for name in openings]

    def _draft_step(
        self, forest: Forest, openings: dict[str, Opening], committed: dict[str, list[int]]
    ) -> dict[str, list[Expansion]]:
        asked: list[Expand] = forest.frontier(self.tree.width)
        if not asked:
            return {}
        rows, logits = [], []
        for request in asked:
            opening = openings[request.sequence]
            prefix = [*opening.prompt, *committed[request.sequence], *request.path]
            rows.append(DraftRow(opening.sampling, opening.seed, len(prefix), prefix_key(prefix)))
            logits.append(self.draft.logits(prefix))
        ranked = rank_children(
            torch.stack(logits), rows, branching=self.tree.branching, support=self.draft.vocabulary, rule=self.rule
        )
        answers = [
            Ranked(request.sequence, request.path, r.tokens, r.confidences, r.support)
            for request, r in zip(asked, ranked, strict=True)
        ]
        return forest.grow(answers)

    def _sent(
        self, rng: random.Random, now: int, name: str, expansions: list[Expansion]
    ) -> list[tuple[int, OfferBatch]]:
        trouble = self.trouble
        if rng.random() < trouble.dropped:
            return []
        copies = 2 if rng.random() < trouble.repeated else 1
        batch = OfferBatch("draft", {name: expansions})
        return [(now + rng.randrange(trouble.latest + 1), batch) for _ in range(copies)]


def answer_law(model: ToyModel, temperature: float, length: int) -> NDArray[np.float64]:
    """The law of plain decoding after the prompt (0,), [V] * length."""
    law = np.ones(())
    shape: tuple[int, ...] = ()
    for _ in range(length):
        rows = [(model.logits([0, *prefix]).double() / temperature).softmax(-1).numpy() for prefix in np.ndindex(shape)]
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
