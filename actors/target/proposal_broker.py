"""The broker: answers an engine that schedules itself, once per pass, with drafts out of the mailbox.

What the scheduler does for engines that it drives (propose, hold, commit) happens here for engines that drive
themselves: the broker hears what a pass decided, moves the mailbox on, and says which drafts the next pass verifies.
It knows nothing of vLLM, links or threads beyond its own lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.algorithms.control.lookahead import LookaheadController
from actors.engines.protocol import Proposal
from actors.engines.vllm.ipc import Answer, Decided, PassEnd
from actors.messages import OpenSequence, ProposalBatch
from actors.settings import TargetSettings
from actors.target.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class Ruled:
    """One pass's part in a sequence, kept until the engine hands the same tokens out."""

    decided: Decided
    declined: bool = False
    starved: bool = False


@dataclass(slots=True, eq=False)
class _Sequence:
    opening: OpenSequence
    length: int
    """Prompt and committed tokens, as far as the broker has heard."""
    rulings: deque[Ruled] = field(default_factory=deque)
    confidences: tuple[float, ...] = ()
    """Of the drafts given for the pass under way."""
    declined: bool = False
    starved: bool = False
    foreseen: bool = True
    """Drafts that continue what the last pass decided may come before the draft hears of it."""


@dataclass(slots=True)
class PassFacts:
    """The passes since they were last asked for."""

    passes: int = 0
    seconds: float = 0.0
    tokens: int = 0
    hold_seconds: float = 0.0
    answer_seconds: float = 0.0
    plain_seconds: float = 0.0


SILENT = 64
"""Passes without any drafts after which none are expected."""


