"""Desks for tests in front of a real vLLM: what is proposed depends on the texts, and on no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engines.protocol import Proposal
from actors.engines.vllm.ipc import Answer, Decided, PassEnd
from actors.engines.vllm.runtime import VllmModel
from actors.messages import OpenSequence
from actors.target.proposal_broker import ProposalBroker
from actors.target.vllm_actor import VllmTargetActor

LONG_S = 60.0
"""Longer than any draft takes; it ends tests that would hang."""


class PatientDesk(ProposalBroker):
    """Answers a pass when the draft has drafted all that it can know, however busy the machine is.

    What a pass decided reaches the draft after the pass was answered. So at most this can be waited for: that the chain
    past what was committed before the pass goes a whole lookahead beyond what the pass decided, or has parted from it.
    It takes a draft whose trees are chains (`vllm_stack.CHAIN`), and makes what is proposed a function of the texts.
    """

    @property
    def longest_hold_s(self) -> float:
        return LONG_S

    def answer(self, end: PassEnd) -> Answer:
        with self._changed:
            self._changed.wait_for(lambda: all(self._is_drafted(decided) for decided in end.decided), LONG_S)
        return super().answer(end)

    def _hold(self, wanting: list[str], others: int) -> float:
        return 0.0

    def _is_drafted(self, decided: Decided) -> bool:
        state = self._sequences.get(decided.sequence)
        if state is None or not state.opening.sampling.speculation or decided.position != state.length:
            return True
        if decided.error is not None:  # the draft does not know either what to choose
            return True
        wanted = len(decided.tokens) + self._settings.lookahead.maximum
        path = self._mailbox.path(decided.sequence, wanted).tokens
        parted = any(one != other for one, other in zip(path, decided.tokens, strict=False))
        return parted or len(path) == wanted


@dataclass(frozen=True)
class Decision:
    """What one pass decided for a sequence, and from which drafts."""

    opening: OpenSequence
    decided: Decided
    drafts: Proposal


class RecordingDesk(PatientDesk):
    """Keeps every decision that is reported, with what was proposed for it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.decisions: list[Decision] = []
        self._openings: dict[str, OpenSequence] = {}
        self._proposed: dict[str, Proposal] = {}

    def open(self, opening: OpenSequence) -> None:
        self._openings[opening.sequence] = opening
        super().open(opening)

    def answer(self, end: PassEnd) -> Answer:
        for decided in end.decided:
            drafts = self._proposed.pop(decided.sequence, Proposal())
            self.decisions.append(Decision(self._openings[decided.sequence], decided, drafts))
        answer = super().answer(end)
        self._proposed.update(answer.proposals)
        return answer


@dataclass
class Fuse:
    """Calls `burn` in the pass after which `sequence` is at least `length` long."""

    sequence: str
    length: int
    burn: Callable[[], None]
    position: int = field(default=0)
    """Its length when that happened."""


class FusedDesk(PatientDesk):
    """Something happens at a certain pass of a certain sequence."""

    fuse: Fuse | None = None

    def answer(self, end: PassEnd) -> Answer:
        answer = super().answer(end)
        fuse = self.fuse
        if fuse is not None and not fuse.position:
            state = self._sequences.get(fuse.sequence)
            if state is not None and state.length >= fuse.length:
                fuse.position = state.length
                fuse.burn()
        return answer


def target_with(desk_class: type[ProposalBroker]) -> type[VllmTargetActor]:
    """The real actor with another broker."""

    class Target(VllmTargetActor):
        def _make_desk(self, model: VllmModel) -> ProposalBroker:
            return desk_class(self._settings, model.vocabulary, self._clock, self._nudge)

        @property
        def broker(self) -> ProposalBroker:
            return self._broker

    return Target
