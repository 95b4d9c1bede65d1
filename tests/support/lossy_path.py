"""Requests through the real parts, without actors: forest, offers, mailbox, lookahead, scheduler, engines and rules.

Offers and commits come late, twice, in disorder or not at all, by a seeded generator; the draft gets more or fewer
steps in the time of a pass. Everything is a function of the seed, so a failure can be had again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.algorithms.control.lookahead import LookaheadController, Phase
from actors.algorithms.outcome_tree import Forest
from actors.engines.protocol import DraftModel, FeatureReader, TargetModel
from actors.messages import (
    Alternatives,
    Expansion,
    FinishReason,
    OpenSequence,
    ProposalBatch,
    VerificationResult,
    prefix_key,
)
from actors.settings import LookaheadSettings, Rule, TargetSettings, TreeSettings
from actors.target.proposal_broker import ProposalBroker
from actors.target.scheduler import Scheduler


@dataclass
class Trouble:
    """Odds, per message, of what may happen to it."""

    dropped: float = 0.05
    repeated: float = 0.1
    latest: int = 1
    """Passes that an offer may be late, at most."""
    late_commit: float = 0.1
    """The draft hears of a pass one pass too late."""


class RandomLookahead(LookaheadController):
    """Verifies any part of what there is: a coin decides, which no rule may mind."""

    def __init__(self, settings: LookaheadSettings, rng: random.Random) -> None:
        super().__init__(settings, "coupled")
        self._rng = rng

    def plan(self, paths: Mapping[str, Sequence[float]], *rest: object) -> dict[str, int]:
        return {name: self._rng.randint(0, len(path)) for name, path in paths.items()}


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Exception | None = None
    tested: list[bool] = field(default_factory=list)
    """Per token: was there a draft token that was verified in its place?"""
    phases: list[Phase] = field(default_factory=list)
    """Per token: what its pass was for."""

    def add(self, result: VerificationResult, phase: Phase) -> None:
        self.tested.extend(n < result.proposed for n in range(len(result.tokens)))
        self.phases.extend(phase for _ in result.tokens)
        self.tokens.extend(result.tokens)
        self.margins.extend(result.margins)
        self.alternatives.extend(result.alternatives)
        self.finish, self.error = result.finish, result.error


@dataclass
class LossyPath:
    """Runs requests over a target and a draft; None decodes plainly.

    clock: simulated, if the engines move one; controller: makes the lookahead controller.
    """

    target: TargetModel
    draft: DraftModel | None
    settings: TargetSettings
    rng: random.Random
    trouble: Trouble = field(default_factory=Trouble)
    tree: TreeSettings = field(default_factory=lambda: TreeSettings(width=32, branching=2, depth=5, nodes=24))
    steps: tuple[int, ...] = (0, 2, 4, 6)
    """Draft steps in the time of one pass: one of these."""
    clock: Callable[[], float] = lambda: 0.0
    controller: Callable[[LookaheadSettings, Rule], LookaheadController] = LookaheadController
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    branches: int = 0
    """Accepted tokens that were alternatives to a more likely one in the same pass."""
    lengths: set[int] = field(default_factory=set)
    """Lookaheads that occurred."""

    def run(self, openings: Sequence[OpenSequence]) -> dict[str, Answer]:
        """The answers by sequence, at most settings.slots at a time."""
        controller = self.controller(self.settings.lookahead, self.settings.rule)
        card = self.target.card()
        broker = ProposalBroker(self.settings, card.vocabulary, self.clock, controller, trees=card.trees)
        self._forest = Forest(self.tree)
        scheduler = Scheduler(self.target, self.settings, broker, self.clock)
        answers = {opening.sequence: Answer() for opening in openings}
        self._drafted: set[str] = set()
        offers: list[tuple[int, ProposalBatch]] = []
        commits: list[tuple[int, VerificationResult]] = []
        todo, running = iter(openings), set[str]()
        for now in itertools.count():
            for opening in itertools.islice(todo, self.settings.slots - len(running)):
                scheduler.open("owner", opening)
                running.add(opening.sequence)
                self._open_draft(opening)
            if not running:
                return answers
            for _ in range(self.rng.choice(self.steps) if self.draft is not None else 0):
                for name, expansions in self._draft_step().items():
                    offers += self._sent(now, name, expansions)
            arrived = [batch for due, batch in offers if due <= now]
            offers = [(due, batch) for due, batch in offers if due > now]
            self.rng.shuffle(arrived)
            for batch in arrived:
                broker.offer(batch)
            phase = controller.phase
            for result in scheduler.step():
                self._count(result)
                answers[result.sequence].add(result, phase)
                if result.finish is not None:
                    running.discard(result.sequence)
                    self._close_draft(result.sequence)
                else:
                    commits.append((now + (self.rng.random() < self.trouble.late_commit), result))
            for _, result in [commit for commit in commits if commit[0] <= now]:
                self._commit(result)
            commits = [commit for commit in commits if commit[0] > now]
        raise AssertionError

    def _count(self, result: VerificationResult) -> None:
        self.passes += 1
        self.proposed += result.proposed
        self.accepted += result.accepted
        self.branches += len(result.branches)
        self.lengths.add(result.proposed)

    def _open_draft(self, opening: OpenSequence) -> None:
        if self.draft is None or not opening.sampling.speculation:
            return
        tokens = [*opening.prompt, *opening.committed]
        self.draft.open(opening)
        self._forest.open(opening.sequence, prefix_key(tokens), len(tokens))
        self._drafted.add(opening.sequence)

    def _close_draft(self, name: str) -> None:
        if self.draft is not None and name in self._drafted:
            self._drafted.discard(name)
            self._forest.close(name)
            self.draft.close(name)

    def _commit(self, result: VerificationResult) -> None:
        """As the draft actor does; a commit of a sequence that has ended meanwhile comes to nothing."""
        name = result.sequence
        if self.draft is None or name not in self._drafted or not result.tokens:
            return
        fresh = self._forest.commit(name, result.position, result.tokens)
        assert isinstance(fresh, int)  # all commits arrive, in order
        if fresh:
            self.draft.advance(name, result.tokens[-fresh:])
        if result.features is not None and isinstance(self.draft, FeatureReader):
            for _ in range(self.rng.choice((0, 1, 1, 2))):  # lost, or told twice
                self.draft.read_features(name, result.features)

    def _draft_step(self) -> dict[str, list[Expansion]]:
        asked = self._forest.frontier(self.tree.width)
        return self._forest.grow(self.draft.expand(asked)) if asked and self.draft is not None else {}

    def _sent(self, now: int, name: str, expansions: list[Expansion]) -> list[tuple[int, ProposalBatch]]:
        if self.rng.random() < self.trouble.dropped:
            return []
        copies = 2 if self.rng.random() < self.trouble.repeated else 1
        batch = ProposalBatch("draft", {name: expansions})
        return [(now + self.rng.randrange(self.trouble.latest + 1), batch) for _ in range(copies)]
