"""Which replicas work on which sequences: on opening, when a replica comes, goes or is about to go.

A sequence is at one target and at most one draft. Losing a draft costs speed. Losing a target costs the time to
prefill the committed prefix somewhere else; with the coupled rule and at temperature 0 the tokens that follow are the
same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from actors import telemetry
from actors.engines.protocol import ModelCard
from actors.errors import EngineError, UnavailableError
from actors.messages import Cancel, DraftMessage, ProposalBatch, TargetMessage, VerificationBatch
from actors.orchestrator.replica_pool import Directory, ReplicaPool
from actors.orchestrator.session import DraftConnection, Session, TargetConnection
from actors.settings import OrchestratorSettings
from actors.telemetry import Recorder

MOST_MOVES = 5
"""A sequence that has seen so many targets die may be what kills them; it ends with an error."""


class Routing:
    """Keeps both tiers, and every session of `sessions` at one target and, where one has room, at one draft.

    sessions: the orchestrator's, by the ids of their requests; read here, never written.
    """

    def __init__(
        self,
        *,
        targets: Directory,
        drafts: Directory,
        sessions: Mapping[str, Session],
        settings: OrchestratorSettings,
        recorder: Recorder,
        clock: Callable[[], float],
        name: str,
        on_verdicts: Callable[[TargetConnection, list[VerificationBatch]], None],
        on_offers: Callable[[DraftConnection, list[ProposalBatch]], None],
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._recorder = recorder
        self._target_card: ModelCard | None = None
        self.targets: ReplicaPool[TargetMessage, VerificationBatch] = ReplicaPool(
            targets,
            name,
            settings,
            clock,
            self._check_target,
            on_verdicts,
            on_ready=self._target_ready,
            on_draining=self._target_draining,
            on_lost=self._target_lost,
        )
        self.drafts: ReplicaPool[DraftMessage, ProposalBatch] = ReplicaPool(
            drafts,
            name,
            settings,
            clock,
            self._check_draft,
            on_offers,
            on_ready=self._draft_ready,
            on_draining=self._draft_draining,
            on_lost=self._draft_lost,
        )

    async def refresh(self) -> None:
        """Look who is in the tiers now."""
        await self.targets.refresh()
        if self._target_card is not None:  # a draft can only be checked against a target
            await self.drafts.refresh()
        self._place_drafts()
        self._recorder.set(telemetry.READY_REPLICAS, len(self.targets.ready), tier="target")
        self._recorder.set(telemetry.READY_REPLICAS, len(self.drafts.ready), tier="draft")

    async def close(self) -> None:
        """End all links."""
        await self.targets.close()
        await self.drafts.close()

    # -- sessions ------------------------------------------------------------------------------------------------

    def place(self, session: Session) -> None:
        """Open a new session at both tiers."""
        self._place_target(session)
        self._place_draft(session)

    def release(self, session: Session) -> None:
        """Give back what a session holds at both tiers."""
        name = session.request.id
        if session.target is not None:
            session.target.load.discard(name)
            if not session.ended:
                session.target.post(Cancel((name,)))
            session.target = None
        self.drop_draft(session)

    def drop_draft(self, session: Session, tell: bool = True) -> None:
        """End the session at its draft, if it has one. tell: the draft does not know yet."""
        if session.draft is not None:
            session.draft.load.discard(session.request.id)
            if tell:
                session.draft.post(Cancel((session.request.id,)))
            session.draft = None

    # -- targets -------------------------------------------------------------------------------------------------

    def _place_target(self, session: Session) -> None:
        """Open the sequence at the least loaded target; without one it waits for `_target_ready`."""
        target = self.targets.pick()
        if target is None:
            wait = self._settings.unavailable_timeout_s
            asyncio.get_running_loop().call_later(wait, self._give_up, session, session.moves)
            return
        self._open_at(target, session)

    def _open_at(self, target: TargetConnection, session: Session) -> None:
        session.target = target
        target.load.add(session.request.id)
        target.post(session.resumed())

    def _give_up(self, session: Session, moves: int) -> None:
        """The wait that began after `moves` moves is over."""
        if session.target is None and session.moves == moves and session.request.id in self._sessions:
            session.events.put_nowait(UnavailableError("no target replica is available"))

    def _target_ready(self, target: TargetConnection) -> None:
        """A target has come: it takes the sequences that wait for one, and those that wait for a slot elsewhere."""
        self._target_card = target.card
        for session in list(self._sessions.values()):
            if session.target is None and not session.ended:
                self._place_target(session)
        for other in self.targets.ready.values():
            queued = [self._sessions[name] for name in other.load if not self._sessions[name].passes]
            spare = min(len(other.load) - other.card.slots, (len(other.load) - len(target.load)) // 2)
            for session in queued[: max(spare, 0)]:
                self._move(session, other, target)

    def _move(self, session: Session, source: TargetConnection, target: TargetConnection) -> None:
        source.load.discard(session.request.id)
        source.post(Cancel((session.request.id,)))
        self._open_at(target, session)

    def _target_draining(self, target: TargetConnection) -> None:
        """Sequences that it has not begun go elsewhere; those that run may finish, and move if they are still there
        when it goes."""
        for session in [self._sessions[name] for name in target.load if not self._sessions[name].passes]:
            other = self.targets.pick()
            if other is None or other.draining:
                return
            self._move(session, target, other)

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
                self._place_target(session)

    def _check_target(self, target: TargetConnection) -> str | None:
        """A second target must serve the very model that the first one serves."""
        known = self._target_card
        if known is not None and (known.name, known.fingerprint) != (target.card.name, target.card.fingerprint):
            return f"it serves {target.card.name}, the tier serves {known.name}"
        return None

    # -- drafts --------------------------------------------------------------------------------------------------

    def _place_draft(self, session: Session) -> None:
        if session.draft is not None or session.ended or not session.opening.sampling.speculation:
            return
        draft = self.drafts.pick()
        if draft is None or draft.draining or len(draft.load) >= draft.card.slots:
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
            fullest = max(self.drafts.ready.values(), key=lambda c: len(c.load))
            if len(fullest.load) - len(draft.load) < 2:
                return
            session = self._sessions[next(iter(fullest.load))]
            self.drop_draft(session)
            self._place_draft(session)

    def _draft_draining(self, draft: DraftConnection) -> None:
        """Its sequences are handed to other drafts, which catch up by one prefill; what has no room elsewhere stays."""
        for session in [self._sessions[name] for name in draft.load]:
            other = self.drafts.pick()
            if other is None or other.draining or len(other.load) >= other.card.slots:
                return
            self.drop_draft(session)
            self._place_draft(session)

    def _draft_lost(self, draft: DraftConnection) -> None:
        for name in list(draft.load):
            session = self._sessions.get(name)
            if session is not None and session.draft is draft:
                self._recorder.add(telemetry.MOVES, 1, tier="draft")
                self.drop_draft(session, tell=False)
                self._place_draft(session)

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
