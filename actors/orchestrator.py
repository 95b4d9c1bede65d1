"""The orchestrator: carries proposals from drafts to targets, and commits from targets to drafts and clients.

It decides nothing about tokens. Each message that comes in is taken apart by sequence and put together again by
replica, so that a target pass costs one message per pair of actors, whatever the number of sequences.

Losing a draft costs speed. Losing a target costs the time to prefill the committed prefix somewhere else; with the
coupled rule and at temperature 0 the tokens that follow are the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from actors import telemetry
from actors.admission import Admission
from actors.engines.protocol import ModelCard
from actors.errors import DeadlineError, EngineError, OutriderError, OverloadedError, RequestError, UnavailableError
from actors.messages import (
    Cancel,
    Commit,
    Delta,
    DraftMessage,
    GenerationRequest,
    OfferBatch,
    TargetMessage,
    Verdict,
    VerdictBatch,
)
from actors.session import DraftConnection, Session, TargetConnection
from actors.settings import OrchestratorSettings
from actors.telemetry import Recorder
from actors.tier import Directory, Tier
from actors.tracing import NO_TRACES, Tracer

logger = logging.getLogger(__name__)

MOST_MOVES = 5
"""A sequence that has seen so many targets die may be what kills them; it ends with an error."""


class Orchestrator:
    """Serves requests over two tiers. Plain asyncio; all state belongs to one event loop."""

    def __init__(
        self,
        *,
        targets: Directory,
        drafts: Directory,
        admission: Admission,
        settings: OrchestratorSettings,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._tracer = tracer
        self._admission = admission
        self._settings = settings
        self._recorder = recorder
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        name = f"orchestrator-{uuid.uuid4().hex[:8]}"
        self._targets: Tier[TargetMessage, VerdictBatch] = Tier(
            targets, name, settings, clock, self._check_target, self._on_verdicts, self._place_all, self._target_lost
        )
        self._drafts: Tier[DraftMessage, OfferBatch] = Tier(
            drafts, name, settings, clock, self._check_draft, self._on_offers, self._draft_ready, self._draft_lost
        )
        self._target_card: ModelCard | None = None
        self._discovery: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to look for replicas."""
        self._discovery = asyncio.create_task(self._discover())

    async def stop(self) -> None:
        """End all links. Requests that are still running end with an error."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
        for session in self._sessions.values():
            session.events.put_nowait(UnavailableError("the server is shutting down"))
        await self._targets.close()
        await self._drafts.close()

    def ready(self) -> bool:
        """Can a request be served now?"""
        return bool(self._targets.ready)

    def status(self) -> dict[str, Any]:
        """Both tiers as this orchestrator sees them."""

        def tier(it: Tier[Any, Any]) -> dict[str, Any]:
            return {
                "replicas": {name: {"sequences": len(c.load), "messages": c.messages} for name, c in it.ready.items()},
                "refused": dict(it.refused),
            }

        return {"sessions": len(self._sessions), "target": tier(self._targets), "draft": tier(self._drafts)}

    async def _discover(self) -> None:
        while True:
            try:
                await self._targets.refresh()
                if self._target_card is not None:  # a draft can only be checked against a target
                    await self._drafts.refresh()
                self._place_drafts()
                self._recorder.set(telemetry.READY_REPLICAS, len(self._targets.ready), tier="target")
                self._recorder.set(telemetry.READY_REPLICAS, len(self._drafts.ready), tier="draft")
            except Exception as error:  # the directory may be restarting
                logger.warning("discovery failed, trying again: %s", error)
            await asyncio.sleep(self._settings.discovery_period_s)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Serve one request.

        Raises RequestError before the first Delta for anything refused, OverloadedError when the queues are full,
        UnavailableError when no target can be had, DeadlineError when time is up. However it ends, also by
        cancellation, everything that the sequence holds is given back.
        """
        try:
            session = await self._admission.admit(request)
        except RequestError as error:
            self._recorder.add(telemetry.REFUSED, 1, reason=error.code or "invalid")
            raise
        self._recorder.add(telemetry.PROMPT_TOKENS, session.prompt_tokens)
        started = last = self._clock()
        outcome = "cancelled"
        self._tracer.begin(request.id)
        self._sessions[request.id] = session
        limit = request.timeout_s if request.timeout_s is not None else self._settings.request_timeout_s
        late = DeadlineError(f"the request took longer than {limit:g} s")
        timer = asyncio.get_running_loop().call_later(limit, session.events.put_nowait, late)
        try:
            self._place(session)
            self._place_draft(session)
            while True:
                event = await session.events.get()
                if isinstance(event, Exception):
                    raise event
                delta = session.deliver(event)
                last = self._record(delta, started, last, first=session.passes == 1)
                if delta.finish is not None:
                    outcome = delta.finish
                yield delta
                if delta.finish is not None:
                    return
        except OutriderError as error:
            outcome = "error"
            if isinstance(error, OverloadedError | UnavailableError):
                self._recorder.add(telemetry.REFUSED, 1, reason=error.code or "error")
            raise
        finally:
            timer.cancel()
            self._release(session)
            self._recorder.observe(telemetry.REQUEST_SECONDS, self._clock() - started)
            self._recorder.add(telemetry.REQUESTS, 1, outcome=outcome)
            self._tracer.end(request.id, outcome=outcome, passes=session.passes, moves=session.moves)

    def _record(self, delta: Delta, started: float, last: float, first: bool) -> float:
        now = self._clock()
        if first:
            self._recorder.observe(telemetry.TTFT, now - started)
        elif delta.tokens:
            self._recorder.observe(telemetry.ITL, (now - last) / len(delta.tokens))
        self._recorder.add(telemetry.EMITTED, len(delta.tokens))
        return now

    def _release(self, session: Session) -> None:
        name = session.request.id
        self._sessions.pop(name, None)
        if session.target is not None:
            session.target.load.discard(name)
            if not session.ended:
                session.target.post(Cancel((name,)))
        if session.draft is not None:
            session.draft.load.discard(name)
            session.draft.post(Cancel((name,)))
        session.target = session.draft = None

    # -- placing -------------------------------------------------------------------------------------------------

    def _place(self, session: Session) -> None:
        """Open the sequence at the least loaded target; without one it waits for `_place_all`."""
        target = self._targets.pick()
        if target is None:
            wait = self._settings.unavailable_timeout_s
            asyncio.get_running_loop().call_later(wait, self._give_up, session)
            return
        self._open_at(target, session)

    def _open_at(self, target: TargetConnection, session: Session) -> None:
        session.target = target
        target.load.add(session.request.id)
        target.post(session.resumed())

    def _give_up(self, session: Session) -> None:
        if session.target is None and session.request.id in self._sessions:
            session.events.put_nowait(UnavailableError("no target replica is available"))

    def _place_all(self, target: TargetConnection) -> None:
        """A target has come: it takes the sequences that wait for one, and those that wait for a slot elsewhere."""
        self._target_card = target.card
        for session in list(self._sessions.values()):
            if session.target is None and not session.ended:
                self._place(session)
        for other in self._targets.ready.values():
            queued = [self._sessions[name] for name in other.load if not self._sessions[name].passes]
            spare = min(len(other.load) - other.card.slots, (len(other.load) - len(target.load)) // 2)
            for session in queued[: max(spare, 0)]:
                other.load.discard(session.request.id)
                other.post(Cancel((session.request.id,)))
                self._open_at(target, session)

    def _place_draft(self, session: Session) -> None:
        if session.draft is not None or session.ended or not session.opening.sampling.speculation:
            return
        draft = self._drafts.pick()
        if draft is None or len(draft.load) >= draft.card.slots:
            return
        session.draft = draft
        draft.load.add(session.request.id)
        draft.post(session.resumed())

    def _place_drafts(self) -> None:
        for session in self._sessions.values():
            self._place_draft(session)

    def _draft_ready(self, draft: DraftConnection) -> None:
        """A draft has come: sequences without one go there, and it takes its share from the fullest."""
        self._place_drafts()
        while True:
            fullest = max(self._drafts.ready.values(), key=lambda c: len(c.load))
            if len(fullest.load) - len(draft.load) < 2:
                return
            session = self._sessions[next(iter(fullest.load))]
            self._drop_draft(session, tell=True)
            self._place_draft(session)

    def _drop_draft(self, session: Session, tell: bool) -> None:
        if session.draft is not None:
            session.draft.load.discard(session.request.id)
            if tell:
                session.draft.post(Cancel((session.request.id,)))
            session.draft = None

    # -- what comes in -------------------------------------------------------------------------------------------

    def _on_verdicts(self, target: TargetConnection, batches: list[VerdictBatch]) -> None:
        """Commit what a target decided: to the session at once, to each draft in the same turn of the loop."""
        for batch in batches:
            self._recorder.observe(telemetry.LINK_SECONDS, max(0.0, time.time() - batch.ended_at), tier="target")
            for verdict in batch.verdicts:
                session = self._sessions.get(verdict.sequence)
                if session is not None and session.target is target:
                    self._commit(session, verdict)

    def _commit(self, session: Session, verdict: Verdict) -> None:
        commit = session.commit(verdict)
        if session.ended and session.target is not None:
            session.target.load.discard(session.request.id)
            self._drop_draft(session, tell=True)
        elif commit is not None and session.draft is not None:
            session.draft.post(commit)

    def _on_offers(self, draft: DraftConnection, batches: list[OfferBatch]) -> None:
        """Pass proposals on to the targets in charge, and answer what the draft asks for."""
        for batch in batches:
            self._recorder.observe(telemetry.LINK_SECONDS, max(0.0, time.time() - batch.ended_at), tier="draft")
            parts: dict[TargetConnection, dict[str, Any]] = {}
            for name, expansions in batch.expansions.items():
                session = self._sessions.get(name)
                if session is not None and session.draft is draft and session.target is not None:
                    parts.setdefault(session.target, {})[name] = expansions
            for target, part in parts.items():
                target.post(replace(batch, expansions=part, behind={}, unknown=(), refused=()))
            for name, position in batch.behind.items():
                session = self._sessions.get(name)
                if session is not None and session.draft is draft:
                    draft.post(Commit(name, position, tuple(session.tokens[position:])))
            for name in batch.unknown:
                session = self._sessions.get(name)
                if session is not None and session.draft is draft:
                    draft.post(session.resumed())
            for name in batch.refused:
                session = self._sessions.get(name)
                if session is not None and session.draft is draft:
                    self._drop_draft(session, tell=False)

    # -- losses --------------------------------------------------------------------------------------------------

    def _target_lost(self, target: TargetConnection) -> None:
        """Its sequences go on from their committed prefixes elsewhere; their drafts do not notice."""
        for name in list(target.load):
            session = self._sessions.get(name)
            if session is None or session.target is not target or session.ended:
                continue
            session.target = None
            session.moves += 1
            self._recorder.add(telemetry.MOVES, 1, tier="target")
            if session.moves > MOST_MOVES:
                session.events.put_nowait(EngineError(f"{session.moves} targets were lost under this request"))
            else:
                self._place(session)

    def _draft_lost(self, draft: DraftConnection) -> None:
        for name in list(draft.load):
            session = self._sessions.get(name)
            if session is not None and session.draft is draft:
                self._recorder.add(telemetry.MOVES, 1, tier="draft")
                self._drop_draft(session, tell=False)
                self._place_draft(session)

    def _check_target(self, target: TargetConnection) -> str | None:
        """A second target must serve the very model that the first one serves."""
        known = self._target_card
        if known is not None and (known.name, known.fingerprint) != (target.card.name, target.card.fingerprint):
            return f"it serves {target.card.name}, the tier serves {known.name}"
        return None

    def _check_draft(self, draft: DraftConnection) -> str | None:
        assert self._target_card is not None  # drafts are only met after a target
        return mismatch(self._target_card, draft.card)


def mismatch(target: ModelCard, draft: ModelCard) -> str | None:
    """Why `draft` cannot propose for `target`, or None. An empty fingerprint fits any vocabulary of the same size."""
    if draft.vocabulary and draft.vocabulary != target.vocabulary:
        return (
            f"the draft's vocabulary has {draft.vocabulary} ids, the target's {target.vocabulary}: "
            "use a draft made for this target's tokenizer"
        )
    if draft.fingerprint and target.fingerprint and draft.fingerprint != target.fingerprint:
        return (
            "draft and target have vocabularies of the same size but their ids stand for different tokens: "
            "use a draft made for this target's tokenizer"
        )
    return None