class ProposalBroker:
    """Drafts for the sequences of one engine. Thread-safe.

    alarm: called, on the thread that answers, when there is something for `take_failed`.
    """

    def __init__(
        self,
        settings: TargetSettings,
        vocabulary: int,
        clock: Callable[[], float],
        alarm: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._alarm = alarm
        self._failed: list[Decided] = []
        self._mailbox = Mailbox(vocabulary)
        self._controller = LookaheadController(settings.lookahead, settings.rule)
        self._sequences: dict[str, _Sequence] = {}
        self._changed = threading.Condition()
        self._facts = PassFacts()
        self.passes = 0
        """Passes heard of since the start."""
        self.overhead_s: deque[float] = deque(maxlen=4096)
        """What the exchange took the engine, per pass, without what was spent holding the pass for drafts."""
        self._held = 0.0
        self._ended_at: float | None = None
        """When the last pass ended; None where the engine paused after it."""
        self._offered_in = 0
        """The pass in which drafts came last."""

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(self, opening: OpenSequence) -> None:
        """Take offers for a sequence from now on."""
        with self._changed:
            tokens = (*opening.prompt, *opening.committed)
            self._sequences[opening.sequence] = _Sequence(opening, len(tokens))
            if opening.sampling.speculation:
                self._mailbox.open(opening.sequence, tokens)

    def close(self, sequence: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        with self._changed:
            if self._sequences.pop(sequence, None) is not None:
                self._mailbox.close(sequence)
                self._controller.forget(sequence)
                self._changed.notify_all()  # a pass is not held for it any more

    def offer(self, batch: ProposalBatch) -> None:
        """Drafts have come, if perhaps too late. Whoever offers those is there, and near enough to be waited for."""
        with self._changed:
            now = self._clock()
            for sequence in self._mailbox.offer(batch):
                self._offered_in = self.passes
                self._controller.observe_offer(now, sequence)
            self._changed.notify_all()

    def ruling(self, sequence: str, position: int) -> Ruled | None:
        """What the pass that decided `position` of a sequence said of it; None if it was never heard of."""
        with self._changed:
            state = self._sequences.get(sequence)
            if state is None:
                return None
            while state.rulings and state.rulings[0].decided.position < position:
                state.rulings.popleft()
            if state.rulings and state.rulings[0].decided.position == position:
                return state.rulings.popleft()
            return None

    def take_facts(self) -> PassFacts:
        """What happened since the last call."""
        with self._changed:
            facts, self._facts = self._facts, PassFacts()
            return facts

    def take_failed(self) -> list[Decided]:
        """Sequences for which no token can be chosen, since the last call: the engine says nothing of them."""
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    @property
    def has_failed(self) -> bool:
        """Is there something for `take_failed`?"""
        return bool(self._failed)

    @property
    def longest_hold_s(self) -> float:
        """No answer takes longer than this and the answering itself."""
        return self._settings.lookahead.max_wait_ms / 1e3

    @property
    def positions(self) -> int:
        """Prompt and committed tokens of all sequences."""
        with self._changed:
            return sum(state.length for state in self._sequences.values())

    # -- the exchange ---------------------------------------------------------------------------------------------

    def answer(self, end: PassEnd) -> Answer:
        """A pass has ended: file what it decided, and say what the next one verifies."""
        with self._changed:
            began = self._clock()
            if end.overhead:
                self.overhead_s.append(max(end.overhead - self._held, 0.0))
            for decided in end.decided:
                self._file(decided)
            self._controller.observe_pass(end.tokens, end.rows, end.seconds)
            self._observe_progress(end, began)
            wanting = [name for name in end.waiting if self._room(name) > 0]
            hopeful = [] if self._controller.is_off else [n for n in wanting if self._sequences[n].foreseen]
            self._held = self._hold(hopeful, len(end.waiting) - len(hopeful))
            proposals = self._propose(wanting, len(end.waiting))
            self._count(end, began)
            return Answer(end.number, proposals, quiet=not proposals and self._is_quiet())

    def _observe_progress(self, end: PassEnd, now: float) -> None:
        proposed = sum(decided.proposed for decided in end.decided)
        if self._ended_at is not None and end.tokens <= end.rows + proposed:  # a part of a prompt takes time of its own
            tokens, full = sum(len(decided.tokens) for decided in end.decided), 2 * end.rows >= self._settings.slots
            self._controller.observe_progress(end.rows, tokens, now - self._ended_at, full=full)
        self._ended_at = now if end.waiting else None

    def _file(self, decided: Decided) -> None:
        state = self._sequences.get(decided.sequence)
        if state is None or decided.position < state.length:
            return  # it has ended, or it is told once more
        if decided.position > state.length:  # a report was lost: its drafts would be for another prefix
            self._mailbox.close(decided.sequence)
        state.rulings.append(Ruled(decided, state.declined, state.starved))
        if decided.error is not None:
            self._failed.append(decided)
            self._alarm()
            return
        if decided.proposed:
            self._controller.observe_block(
                decided.sequence, state.confidences[: decided.proposed], min(decided.accepted, decided.proposed)
            )
        state.confidences, state.declined, state.starved = (), False, False
        state.length = decided.position + len(decided.tokens)
        state.foreseen = self._mailbox.commit(decided.sequence, decided.tokens)

    def _hold(self, wanting: list[str], others: int) -> float:
        """Wait for drafts that are due, as long as that pays; returns the seconds."""
        began = now = self._clock()
        limit = self._settings.lookahead.maximum
        while wanting:
            ready = {name: len(self._mailbox.path(name, limit).tokens) for name in wanting}
            seconds = self._controller.hold(now, ready, others)
            if seconds <= 0:
                break
            self._changed.wait(seconds)
            now = self._clock()
        return now - began

    def _propose(self, wanting: list[str], rows: int) -> dict[str, Proposal]:
        present = [name for name in wanting if name in self._sequences]  # some may have ended during a hold
        paths = {name: self._mailbox.path(name, self._room(name)) for name in present}
        lookahead = self._controller.plan({name: path.confidences for name, path in paths.items()}, rows)
        proposals: dict[str, Proposal] = {}
        for name, path in paths.items():
            k, state = lookahead[name], self._sequences[name]
            state.declined = k == 0 if path.tokens else self._controller.is_off
            state.starved = not path.tokens and not state.declined
            state.confidences = path.confidences[:k]
            if k:
                proposals[name] = path.cut(k)
        return proposals

    def _is_quiet(self) -> bool:
        """Nobody drafts, or what is drafted is not worth verifying. What changes that is noticed a pass later."""
        return self.passes - self._offered_in > SILENT or self._controller.is_off

    def _room(self, name: str) -> int:
        """Most draft tokens worth verifying: a pass commits one token more than it accepts."""
        state = self._sequences.get(name)
        if state is None or not state.opening.sampling.speculation:
            return 0
        left = state.opening.sampling.max_tokens - (state.length - len(state.opening.prompt))
        context = self._settings.context - state.length
        return max(0, min(self._settings.lookahead.maximum, left - 1, context - 1))

    def _count(self, end: PassEnd, began: float) -> None:
        self.passes += 1
        facts = self._facts
        facts.passes += 1
        facts.seconds += end.seconds
        facts.tokens += end.tokens
        facts.hold_seconds += self._held
        facts.answer_seconds += self._clock() - began - self._held
        facts.plain_seconds += self._controller.cost(max(end.tokens - sum(d.proposed for d in end.decided), 0))
