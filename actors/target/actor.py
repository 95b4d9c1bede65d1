"""The target actor: runs passes over its sequences and tells each orchestrator what was committed.

A draft can only help: proposals are taken from the mailbox as they are when a pass forms, and a pass is held for a
draft that is due only as long as the lookahead controller finds that worth it, within a fixed bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from actors.engines.protocol import ModelCard, TargetModel
from actors.messages import Cancel, OpenSequence, ProposalBatch, TargetMessage, VerificationBatch
from actors.replica.pass_metrics import PassMetrics
from actors.replica.replica import Replica
from actors.settings import TargetSettings
from actors.target.proposal_broker import ProposalBroker
from actors.target.scheduler import Scheduler
from actors.telemetry import Recorder
from actors.tracing import NO_TRACES, Tracer

logger = logging.getLogger(__name__)


class TargetActor(Replica[TargetMessage, VerificationBatch]):
    """A plain class; `ray.remote` is applied where it is placed.

    make_model: builds the model on the model thread (weights are loaded there, once).
    """

    def __init__(
        self,
        name: str,
        make_model: Callable[[], TargetModel],
        settings: TargetSettings,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        super().__init__(name, clock)
        self._tracer = tracer
        self._make_model = make_model
        self._settings = settings
        self._recorder = recorder
        self._scheduler: Scheduler | None = None

    def _prepare(self) -> ModelCard:
        model = self._make_model()
        card = model.card()
        self._broker = ProposalBroker(self._settings, card.vocabulary, self._clock, trees=card.trees)
        self._metrics = PassMetrics(self._recorder, self._settings)
        self._scheduler = Scheduler(model, self._settings, self._broker, self._clock)
        return card

    @property
    def _passes(self) -> Scheduler:
        assert self._scheduler is not None  # the model thread runs nothing else before _prepare
        return self._scheduler

    def _take(self, link: str, mail: Sequence[TargetMessage]) -> None:
        for message in mail:
            match message:
                case ProposalBatch():
                    self._offer(message)
                case OpenSequence():
                    self._tracer.begin(message.sequence)
                    self._passes.open(link, message)
                case Cancel():
                    self._passes.cancel(message.sequences)
                    for name in message.sequences:
                        self._tracer.end(name, finish="cancelled")
                    self._metrics.occupied(self._passes)

    def _offer(self, batch: ProposalBatch) -> None:
        mailbox = self._broker.mailbox
        malformed = mailbox.malformed
        self._broker.offer(batch)
        if mailbox.malformed and not malformed:
            logger.warning(
                "%s: draft %s sends proposals that make no sense; they are ignored", self._name, batch.source
            )

    def _pause(self) -> float | None:
        if not self._passes.busy:
            return None
        return self._passes.hold()

    def _work(self) -> dict[str, VerificationBatch]:
        report = self._passes.step()
        ended = time.time()
        for result in report:
            if result.finish is not None:
                self._tracer.end(result.sequence, finish=result.finish)
        self._metrics.pass_done(report, self._passes)
        number = self._progress + 1
        return {
            owner: VerificationBatch(self._name, number, results, report.seconds, report.tokens, ended)
            for owner, results in report.results.items()
        }

    async def load(self) -> dict[str, float]:
        """What the autoscaling policy of this tier goes by; empty until the model is built."""
        return self._metrics.load(self._passes) if self._scheduler is not None else {}

    def _drop_link(self, link: str) -> None:
        for name in self._passes.cancel_owner(link):
            self._tracer.end(name, finish="abandoned")
        self._metrics.occupied(self._passes)

    def _facts(self) -> dict[str, float]:
        return self._metrics.facts(self._passes)

    def _busy(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def _holding(self) -> bool:
        return self._busy()
