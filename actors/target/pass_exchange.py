"""The pass exchange: how an engine that schedules itself asks the proposal broker, once per pass.

What the scheduler does for engines that it drives (propose, hold, commit) is asked for here by engines that drive
themselves: the exchange hears what a pass decided, and answers which drafts the next one verifies. It knows nothing of
vLLM or links. Thread-safe: passes are answered on one thread, sequences come and go on another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.engines.protocol import Proposal
from actors.engines.vllm.ipc import Answer, PassEnd
from actors.messages import OpenSequence, ProposalBatch, VerificationResult
from actors.settings import TargetSettings
from actors.target.proposal_broker import ProposalBroker


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


LONGEST_PASS_S = 5.0
"""Holds are bounded by what passes take (hold_policy.py); an engine whose passes take longer than this stops waiting
for the answer, which costs drafts and no token."""


class PassExchange:
    """Answers one engine.

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
        self._failed: list[VerificationResult] = []
        self._broker = ProposalBroker(settings, vocabulary, clock)
        self._reports: dict[str, deque[VerificationResult]] = {}
        """What passes decided and the engine has not handed out yet, by sequence."""
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
            self._broker.open(opening)
            self._reports[opening.sequence] = deque()

    def close(self, sequence: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        with self._changed:
            if self._broker.close(sequence):
                del self._reports[sequence]
                self._changed.notify_all()  # a pass is not held for it any more

    def offer(self, batch: ProposalBatch) -> None:
        """Drafts have come, if perhaps too late. Whoever offers those is there, and near enough to be waited for."""
        with self._changed:
            if self._broker.offer(batch):
                self._offered_in = self.passes
            self._changed.notify_all()

    def report(self, sequence: str, position: int) -> VerificationResult | None:
        """What the pass that decided `position` of a sequence reported; None if that was never heard of."""
        with self._changed:
            reports = self._reports.get(sequence, ())
            while reports and reports[0].position < position:
                reports.popleft()
            return reports.popleft() if reports and reports[0].position == position else None

    def take_facts(self) -> PassFacts:
        """What happened since the last call."""
        with self._changed:
            facts, self._facts = self._facts, PassFacts()
            return facts

    def take_failed(self) -> list[VerificationResult]:
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
        cap = self._settings.lookahead.max_wait_ms
        return LONGEST_PASS_S if cap is None else cap / 1e3

    @property
    def positions(self) -> int:
        """Prompt and committed tokens of all sequences."""
        with self._changed:
            return self._broker.positions

    # -- the exchange ---------------------------------------------------------------------------------------------

    def answer(self, end: PassEnd) -> Answer:
        """A pass has ended: file what it decided, and say what the next one verifies."""
        with self._changed:
            began = self._clock()
            if end.overhead:
                self.overhead_s.append(max(end.overhead - self._held, 0.0))
            for result in end.results:
                self._file(result)
            self._broker.controller.observe_pass(end.tokens, end.rows, end.seconds)
            self._observe_progress(end, began)
            wanting = [name for name in end.waiting if self._broker.room(name) > 0]
            self._held = self._hold(wanting, len(end.waiting))
            proposals = self._broker.propose(wanting, len(end.waiting))
            self._count(end, began)
            return Answer(end.number, proposals, quiet=self._is_quiet(proposals))

    def _observe_progress(self, end: PassEnd, now: float) -> None:
        proposed = sum(result.proposed for result in end.results)
        if self._ended_at is not None and end.tokens <= end.rows + proposed:  # a part of a prompt takes time of its own
            tokens, full = sum(len(result.tokens) for result in end.results), 2 * end.rows >= self._settings.slots
            self._broker.controller.observe_progress(end.rows, tokens, now - self._ended_at, full=full)
        self._ended_at = now if end.waiting else None

    def _file(self, result: VerificationResult) -> None:
        if not self._broker.commit(result):
            return
        if result.error is not None:
            self._failed.append(result)
            self._alarm()
        else:
            self._reports[result.sequence].append(result)

    def _hold(self, wanting: Sequence[str], rows: int) -> float:
        """Wait for drafts that are due, as long as that pays; returns the seconds.

        The drafts hear what the pass decided only when it has been answered, so only foreseen ones can come.
        """
        broker = self._broker
        hopeful = [] if broker.controller.is_off else [name for name in wanting if broker.is_foreseen(name)]
        began = now = self._clock()
        while (seconds := broker.hold(now, hopeful, rows - len(hopeful))) > 0:
            self._changed.wait(seconds)
            now = self._clock()
        return now - began

    def _is_quiet(self, proposals: dict[str, Proposal]) -> bool:
        """Nobody drafts, or what is drafted is not worth verifying. What changes that is noticed a pass later."""
        return not proposals and (self.passes - self._offered_in > SILENT or self._broker.controller.is_off)

    def _count(self, end: PassEnd, began: float) -> None:
        self.passes += 1
        facts = self._facts
        facts.passes += 1
        facts.seconds += end.seconds
        facts.tokens += end.tokens
        facts.hold_seconds += self._held
        facts.answer_seconds += self._clock() - began - self._held
        plain = max(end.tokens - sum(result.proposed for result in end.results), 0)
        facts.plain_seconds += self._broker.controller.cost(plain)
