"""A discrete-event simulation of both tiers: the real scheduler, mailbox, lookahead, forest and emulated engines, on
a clock that jumps. A minute of serving takes seconds, and the same input always gives the same result.

What it leaves out: the cost of the orchestrator and of Python itself, and prompts (sequences start with a short one
and never end). A message takes half of `hop_ms`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from actors.algorithms.outcome_tree import Forest
from actors.engines.emulated.engines import EmulatedDraft, EmulatedTarget
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.messages import CommitUpdate, Expansion, OpenSequence, ProposalBatch, prefix_key
from actors.settings import DraftSettings, LookaheadSettings, SamplingSettings, Settings, TargetSettings, TreeSettings
from actors.target.pass_report import PassReport
from actors.target.proposal_broker import ProposalBroker
from actors.target.scheduler import Scheduler

ENDLESS = 1 << 40
WARM_UP = 0.1
"""Share of the simulated time that is not counted: estimates settle first."""


class SimulationInput(Settings):
    """What is simulated. Sequences are spread evenly over targets and over drafts."""

    target: TargetSpec = TargetSpec()
    draft: DraftSpec = DraftSpec()
    hop_ms: Annotated[float, Field(ge=0, le=1000)] = 2.0
    """From a target to a draft and back."""
    sequences: Annotated[int, Field(ge=1, le=4096)] = 1
    targets: Annotated[int, Field(ge=1, le=64)] = 1
    drafts: Annotated[int, Field(ge=0, le=256)] = 1
    """0: plain decoding."""
    lookahead: LookaheadSettings = LookaheadSettings()
    tree: TreeSettings = TreeSettings()
    seconds: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Simulated time."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Chooses the prompts."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Shares are of the counted time; rates are over all replicas of a tier."""

    tokens_per_second: float
    plain_tokens_per_second: float
    """Of the same targets with the same sequences and no speculation."""
    tokens_per_pass: float
    """Acceptance length: tokens committed per pass and sequence."""
    proposed_per_pass: float
    """Draft tokens verified per pass and sequence."""
    acceptance_rate: float
    """Accepted over verified draft tokens, counting verification up to the first rejection."""
    target_busy: float
    target_waiting: float
    """Held for drafts that were due."""
    draft_busy: float
    starved: float
    """Share of decoded rows without any draft token."""

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_second / self.plain_tokens_per_second


class _Clock:
    """A replica's own time: the engine sleeps by moving it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Events:
    """What happens when."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, action))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            when, _, action = heapq.heappop(self._heap)
            action(when)


@dataclass
class _Tally:
    passes: int = 0
    rows: int = 0
    committed: int = 0
    proposed: int = 0
    accepted: int = 0
    tried: int = 0
    starved: int = 0
    busy: float = 0.0
    waiting: float = 0.0
    draft_busy: float = 0.0


class _Target:
    """A target replica: forms a pass as soon as the last one ends, or when a hold is over."""

    def __init__(self, simulation: _Simulation, openings: Sequence[OpenSequence]) -> None:
        self._simulation = simulation
        self._clock = _Clock()
        settings = TargetSettings(
            slots=len(openings), context=ENDLESS, lookahead=simulation.given.lookahead, queue=len(openings)
        )
        model = EmulatedTarget(simulation.given.target, settings, clock=self._clock, sleep=self._clock.sleep)
        self._broker = ProposalBroker(settings, model.card().vocabulary, self._clock, trees=True)
        self._scheduler = Scheduler(model, settings, self._broker, self._clock)
        self._running = False
        self._ready_at = 0.0
        self._wake = 0
        for opening in openings:
            self._scheduler.open("simulation", opening)

    def offer(self, now: float, batch: ProposalBatch) -> None:
        self._broker.offer(batch)
        if not self._running:
            self.turn(now)

    def turn(self, now: float) -> None:
        """Hold, or run a pass."""
        self._clock.now = now
        self._wake += 1
        wait = self._scheduler.hold()
        if wait > 0.0:
            wake = self._wake
            self._simulation.events.at(now + wait, lambda later: self.turn(later) if wake == self._wake else None)
            return
        if self._simulation.counts(now):
            self._simulation.tally.waiting += now - self._ready_at
        self._running = True
        report = self._scheduler.step()
        self._simulation.events.at(self._clock.now, lambda later: self._end(later, report))

    def _end(self, now: float, report: PassReport) -> None:
        self._running = False
        self._ready_at = now
        self._simulation.passed(now, report)
        self.turn(now)


