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
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from actors import telemetry
from actors.errors import DeadlineError, EngineError, OutriderError, OverloadedError, RequestError, UnavailableError
from actors.messages import CommitUpdate, Delta, GenerationRequest, ProposalBatch, VerificationBatch, VerificationResult
from actors.orchestrator.admission import Admission
from actors.orchestrator.replica_pool import Directory, ReplicaPool
from actors.orchestrator.routing import Routing
from actors.orchestrator.session import DraftConnection, Session, TargetConnection
from actors.settings import OrchestratorSettings
from actors.telemetry import Recorder
from actors.tracing import NO_TRACES, Tracer

logger = logging.getLogger(__name__)


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
        keep: Callable[[Session], None] | None = None,
    ) -> None:
        """keep: is given every session whose answer has ended as it should, with its alternatives gathered."""
        self._tracer = tracer
        self._keep = keep
        self._admission = admission
        self._settings = settings
        self._recorder = recorder
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._routing = Routing(
            targets=targets,
            drafts=drafts,
            sessions=self._sessions,
            settings=settings,
            recorder=recorder,
            clock=clock,
            owner=f"orchestrator-{uuid.uuid4().hex[:8]}",
            on_verifications=self._on_verifications,
            on_proposals=self._on_proposals,
        )
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
        await self._routing.close()

    def check(self) -> None:
        """Raises EngineError when this orchestrator no longer looks for replicas."""
        if self._discovery is None or self._discovery.done():
            raise EngineError("the search for replicas has ended")

    def ready(self) -> bool:
        """Can a request be served now?"""
        return bool(self._routing.targets.ready)

    def status(self) -> dict[str, Any]:
        """Both tiers as this orchestrator sees them."""

        def tier(it: ReplicaPool[Any, Any]) -> dict[str, Any]:
            return {
                "replicas": {
                    name: {
                        "sequences": len(c.load),
                        "messages": c.messages,
                        "draining": c.draining,
                        **c.pulse.facts,
                    }
                    for name, c in it.ready.items()
                },
                "refused": dict(it.refused),
            }

        tiers = {"target": tier(self._routing.targets), "draft": tier(self._routing.drafts)}
        return {"sessions": len(self._sessions), **tiers}

    async def _discover(self) -> None:
        while True:
            try:
                await self._routing.refresh()
            except Exception as error:  # the directory may be restarting
                logger.warning("discovery failed, trying again: %s", error)
            await asyncio.sleep(self._settings.discovery_period_s)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
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
        if self._keep is not None:
            session.alternatives = []
        limit = request.timeout_s if request.timeout_s is not None else self._settings.request_timeout_s
        late = DeadlineError(f"the request took longer than {limit:g} s")
        left = max(limit - request.elapsed_s, 0.0)
        timer = asyncio.get_running_loop().call_later(left, session.events.put_nowait, late)
        try:
            self._routing.place(session)
            first = True
            while True:
                delta = await session.step()
                last = self._record(delta, started, last, first)
                first = False
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
        except Exception:
            outcome = "error"
            logger.exception("request %s failed", request.id)
            raise
        finally:
            timer.cancel()
            self._sessions.pop(request.id, None)
            self._routing.release(session)
            self._recorder.observe(telemetry.REQUEST_SECONDS, self._clock() - started)
            self._recorder.add(telemetry.REQUESTS, 1, outcome=outcome)
            self._tracer.end(request.id, outcome=outcome, passes=session.passes, moves=session.moves)
            if self._keep is not None and outcome in ("stop", "length"):
                self._keep(session)

    def _record(self, delta: Delta, started: float, last: float, first: bool) -> float:
        now = self._clock()
        if first:
            self._recorder.observe(telemetry.TTFT, now - started)
        elif delta.tokens:
            self._recorder.observe(telemetry.ITL, (now - last) / len(delta.tokens))
        self._recorder.add(telemetry.EMITTED, len(delta.tokens))
        return now

    # -- what comes in -------------------------------------------------------------------------------------------

    def _on_verifications(self, target: TargetConnection, batches: list[VerificationBatch]) -> None:
        """Commit what a target decided: to the session at once, to each draft in the same turn of the loop."""
        for batch in batches:
            self._recorder.observe(telemetry.LINK_SECONDS, max(0.0, time.time() - batch.ended_at), tier="target")
            for result in batch.results:
                session = self._sessions.get(result.sequence)
                if session is not None and session.target is target:
                    self._commit(session, result)

    def _commit(self, session: Session, result: VerificationResult) -> None:
        commit = session.commit(result)
        if session.ended and session.target is not None:
            session.target.load.discard(session.request.id)
            self._routing.drop_draft(session)
        elif commit is not None and session.draft is not None:
            session.draft.post(commit)

    def _on_proposals(self, draft: DraftConnection, batches: list[ProposalBatch]) -> None:
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
                    draft.post(CommitUpdate(name, position, tuple(session.tokens[position:])))
            for name in batch.unknown:
                session = self._sessions.get(name)
                if session is not None and session.draft is draft:
                    draft.post(session.resumed())
            for name in batch.refused:
                session = self._sessions.get(name)
                if session is not None and session.draft is draft:
                    self._routing.drop_draft(session, notify=False)
