"""Continuous batching of one target: which sequences are in the next pass, with how much prompt and which drafts.

A pass reads as propose, verify, commit. The scheduler knows nothing of links, threads or Ray; its clock is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.engines.protocol import Proposal, Row, TargetModel
from actors.errors import OutriderError, OverloadedError
from actors.messages import FinishReason, OpenSequence, VerificationResult
from actors.settings import TargetSettings
from actors.target.mailbox import NOTHING
from actors.target.pass_report import PassReport
from actors.target.proposal_broker import ProposalBroker


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence that waits for a slot or holds one."""

    opening: OpenSequence
    owner: str
    tokens: list[int]
    queued_at: float
    slot: int = -1
    cached: int = 0
    """Positions whose keys and values are in the slot."""
    generated: int = 0

    @property
    def pending(self) -> tuple[int, ...]:
        """Tokens that are final but not yet in the slot; at least the last one."""
        return tuple(self.tokens[self.cached :])


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sequence's part in the pass being formed. pending: what is run of its final tokens."""

    sequence: _Sequence
    pending: tuple[int, ...]
    decide: bool
    proposal: Proposal = NOTHING

    @property
    def prompt(self) -> int:
        """Tokens of the prompt in the pass, but for the last one where a token is decided after it."""
        return len(self.pending) - self.decide

    def row(self) -> Row:
        tokens = self.pending + self.proposal.tokens
        return Row(self.sequence.slot, tokens, self.sequence.cached, self.proposal, self.decide)