class _Draft:
    """A draft replica: steps as long as there is anything worth expanding; mail is taken between steps."""

    def __init__(self, simulation: _Simulation, openings: Sequence[OpenSequence]) -> None:
        self._simulation = simulation
        self._clock = _Clock()
        self._settings = DraftSettings(slots=len(openings), context=ENDLESS, tree=simulation.given.tree)
        self._model = EmulatedDraft(simulation.given.draft, self._settings, clock=self._clock, sleep=self._clock.sleep)
        self.forest = Forest(self._settings.tree)
        self._inbox: list[CommitUpdate] = []
        self._stepping = False
        for opening in openings:
            self._model.open(opening)
            self.forest.open(opening.sequence, prefix_key(opening.prompt), len(opening.prompt))

    def commit(self, now: float, commits: Sequence[CommitUpdate]) -> None:
        self._inbox.extend(commits)
        if not self._stepping:
            self.turn(now)

    def turn(self, now: float) -> None:
        for commit in self._inbox:
            self.forest.commit(commit.sequence, commit.position, commit.tokens)
            self._model.advance(commit.sequence, commit.tokens)
            self.forest.set_weight(commit.sequence, 0.0 if commit.declined else 1.0)
        self._inbox.clear()
        requests = self.forest.frontier(self._settings.tree.width)
        if not requests:
            return
        self._stepping = True
        self._clock.now = now
        answers = self._model.expand(requests)
        grown = self.forest.grow(answers)
        end = self._clock.now
        self.forest.observe_step(len(requests), end - now)
        if self._simulation.counts(now):
            self._simulation.tally.draft_busy += end - now
        self._simulation.offered(end, ProposalBatch("draft", grown, step_seconds=end - now, rows=len(requests)))
        self._simulation.events.at(end, self._stepped)

    def _stepped(self, now: float) -> None:
        self._stepping = False
        self.turn(now)


class _Simulation:
    """Owns the replicas and carries messages between them."""

    def __init__(self, given: SimulationInput) -> None:
        self.given = given
        self.events = _Events()
        self.tally = _Tally()
        sampling = SamplingSettings(temperature=0.0, max_tokens=ENDLESS)
        openings = [OpenSequence(f"s{i}", (given.seed, i, 1), sampling, given.seed) for i in range(given.sequences)]
        self._target_of = {o.sequence: i % given.targets for i, o in enumerate(openings)}
        # Each draft serves all targets, so that one target's end of pass does not leave a draft with nothing to do.
        self._draft_of = {o.sequence: i // given.targets % max(1, given.drafts) for i, o in enumerate(openings)}
        self.targets = [
            _Target(self, share)
            for i in range(given.targets)
            if (share := [o for o in openings if self._target_of[o.sequence] == i])
        ]
        self.drafts = [
            _Draft(self, [o for o in openings if self._draft_of[o.sequence] == i]) for i in range(given.drafts)
        ]

    def counts(self, now: float) -> bool:
        return now >= WARM_UP * self.given.seconds

    def passed(self, now: float, report: PassReport) -> None:
        """A pass has ended: count it, and send each draft what was committed."""
        if self.counts(now - report.seconds):
            self._count(report)
        commits: dict[int, list[CommitUpdate]] = {}
        for result in report:
            commits.setdefault(self._draft_of[result.sequence], []).append(
                CommitUpdate(result.sequence, result.position, result.tokens, result.declined)
            )
        if self.drafts:
            for draft, mail in commits.items():
                self._send(now, draft, mail)

    def _send(self, now: float, draft: int, mail: list[CommitUpdate]) -> None:
        self.events.at(now + self._one_way(), lambda later: self.drafts[draft].commit(later, mail))

    def offered(self, now: float, batch: ProposalBatch) -> None:
        """A draft step has ended: send each target its sequences' expansions."""
        shares: dict[int, dict[str, list[Expansion]]] = {}
        for sequence, expansions in batch.expansions.items():
            shares.setdefault(self._target_of[sequence], {})[sequence] = expansions
        for target, share in shares.items():
            self._offer(now, target, ProposalBatch(batch.source, share))

    def _offer(self, now: float, target: int, batch: ProposalBatch) -> None:
        self.events.at(now + self._one_way(), lambda later: self.targets[target].offer(later, batch))

    def _one_way(self) -> float:
        return self.given.hop_ms / 2e3

    def _count(self, report: PassReport) -> None:
        tally = self.tally
        tally.passes += 1
        tally.busy += report.seconds
        tally.starved += report.starved
        for result in report:
            tally.rows += 1
            tally.committed += len(result.tokens)
            tally.proposed += result.proposed
            tally.accepted += result.accepted
            tally.tried += min(result.accepted + 1, result.proposed)

    def run(self) -> SimulationResult:
        given, tally = self.given, self.tally
        for target in self.targets:
            self.events.at(0.0, target.turn)
        for draft in self.drafts:
            self.events.at(0.0, draft.turn)
        self.events.run(given.seconds)
        seconds = given.seconds * (1 - WARM_UP)
        return SimulationResult(
            tokens_per_second=tally.committed / seconds,
            plain_tokens_per_second=plain_rate(given),
            tokens_per_pass=tally.committed / max(1, tally.rows),
            proposed_per_pass=tally.proposed / max(1, tally.rows),
            acceptance_rate=tally.accepted / max(1, tally.tried),
            target_busy=tally.busy / seconds / len(self.targets),
            target_waiting=tally.waiting / seconds / len(self.targets),
            draft_busy=tally.draft_busy / seconds / max(1, len(self.drafts)),
            starved=tally.starved / max(1, tally.rows),
        )


def plain_rate(given: SimulationInput) -> float:
    """Tokens per second of the same targets and sequences without speculation."""
    spec = given.target
    loads = [len(range(i, given.sequences, given.targets)) for i in range(given.targets)]
    return sum(1e3 * load / (spec.pass_ms + spec.token_ms * load) for load in loads)


def simulate(given: SimulationInput) -> SimulationResult:
    """Run the simulation. Deterministic: a function of `given` alone."""
    return _Simulation(given).run()
