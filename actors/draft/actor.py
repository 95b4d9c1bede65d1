"""The draft actor: grows an outcome tree past each sequence's committed prefix and streams it out, unasked.

It is never waited for and never trusted: whatever it loses, repeats or gets wrong costs speed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from actors.algorithms.outcome_tree import Forest
from actors.engines.protocol import DraftModel, FeatureReader, ModelCard, ReportsFacts
from actors.errors import OverloadedError, RequestError
from actors.messages import Cancel, CommitUpdate, DraftMessage, Expansion, OpenSequence, ProposalBatch, prefix_key
from actors.replica.pass_metrics import StepMetrics
from actors.replica.replica import Replica
from actors.settings import DraftSettings
from actors.telemetry import Recorder
from actors.tracing import NO_TRACES, Tracer


class DraftActor(Replica[DraftMessage, ProposalBatch]):
    """A plain class; `ray.remote` is applied where it is placed."""

    def __init__(
        self,
        name: str,
        make_model: Callable[[], DraftModel],
        settings: DraftSettings,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        super().__init__(name, clock)
        self._tracer = tracer
        self._make_model = make_model
        self._settings = settings
        self._recorder = recorder
        self._owners: dict[str, str] = {}
        self._behind: dict[str, int] = {}
        self._unknown: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._frontier_empty = False

    def _prepare(self) -> ModelCard:
        self._model = self._make_model()
        self._forest = Forest(self._settings.tree)
        card = self._model.card()
        self._metrics = StepMetrics(self._recorder, card.slots)
        return card

    # -- mail ----------------------------------------------------------------------------------------------------

    def _take(self, link: str, mail: Sequence[DraftMessage]) -> None:
        self._frontier_empty = False
        for message in mail:
            match message:
                case CommitUpdate():
                    self._take_commit(link, message)
                case OpenSequence():
                    self._open(link, message)
                case Cancel():
                    self._close(message.sequences)
                    self._metrics.occupied(len(self._owners))

    def _open(self, link: str, opening: OpenSequence) -> None:
        name = opening.sequence
        self._close([name])
        try:
            self._model.open(opening)
        except (OverloadedError, RequestError):
            self._refused[name] = link
            return
        tokens = [*opening.prompt, *opening.committed]
        self._tracer.begin(name)
        self._owners[name] = link
        self._forest.open(name, prefix_key(tokens), len(tokens))

    def _take_commit(self, link: str, commit: CommitUpdate) -> None:
        name = commit.sequence
        progress = self._forest.commit(name, commit.position, commit.tokens)
        if progress == "unknown":
            self._unknown[name] = link
        elif progress == "behind":  # a commit before this one was lost
            self._behind[name] = self._forest.position(name)
        else:
            if progress:
                self._model.advance(name, commit.tokens[-progress:])
            if commit.features is not None and isinstance(self._model, FeatureReader):
                self._model.read_features(name, commit.features)
            self._forest.set_weight(name, 0.0 if commit.declined else 1.0)

    def _close(self, sequences: Sequence[str]) -> None:
        for name in sequences:
            self._unknown.pop(name, None)
            self._behind.pop(name, None)
            self._refused.pop(name, None)
            if self._owners.pop(name, None) is not None:
                self._tracer.end(name, length=self._forest.position(name))
                self._forest.close(name)
                self._model.close(name)

    def _drop_link(self, link: str) -> None:
        self._close([name for name, owner in self._owners.items() if owner == link])
        self._metrics.occupied(len(self._owners))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _pause(self) -> float | None:
        if self._behind or self._unknown or self._refused:
            return 0.0
        return None if self._frontier_empty or not self._owners else 0.0

    def _work(self) -> dict[str, ProposalBatch]:
        """One draft step: take the nodes most likely to be needed, expand them, send what came out."""
        requests = self._forest.frontier(self._settings.tree.width)
        self._frontier_empty = not requests
        started = self._clock()
        answers = self._model.expand(requests) if requests else []
        seconds = self._clock() - started
        self._forest.observe_step(len(requests), seconds)
        grown = self._forest.grow(answers)
        if requests:
            drafted = sum(map(len, grown.values()))  # of each node its first guess; alternatives come on top
            self._metrics.step_done(seconds=seconds, drafted=drafted, sequences=len(self._owners))
        return self._batches(grown, seconds, len(requests))

    def _batches(self, grown: dict[str, list[Expansion]], seconds: float, rows: int) -> dict[str, ProposalBatch]:
        behind, self._behind = self._behind, {}
        unknown, self._unknown = self._unknown, {}
        refused, self._refused = self._refused, {}
        ended = time.time()
        links = {self._owners[name] for name in grown if name in self._owners}
        links.update(self._owners[name] for name in behind if name in self._owners)
        links.update(unknown.values(), refused.values())
        return {
            link: ProposalBatch(
                source=self._name,
                expansions={name: e for name, e in grown.items() if self._owners.get(name) == link},
                behind={name: position for name, position in behind.items() if self._owners.get(name) == link},
                unknown=tuple(name for name, owner in unknown.items() if owner == link),
                refused=tuple(name for name, owner in refused.items() if owner == link),
                step_seconds=seconds,
                rows=rows,
                ended_at=ended,
            )
            for link in links
        }

    async def load(self) -> dict[str, float]:
        """What the autoscaling policy of this tier goes by (cluster.scaling.policies.DraftLoad); empty until the
        model is built."""
        return self._load() if self._card is not None else {}

    def _load(self) -> dict[str, float]:
        return {
            "sessions": float(len(self._owners)),
            "slots": float(self._settings.slots),
            "busy": self._busy_share.at(self._clock()),
        }

    def _facts(self) -> dict[str, float]:
        own = self._model.facts() if isinstance(self._model, ReportsFacts) else {}
        counts = self._model.feature_counts() if isinstance(self._model, FeatureReader) else {}
        return self._load() | self._metrics.facts() | own | counts

    def _busy(self) -> bool:
        return bool(self._owners) and not self._frontier_empty

    def _holding(self) -> bool:
        return bool(self._owners)