class Scheduler:
    """Runs passes of `model` over the sequences given to it. Used from one thread."""

    def __init__(
        self,
        model: TargetModel,
        settings: TargetSettings,
        broker: ProposalBroker,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._settings = settings
        self._broker = broker
        self._clock = clock
        self._eos = frozenset(model.card().eos)
        self._free = list(range(settings.slots - 1, -1, -1))
        self._running: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._refusals: list[tuple[str, VerificationResult]] = []
        """Each with the orchestrator it is for."""
        self._held_since: float | None = None

    # -- what the links bring ------------------------------------------------------------------------------------

    def open(self, owner: str, opening: OpenSequence) -> None:
        """Queue a sequence. A full queue refuses it with a result that carries an OverloadedError."""
        former = self._running.get(opening.sequence) or self._in_queue(opening.sequence)
        if former is not None and former.owner == owner:
            return  # a repeated message
        if former is not None:  # its orchestrator lost the link and opens it again over a new one
            self.cancel([opening.sequence])
        if len(self._waiting) >= self._settings.queue + len(self._free):
            full = OverloadedError(f"all {self._settings.slots} slots are taken and {len(self._waiting)} requests wait")
            self._refuse(owner, opening, full)
            return
        tokens = [*opening.prompt, *opening.committed]
        self._waiting.append(_Sequence(opening, owner, tokens, self._clock(), generated=len(opening.committed)))
        self._broker.open(opening)

    def _in_queue(self, name: str) -> _Sequence | None:
        return next((s for s in self._waiting if s.opening.sequence == name), None)

    def cancel(self, sequences: Sequence[str]) -> None:
        """Give back what these sequences hold; unknown ids are ignored."""
        gone = set(sequences)
        if any(s.opening.sequence in gone for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if s.opening.sequence not in gone)
        for name in gone:
            if (sequence := self._running.pop(name, None)) is not None:
                self._release(sequence)
            self._broker.close(name)

    def cancel_owner(self, owner: str) -> list[str]:
        """Give back everything that one orchestrator's sequences hold; returns which these were."""
        everything = [*self._running.values(), *self._waiting]
        names = [s.opening.sequence for s in everything if s.owner == owner]
        self.cancel(names)
        return names

    # -- the pass ------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Is there anything to run or to report?"""
        return bool(self._running or self._waiting or self._refusals)

    @property
    def active(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def cached_positions(self) -> int:
        """Positions of all slots that hold a token."""
        return sum(sequence.cached for sequence in list(self._running.values()))

    @property
    def queued(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    def hold(self) -> float:
        """Seconds the next pass is worth holding for drafts that are due; 0 means go."""
        room = self._broker.room
        deciding = [name for name, s in self._running.items() if len(s.tokens) == s.cached + 1 and room(name) > 0]
        if not deciding or (self._waiting and self._free):
            return 0.0
        now = self._clock()
        seconds = self._broker.hold(now, deciding, len(self._running) - len(deciding))
        if seconds and self._held_since is None:
            self._held_since = now
        return seconds

    def step(self) -> PassReport:
        """One target pass: propose, verify, commit."""
        began = self._clock()
        report = PassReport(hold_seconds=began - (self._held_since or began))
        self._held_since = None
        self._admit(report)
        turns = self._propose()
        formed = self._clock()
        results = self._verify(turns)
        verified = self._clock()
        report.form_seconds, report.seconds = formed - began, verified - formed
        self._commit(turns, results, report)
        report.commit_seconds = self._clock() - verified
        return report

    def _admit(self, report: PassReport) -> None:
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            slot = self._free.pop()
            try:
                self._model.attach(slot, sequence.opening)
            except OutriderError as error:
                self._free.append(slot)
                self._broker.close(sequence.opening.sequence)
                self._refuse(sequence.owner, sequence.opening, error)
                continue
            sequence.slot = slot
            report.queue_seconds.append(self._clock() - sequence.queued_at)
            self._running[sequence.opening.sequence] = sequence

    def _propose(self) -> list[_Turn]:
        """Who is in the pass: a bounded share of prompts, everyone who decodes, and the drafts worth verifying."""
        budget = self._settings.prefill_chunk
        parts: list[tuple[_Sequence, tuple[int, ...], bool]] = []
        for sequence in self._running.values():
            pending = sequence.pending
            decide = len(pending) == 1
            if not decide:
                if budget == 0:
                    continue
                decide = len(pending) <= budget
                pending = pending[:budget]
                budget -= len(pending)
            parts.append((sequence, pending, decide))
        names = [sequence.opening.sequence for sequence, _, decide in parts if decide]
        wanting = [name for name in names if self._broker.room(name) > 0]
        proposals = self._broker.propose(wanting, len(names))
        return [_Turn(s, pending, decide, proposals.get(s.opening.sequence, NOTHING)) for s, pending, decide in parts]

    def _verify(self, turns: list[_Turn]) -> list[VerificationResult | None]:
        return self._model.forward([turn.row() for turn in turns]) if turns else []

    def _commit(self, turns: list[_Turn], results: list[VerificationResult | None], report: PassReport) -> None:
        verified = self._clock()
        refusals, self._refusals = self._refusals, []
        for owner, refusal in refusals:
            report.add(owner, refusal)
        for turn, result in zip(turns, results, strict=True):
            sequence = turn.sequence
            of_owner = report.results.setdefault(sequence.owner, [])
            report.tokens += len(turn.pending) + len(turn.proposal.tokens)
            sequence.cached += len(turn.pending)
            if result is not None:
                self._settle(sequence, result)
                of_owner.append(result)
        prompt = sum(turn.prompt for turn in turns)
        controller = self._broker.controller
        report.plain_seconds = controller.cost(sum(turn.decide for turn in turns), prompt)
        # What forming and committing take grows with the drafts, too, and is time of the pass all the same.
        around = report.form_seconds + self._clock() - verified
        controller.observe_pass(report.tokens - prompt, len(turns), report.seconds + around, prompt)

    def _settle(self, sequence: _Sequence, result: VerificationResult) -> None:
        """Cut a result at a stop, move the committed prefix on, end what is done."""
        self._broker.commit(result)
        count, finish = self._end(sequence, result.tokens)
        result.cut(count)
        if finish is not None:
            result.error = None
        elif result.error is not None:  # no token can be chosen here: the answer cannot go on
            finish = "error"
        result.finish = finish
        tokens = result.tokens
        sequence.tokens.extend(tokens)
        sequence.generated += len(tokens)
        sequence.cached += min(result.accepted, max(len(tokens) - 1, 0))
        if finish is None:
            self._model.record(sequence.slot, tokens)
        else:
            result.features = None  # nobody drafts after the end
            del self._running[result.sequence]
            self._release(sequence)

    def _end(self, sequence: _Sequence, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """How many tokens stay, and why it ends there: at the first stop token (which stays), at max_tokens, or where
        the context ends."""
        sampling = sequence.opening.sampling
        room = min(sampling.max_tokens - sequence.generated, self._settings.context - len(sequence.tokens))
        for i, token in enumerate(tokens[:room]):
            if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
                return i + 1, "stop"
        return (room, "length") if len(tokens) >= room else (len(tokens), None)

    def _release(self, sequence: _Sequence) -> None:
        self._model.detach(sequence.slot)
        self._free.append(sequence.slot)
        self._broker.close(sequence.opening.sequence)

    def _refuse(self, owner: str, opening: OpenSequence, error: OutriderError) -> None:
        position = len(opening.prompt) + len(opening.committed)
        self._refusals.append((owner, VerificationResult(opening.sequence, position, (), finish="error", error=error)))
