"""Exchanges for tests in front of a real vLLM: what is proposed depends on the texts, and on no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from actors.engines.protocol import Proposal
from actors.engines.vllm.ipc import Answer, PassEnd
from actors.engines.vllm.runtime import VllmModel
from actors.messages import OpenSequence, VerificationResult
from actors.target.pass_exchange import PassExchange
from benchmarks.support.measured_vllm import MeasuredVllmTarget

LONG_S = 60.0
"""Longer than any draft takes; it ends tests that would hang."""


class PatientExchange(PassExchange):
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
            self._changed.wait_for(lambda: all(self._is_drafted(result) for result in end.results), LONG_S)
        return super().answer(end)

    def _hold(self, wanting: Sequence[str], rows: int) -> float:
        return 0.0

    def _is_drafted(self, result: VerificationResult) -> bool:
        name, broker = result.sequence, self._broker
        if not broker.speculates(name) or result.position != broker.length(name):
            return True
        if result.error is not None:  # the draft does not know either what to choose
            return True
        wanted = len(result.tokens) + self._settings.lookahead.maximum
        path = broker.mailbox.path(name, wanted).tokens
        parted = any(one != other for one, other in zip(path, result.tokens, strict=False))
        return parted or len(path) == wanted


@dataclass(frozen=True)
class Decision:
    """What one pass decided for a sequence, and from which drafts."""

    opening: OpenSequence
    result: VerificationResult
    drafts: Proposal


class RecordingExchange(PatientExchange):
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
        for result in end.results:
            drafts = self._proposed.pop(result.sequence, Proposal())
            self.decisions.append(Decision(self._openings[result.sequence], replace(result), drafts))
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


class FusedExchange(PatientExchange):
    """Something happens at a certain pass of a certain sequence."""

    fuse: Fuse | None = None

    def answer(self, end: PassEnd) -> Answer:
        answer = super().answer(end)
        fuse = self.fuse
        if fuse is not None and not fuse.position:
            length = self._broker.length(fuse.sequence)
            if length is not None and length >= fuse.length:
                fuse.position = length
                fuse.burn()
        return answer


def target_with(exchange_class: type[PassExchange]) -> type[MeasuredVllmTarget]:
    """The real actor with another exchange."""

    class Target(MeasuredVllmTarget):
        def _make_exchange(self, model: VllmModel) -> PassExchange:
            return exchange_class(self._settings, model.vocabulary, self._clock, self._nudge)

        @property
        def exchange(self) -> PassExchange:
            return self._exchange

    return Target
