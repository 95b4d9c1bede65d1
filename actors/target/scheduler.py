"""Continuous batching of one target: which sequences are in the next pass, with how much prompt and which drafts.

A pass reads as propose, verify, commit. The scheduler knows nothing of links, threads or Ray; its clock is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.algorithms.control.lookahead import LookaheadController
from actors.algorithms.draft_tree import branch_chances, branch_points, main_path
from actors.algorithms.types import Outcome
from actors.engines.protocol import Proposal, Row, TargetModel
from actors.errors import OutriderError, OverloadedError
from actors.messages import FinishReason, OpenSequence, Verdict
from actors.settings import TargetSettings
from actors.target.mailbox import Mailbox

NOTHING = Proposal()


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
class Ruling:
    """A verdict and the orchestrator it is for."""

    owner: str
    verdict: Verdict


@dataclass(slots=True)
class PassReport:
    """What one pass did. `owners` are all orchestrators with work in the pass, also where nothing was committed."""

    rulings: list[Ruling] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    seconds: float = 0.0
    tokens: int = 0
    starved: int = 0
    """Rows that wanted drafts and found none."""
    declined: int = 0
    """Rows whose drafts were not worth verifying."""
    hold_seconds: float = 0.0
    form_seconds: float = 0.0
    commit_seconds: float = 0.0
    plain_seconds: float = 0.0
    """What the pass would have taken without drafts, as the cost fit has it."""
    queue_seconds: list[float] = field(default_factory=list)
    """How long the sequences that got a slot had waited for it."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sequence's part in the pass being formed."""

    sequence: _Sequence
    pending: tuple[int, ...]
    decide: bool
    wanting: bool = False
    """It could use drafts."""
    proposal: Proposal = NOTHING
    declined: bool = False
    """Drafts were at hand and not worth verifying, or would not have been."""

    @property
    def prompt(self) -> int:
        """Tokens of the prompt in the pass, but for the last one where a token is decided after it."""
        return len(self.pending) - self.decide

    @property
    def starved(self) -> bool:
        """It wanted drafts and found none."""
        return self.wanting and not (self.proposal.tokens or self.declined)

    def row(self) -> Row:
        tokens = self.pending + self.proposal.tokens
        return Row(self.sequence.slot, tokens, self.sequence.cached, self.proposal, self.decide)


