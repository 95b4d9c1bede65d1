"""Actors that note when things happen: the real ones, with a clock at their edges. For the bench and its traces.

All times are of the machine's monotonic clock, which processes of one machine share. What is noted per pass and per
step does not grow with the number of sequences.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.algorithms.draft_tree import follow, main_path
from actors.draft.actor import DraftActor
from actors.engines.protocol import DraftModel, Expand, ModelCard, Ranked, Row, TargetModel
from actors.messages import (
    CommitUpdate,
    DraftMessage,
    OpenSequence,
    ProposalBatch,
    TargetMessage,
    VerificationBatch,
    VerificationResult,
)
from actors.replica.replica import Mail, Replica, Result
from actors.settings import DraftSettings, TargetSettings
from actors.target.actor import TargetActor
from actors.telemetry import Recorder
from benchmarks.support.chaos_link import ChaosLink, ChaosSettings

Mark = tuple[str, int, int]
"""Names one message at both ends of a link: a sequence, a position, and the key of a prefix (0 for commits)."""


@dataclass(slots=True)
class PassNote:
    """One target pass. held_s: how long it was held for drafts; committed: tokens, before any cut at a stop."""

    started: float
    ended: float
    rows: int
    tokens: int
    prompt_tokens: int
    proposed: int
    accepted: int
    committed: int
    held_s: float
    full: int
    """Rows whose whole proposal was accepted."""
    marks: list[Mark] = field(default_factory=list)
    """What was committed for the first sequence: where, and nothing for the key."""


@dataclass(slots=True)
class StepNote:
    """One draft step. rows: tree nodes expanded; mark: the first of them; cpu_s: processor time of the model thread."""

    started: float
    ended: float
    rows: int
    mark: Mark | None = None
    cpu_s: float = 0.0


@dataclass(slots=True)
class ReplicaNotes:
    """What one replica noted since it was asked last. arrivals: when a message was taken from the link."""

    name: str
    passes: list[PassNote] = field(default_factory=list)
    steps: list[StepNote] = field(default_factory=list)
    arrivals: dict[Mark, float] = field(default_factory=dict)
    deliveries: int = 0
    """Calls that brought mail."""
    streamed: int = 0
    """Items of the result stream."""


class _Probed(Replica[Mail, Result]):
    """What both probed replicas share: mail is delayed and its arrival noted, results are counted."""

    def _take_notes_for(self, name: str, link_delay_ms: float) -> None:
        """Part of a constructor: nothing is noted before `start`."""
        self._notes = ReplicaNotes(name)
        self._delay: ChaosLink[Any] | None = None
        if link_delay_ms:
            self._delay = ChaosLink(self._arrive, ChaosSettings(delay_ms=link_delay_ms))

    @abstractmethod
    def _mark(self, message: Mail) -> Mark | None:
        """Names a message whose arrival is noted."""

    async def deliver(self, link: str, mail: Sequence[Mail]) -> None:
        if self._delay is None:
            await self._note_and_deliver(link, mail)
        else:
            self._delay((link, mail))

    async def _note_and_deliver(self, link: str, mail: Sequence[Mail]) -> None:
        self._notes.deliveries += 1
        now = time.monotonic()
        for message in mail:
            if (mark := self._mark(message)) is not None:
                self._notes.arrivals[mark] = now
        await super().deliver(link, mail)

    def _arrive(self, parcel: tuple[str, Sequence[Mail]]) -> None:
        _spawn(self._note_and_deliver(*parcel))

    async def results(self, link: str) -> AsyncIterator[list[Result]]:
        async for items in super().results(link):
            self._notes.streamed += 1
            yield items

    async def take_notes(self) -> ReplicaNotes:
        """What was noted since the last call."""
        notes, self._notes = self._notes, ReplicaNotes(self._name)
        return notes


class _ProbedTargetModel:
    """Passes everything on and notes each pass."""

    def __init__(self, model: TargetModel, owner: ProbedTarget) -> None:
        self._model = model
        self._owner = owner

    def card(self) -> ModelCard:
        return self._model.card()

    def attach(self, slot: int, opening: OpenSequence) -> None:
        self._model.attach(slot, opening)

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        started = time.monotonic()
        outcomes = self._model.forward(rows)
        self._owner.note_pass(started, time.monotonic(), rows, outcomes)
        return outcomes

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        self._model.record(slot, tokens)

    def detach(self, slot: int) -> None:
        self._model.detach(slot)


def _on_path(row: Row, result: VerificationResult) -> int:
    """Draft tokens on the path that came true and on the most likely one from there."""
    tokens, parents = row.proposal.tokens, row.proposal.parents
    if not parents:
        return len(tokens)
    path = follow(tokens, parents, result.tokens[: result.accepted])
    return len(path) + len(main_path(parents, path[-1] if path else -1))


class ProbedTarget(_Probed[TargetMessage, VerificationBatch], TargetActor):
    """A target replica that notes its passes, and adds `link_delay_ms` to every delivery."""

    def __init__(
        self,
        name: str,
        make_model: Callable[[], TargetModel],
        settings: TargetSettings,
        recorder: Recorder,
        link_delay_ms: float = 0.0,
    ) -> None:
        super().__init__(name, lambda: _ProbedTargetModel(make_model(), self), settings, recorder)
        self._take_notes_for(name, link_delay_ms)
        self._held_since: float | None = None

    def _mark(self, message: TargetMessage) -> Mark | None:
        return offer_mark(message) if isinstance(message, ProposalBatch) else None

    def _pause(self) -> float | None:
        pause = super()._pause()
        if pause and self._held_since is None:
            self._held_since = time.monotonic()
        return pause

    def note_pass(
        self, started: float, ended: float, rows: Sequence[Row], outcomes: Sequence[VerificationResult | None]
    ) -> None:
        held = 0.0 if self._held_since is None else started - self._held_since
        self._held_since = None
        decided = [(row, outcome) for row, outcome in zip(rows, outcomes, strict=True) if outcome is not None]
        nodes = sum(len(row.proposal.tokens) for row, _ in decided)
        proposed = sum(_on_path(row, outcome) for row, outcome in decided)
        tokens = sum(len(row.tokens) for row in rows)
        self._notes.passes.append(
            PassNote(
                started=started,
                ended=ended,
                rows=len(rows),
                tokens=tokens,
                prompt_tokens=tokens - nodes - len(decided),
                proposed=proposed,
                accepted=sum(outcome.accepted for _, outcome in decided),
                committed=sum(len(outcome.tokens) for _, outcome in decided),
                held_s=held,
                full=sum(outcome.accepted == _on_path(row, outcome) for row, outcome in decided),
            )
        )

    def _work(self) -> dict[str, VerificationBatch]:
        results = super()._work()
        if self._notes.passes:
            self._notes.passes[-1].marks = [
                (batch.results[0].sequence, batch.results[0].position, 0) for batch in results.values() if batch.results
            ]
        return results


class _ProbedDraftModel:
    """Passes everything on and notes each step."""

    def __init__(self, model: DraftModel, owner: ProbedDraft) -> None:
        self._model = model
        self._owner = owner

    def card(self) -> ModelCard:
        return self._model.card()

    def open(self, opening: OpenSequence) -> None:
        self._model.open(opening)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        started, cpu = time.monotonic(), time.thread_time()
        answers = self._model.expand(requests)
        self._owner.note_step(started, time.monotonic(), len(requests), time.thread_time() - cpu)
        return answers

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self._model.advance(sequence, tokens)

    def close(self, sequence: str) -> None:
        self._model.close(sequence)


class ProbedDraft(_Probed[DraftMessage, ProposalBatch], DraftActor):
    """A draft replica that notes its steps, and adds `link_delay_ms` to every delivery."""

    def __init__(
        self,
        name: str,
        make_model: Callable[[], DraftModel],
        settings: DraftSettings,
        recorder: Recorder,
        link_delay_ms: float = 0.0,
    ) -> None:
        super().__init__(name, lambda: _ProbedDraftModel(make_model(), self), settings, recorder)
        self._take_notes_for(name, link_delay_ms)

    def _mark(self, message: DraftMessage) -> Mark | None:
        return (message.sequence, message.position, 0) if isinstance(message, CommitUpdate) else None

    def note_step(self, started: float, ended: float, rows: int, cpu_s: float) -> None:
        self._notes.steps.append(StepNote(started, ended, rows, cpu_s=cpu_s))

    def _work(self) -> dict[str, ProposalBatch]:
        results = super()._work()
        if self._notes.steps:
            self._notes.steps[-1].mark = next(filter(None, map(offer_mark, results.values())), None)
        return results


def offer_mark(batch: ProposalBatch) -> Mark | None:
    """Mark of the first expansion in `batch`."""
    for sequence, expansions in batch.expansions.items():
        if expansions:
            return sequence, expansions[0].position, expansions[0].parent
    return None


_TASKS: set[Any] = set()


def _spawn(coroutine: Any) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
