"""The target actor on vLLM: a sibling of actors/target/actor.py for an engine that schedules itself.

The same messages come in and go out. Sequences enter and leave vLLM through its public API; drafts wait in the
mailbox of this process, and vLLM's first rank asks for them once per pass (engines/vllm/ipc.py). What vLLM hands out
is what was committed; what its passes reported (how much of it was drafts, margins) is put beside it, and where a
report was lost the tokens go out without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.algorithms.grammar import GrammarCompiler
from actors.engines.opening_checks import check_opening
from actors.engines.protocol import ModelCard
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.requests import plain_request, request, room
from actors.engines.vllm.runtime import VllmModel, VllmRuntime
from actors.errors import EngineError, InvalidSettingError, OutriderError, OverloadedError
from actors.messages import (
    Cancel,
    OpenSequence,
    ProposalBatch,
    Pulse,
    TargetMessage,
    VerificationBatch,
    VerificationResult,
)
from actors.replica.pass_metrics import PassMetrics
from actors.replica.replica import Replica
from actors.settings import TargetSettings
from actors.target.engine_results import by_pass
from actors.target.pass_exchange import PassExchange
from actors.target.pass_report import PassReport
from actors.telemetry import Recorder
from actors.tracing import NO_TRACES, Tracer

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Sequence:
    owner: str
    opening: OpenSequence
    run: str
    """Names this stay of the sequence at vLLM: what an earlier one still hands out is not its."""
    length: int
    """Prompt and tokens handed out."""
    queued_at: float
    started: bool = False


class VllmTargetActor(Replica[TargetMessage, VerificationBatch]):
    """A plain class; `ray.remote` is applied where it is placed.

    make_model: says what to build, on the model thread.
    """

    def __init__(
        self,
        name: str,
        make_model: Callable[[], VllmModel],
        settings: TargetSettings,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        super().__init__(name, clock)
        self._make_model = make_model
        self._settings = settings
        self._recorder = recorder
        self._tracer = tracer
        self._sequences: dict[str, _Sequence] = {}
        self._runs: dict[str, _Sequence] = {}
        self._numbers = itertools.count()
        self._answers = PassReport()
        """Results that need no vLLM."""
        self._queue_seconds: list[float] = []
        self._handed_out_at = self._passing_since = clock()
        self._pinged_at_pass = -1
        """Passes that had ended at the last ping, which is when they were first so many."""
        self._runtime: VllmRuntime | None = None
        self._metrics: PassMetrics | None = None

    # -- building --------------------------------------------------------------------------------------------------

    def _prepare(self) -> ModelCard:
        model, settings = self._make_model(), self._settings
        self._model = model
        self._exchange = self._make_exchange(model)
        self._grammars = _grammars(model)
        tokenizer = model.tokenizer if self._grammars is not None else None
        self._runtime = VllmRuntime(model, settings, self._exchange, tokenizer, self._nudge)
        if self._stopping:  # it took longer than whoever stopped this actor waited
            self._runtime.close()
        self._metrics = PassMetrics(self._recorder, settings)
        return ModelCard(model.name, model.vocabulary, settings.context, settings.slots, model.eos, model.fingerprint)

    def _make_exchange(self, model: VllmModel) -> PassExchange:
        return PassExchange(self._settings, model.vocabulary, self._clock, self._nudge)

    async def stop(self) -> None:
        """End the model thread, all streams and vLLM's processes."""
        await super().stop()
        if self._runtime is not None:
            await asyncio.to_thread(self._runtime.close)

    @property
    def speculates(self) -> bool:
        """False when the start-up check failed and the configuration prefers plain decoding to none."""
        return self._runtime is None or self._runtime.speculates

    @property
    def _vllm(self) -> VllmEngine:
        assert self._runtime is not None  # the model thread runs nothing else before _prepare
        return self._runtime.engine

    # -- what comes in ---------------------------------------------------------------------------------------------

    def _take(self, link: str, mail: Sequence[TargetMessage]) -> None:
        for message in mail:
            match message:
                case ProposalBatch():
                    self._exchange.offer(message)
                case OpenSequence():
                    self._tracer.begin(message.sequence)
                    self._open(link, message)
                case Cancel():
                    self._end(message.sequences, finish="cancelled")
        self._occupied()

    def _open(self, owner: str, opening: OpenSequence) -> None:
        former = self._sequences.get(opening.sequence)
        if former is not None and former.owner == owner:
            return  # a repeated message
        self._end((opening.sequence,), finish="moved")
        try:
            if len(self._sequences) >= self._settings.slots + self._settings.queue:
                raise OverloadedError(f"all {self._settings.slots} slots are taken and {self.queued} requests wait")
            self._check(opening)
            if room(opening, self._settings.context) < 1:
                self._answers.add(owner, VerificationResult(opening.sequence, _position(opening), (), finish="length"))
                return
            make = request if self.speculates else plain_request
            vllm_request = make(opening, self._model.eos, self._settings.context)
        except OutriderError as error:
            self._refuse(owner, opening, error)
            return
        run = f"{opening.sequence}#{next(self._numbers)}"
        sequence = _Sequence(owner, opening, run, _position(opening), self._clock())
        self._sequences[opening.sequence] = self._runs[run] = sequence
        if self.speculates:
            self._exchange.open(opening)
        self._vllm.start(dataclasses.replace(vllm_request, name=run))

    def _check(self, opening: OpenSequence) -> None:
        check_opening(opening, self._model.vocabulary)
        grammar = opening.sampling.grammar
        if grammar is None or not self.speculates:
            return
        if self._grammars is None:
            raise InvalidSettingError("this deployment has no grammar support", "response_format")
        self._grammars.matcher(grammar)

    def _refuse(self, owner: str, opening: OpenSequence, error: OutriderError) -> None:
        self._answers.add(
            owner, VerificationResult(opening.sequence, _position(opening), (), finish="error", error=error)
        )

    def _end(self, names: Sequence[str], finish: str) -> None:
        """Give back what these sequences hold; unknown ones are ignored."""
        gone = [sequence for name in names if (sequence := self._sequences.pop(name, None)) is not None]
        for sequence in gone:
            del self._runs[sequence.run]
            self._exchange.close(sequence.opening.sequence)
            self._tracer.end(sequence.opening.sequence, finish=finish)
        if gone:
            self._vllm.end([sequence.run for sequence in gone])

    def _drop_link(self, link: str) -> None:
        self._end([n for n, s in self._sequences.items() if s.owner == link], finish="abandoned")
        self._occupied()

    # -- what goes out ---------------------------------------------------------------------------------------------

    def _pause(self) -> float | None:
        return 0.0 if self._answers.results or self._vllm.has_news or self._exchange.has_failed else None

    def _work(self) -> dict[str, VerificationBatch]:
        report = self._report()
        ended, number = time.time(), self._progress + 1
        return {
            owner: VerificationBatch(self._name, number, results, report.seconds, report.tokens, ended)
            for owner, results in report.results.items()
        }

    def _report(self) -> PassReport:
        """What vLLM's passes decided since the last time, usually one of them."""
        report, self._answers = self._answers, PassReport()
        outputs = self._vllm.take()
        for failed in self._exchange.take_failed():
            sequence = self._sequences.get(failed.sequence)
            if sequence is not None:
                failed.position, failed.tokens, failed.finish = sequence.length, (), "error"
                report.add(sequence.owner, failed)
                self._end((failed.sequence,), finish="error")
        for output in outputs:
            sequence = self._runs.get(output.sequence)
            if sequence is not None:
                self._hand_out(sequence, output, report)
        if outputs and self._metrics is not None:
            self._book(report)
        return report

    def _book(self, report: PassReport) -> None:
        """What the passes took since something was last handed out; without an exchange no more than that is known."""
        assert self._metrics is not None
        facts, now = self._exchange.take_facts(), self._clock()
        passes = max(facts.passes, 1)
        report.seconds = facts.seconds / passes if self.speculates else now - self._handed_out_at
        report.tokens = round(facts.tokens / passes)
        report.hold_seconds, report.form_seconds = facts.hold_seconds / passes, facts.answer_seconds / passes
        report.plain_seconds = facts.plain_seconds / passes
        report.queue_seconds, self._queue_seconds = self._queue_seconds, []
        self._handed_out_at = now
        self._metrics.pass_done(report, self)

    def _hand_out(self, sequence: _Sequence, output: VerificationResult, report: PassReport) -> None:
        """Put into the report what vLLM handed out of one sequence."""
        name = output.sequence = sequence.opening.sequence
        if not sequence.started and output.error is None:
            sequence.started = True
            self._queue_seconds.append(self._clock() - sequence.queued_at)
        sequence.length = output.position + len(output.tokens)
        for result in by_pass(output, lambda position: self._exchange.report(name, position)):
            report.add(sequence.owner, result)
        if output.finish is not None:
            self._end((name,), finish=output.finish)

    # -- what others ask -------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Sequences that vLLM runs, at most."""
        return min(len(self._sequences), self._settings.slots)

    @property
    def queued(self) -> int:
        """Sequences that wait at vLLM."""
        return max(len(self._sequences) - self._settings.slots, 0)

    @property
    def cached_positions(self) -> int:
        """Positions that hold a token, of the sequences that run."""
        return sum(s.length for s in list(self._sequences.values()) if s.started)

    def _pulse(self) -> Pulse:
        """A pass is progress, also where it says nothing (part of a long prompt)."""
        pulse = super()._pulse()
        passes = self._exchange.passes if self._built.is_set() else 0
        return Pulse(pulse.busy, pulse.progress + passes, pulse.draining, pulse.facts)

    def _facts(self) -> dict[str, float]:
        return self._metrics.facts(self) if self._metrics is not None else {}

    async def ping(self, stuck_after_s: float = 60.0) -> str:
        """Health: raises EngineError when vLLM died, or has work and ended no pass for that long."""
        if self._runtime is not None and self._runtime.failure is not None:
            raise EngineError(f"{self._name}: vLLM died: {self._runtime.failure}")
        passes, now = self._exchange.passes if self._built.is_set() else 0, self._clock()
        if passes != self._pinged_at_pass or not self._sequences:
            self._pinged_at_pass, self._passing_since = passes, now
        still = now - self._passing_since
        if self.speculates and self._sequences and still > stuck_after_s:
            raise EngineError(f"{self._name}: vLLM has work and has ended no pass for {still:.0f} s")
        return await super().ping(stuck_after_s)

    async def load(self) -> dict[str, float]:
        """What the autoscaling policy of this tier goes by; empty until the model is built."""
        return self._metrics.load(self) if self._metrics is not None else {}

    def _occupied(self) -> None:
        if self._metrics is not None:
            self._metrics.occupied(self)

    def _busy(self) -> bool:
        return bool(self._sequences or self._answers.results)

    def _holding(self) -> bool:
        return bool(self._sequences)


def _position(opening: OpenSequence) -> int:
    """Where the next token goes."""
    return len(opening.prompt) + len(opening.committed)


def _grammars(model: VllmModel) -> GrammarCompiler | None:
    if model.tokenizer is None:
        return None
    try:
        return GrammarCompiler(model.tokenizer, model.vocabulary, model.eos)
    except ValueError as error:  # a kind of tokenizer that llguidance does not read
        logger.warning("%s is served without grammars: %s", model.name, error)
        return None