class Scheduler:
    """Runs passes of `model` over the sequences given to it. Used from one thread."""

    def __init__(
        self,
        model: TargetModel,
        settings: TargetSettings,
        mailbox: Mailbox,
        controller: LookaheadController,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._settings = settings
        self._mailbox = mailbox
        self._controller = controller
        self._clock = clock
        card = model.card()
        self._eos = frozenset(card.eos)
        lookahead = settings.lookahead
        self._tree_nodes = lookahead.tree if card.trees and settings.rule == "coupled" else 0
        """Most nodes of a sequence in a pass; 0: paths only."""
        if lookahead.mode != "adaptive":
            self._tree_nodes = 0
        self._free = list(range(settings.slots - 1, -1, -1))
        self._running: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._refusals: list[Ruling] = []
        self._held_since: float | None = None

    # -- what the links bring ------------------------------------------------------------------------------------

    def open(self, owner: str, opening: OpenSequence) -> None:
        """Queue a sequence. A full queue refuses it with a verdict that carries an OverloadedError."""
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
        if opening.sampling.speculation:
            self._mailbox.open(opening.sequence, tokens)

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
            self._mailbox.close(name)

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
        deciding = [name for name, s in self._running.items() if len(s.tokens) == s.cached + 1 and self._room(s) > 0]
        if not deciding or (self._waiting and self._free):
            return 0.0
        limit = self._settings.lookahead.maximum
        ready = {name: len(self._mailbox.path(name, limit).tokens) for name in deciding}
        now = self._clock()
        seconds = self._controller.hold(now, ready, len(self._running) - len(deciding))
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
        outcomes = self._verify(turns)
        verified = self._clock()
        report.form_seconds, report.seconds = formed - began, verified - formed
        self._commit(turns, outcomes, report)
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
                self._mailbox.close(sequence.opening.sequence)
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
        rooms = [(s.opening.sequence, self._room(s)) for s, _, decide in parts if decide]
        paths = {name: self._drafts(name, room) for name, room in rooms if room > 0}
        trees = {name: path.parents for name, path in paths.items() if path.parents}
        lookahead = self._controller.plan({name: path.confidences for name, path in paths.items()}, len(rooms), trees)
        turns: list[_Turn] = []
        for sequence, pending, decide in parts:
            name = sequence.opening.sequence
            path = paths.get(name)
            if path is None:
                turns.append(_Turn(sequence, pending, decide))
                continue
            k = lookahead[name]
            declined = k == 0 if path.tokens else self._controller.is_off
            turns.append(_Turn(sequence, pending, decide, wanting=True, proposal=path.cut(k), declined=declined))
        return turns

    def _drafts(self, name: str, room: int) -> Proposal:
        """The drafts at hand, at most `room` deep."""
        if self._tree_nodes:
            return self._mailbox.tree(name, self._tree_nodes, room)
        return self._mailbox.path(name, room)

    def _verify(self, turns: list[_Turn]) -> list[Outcome | None]:
        return self._model.forward([turn.row() for turn in turns]) if turns else []

    def _commit(self, turns: list[_Turn], outcomes: list[Outcome | None], report: PassReport) -> None:
        report.rulings, self._refusals = self._refusals, []
        report.owners = {ruling.owner for ruling in report.rulings}
        for turn, outcome in zip(turns, outcomes, strict=True):
            sequence = turn.sequence
            report.owners.add(sequence.owner)
            report.tokens += len(turn.pending) + len(turn.proposal.tokens)
            sequence.cached += len(turn.pending)
            if outcome is not None:
                report.starved += turn.starved
                report.declined += turn.declined
                report.rulings.append(Ruling(sequence.owner, self._rule(turn, outcome)))
        prompt = sum(turn.prompt for turn in turns)
        report.plain_seconds = self._controller.cost(sum(turn.decide for turn in turns), prompt)
        self._controller.observe_pass(report.tokens - prompt, len(turns), report.seconds, prompt)

    def _rule(self, turn: _Turn, outcome: Outcome) -> Verdict:
        """Turn an outcome into a verdict: cut it at a stop, move the committed prefix on, end what is done."""
        sequence, name = turn.sequence, turn.sequence.opening.sequence
        position = len(sequence.tokens)
        tokens, finish = self._cut(sequence, outcome.tokens)
        proposed, accepted = _on_path(turn.proposal, outcome), min(outcome.accepted, len(tokens))
        if outcome.error is not None and finish is None:  # no token can be chosen here: the answer cannot go on
            finish = "error"
        sequence.tokens.extend(tokens)
        sequence.generated += len(tokens)
        sequence.cached += min(accepted, max(len(tokens) - 1, 0))
        if turn.proposal.tokens:
            self._controller.observe_block(name, _chances(turn.proposal, outcome), outcome.accepted)
        if finish is None:
            self._model.record(sequence.slot, tokens)
            self._mailbox.commit(name, tokens)
        else:
            del self._running[name]
            self._release(sequence)
        n = len(tokens)
        return Verdict(
            sequence=name,
            position=position,
            tokens=tokens,
            proposed=proposed,
            accepted=accepted,
            finish=finish,
            alternatives=outcome.alternatives[:n],
            margins=outcome.margins[:n],
            declined=turn.declined,
            error=outcome.error if finish == "error" else None,
            branches=tuple(i for i in branch_points(turn.proposal.parents, outcome.path) if i < n),
        )

    def _cut(self, sequence: _Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Stop at the first stop token (which stays), at max_tokens, or where the context ends."""
        sampling = sequence.opening.sampling
        room = min(sampling.max_tokens - sequence.generated, self._settings.context - len(sequence.tokens))
        for i, token in enumerate(tokens[:room]):
            if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
                return tokens[: i + 1], "stop"
        if len(tokens) >= room:
            return tokens[:room], "length"
        return tokens, None

    def _room(self, sequence: _Sequence) -> int:
        """Most draft tokens worth verifying, 0 without speculation: a pass commits one token more than it accepts."""
        sampling = sequence.opening.sampling
        if not sampling.speculation:
            return 0
        left = sampling.max_tokens - sequence.generated
        context = self._settings.context - len(sequence.tokens)
        return max(0, min(self._settings.lookahead.maximum, left - 1, context - 1))

    def _release(self, sequence: _Sequence) -> None:
        self._model.detach(sequence.slot)
        self._free.append(sequence.slot)
        self._mailbox.close(sequence.opening.sequence)
        self._controller.forget(sequence.opening.sequence)

    def _refuse(self, owner: str, opening: OpenSequence, error: OutriderError) -> None:
        position = len(opening.prompt) + len(opening.committed)
        verdict = Verdict(opening.sequence, position, (), finish="error", error=error)
        self._refusals.append(Ruling(owner, verdict))


def _on_path(proposal: Proposal, outcome: Outcome) -> int:
    """Draft tokens on the path: of a tree, the accepted ones and the most likely path on from there."""
    if not proposal.parents:
        return len(proposal.tokens)
    return len(outcome.path) + len(main_path(proposal.parents, outcome.path[-1] if outcome.path else -1))


def _chances(proposal: Proposal, outcome: Outcome) -> Sequence[float]:
    """At each place on the path, the chance that a draft token is accepted there."""
    if not proposal.parents:
        return proposal.confidences
    return branch_chances(proposal.confidences, proposal.parents, outcome.path)
