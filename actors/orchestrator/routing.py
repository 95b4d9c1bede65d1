"""Which replicas work on which sequences, in both tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors import telemetry
from actors.messages import ProposalBatch, VerificationBatch
from actors.orchestrator.draft_routing import DraftRouting
from actors.orchestrator.replica_pool import Directory
from actors.orchestrator.session import DraftConnection, Session, TargetConnection
from actors.orchestrator.target_routing import TargetRouting
from actors.settings import OrchestratorSettings
from actors.telemetry import Recorder


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
        owner: str,
        on_verifications: Callable[[TargetConnection, list[VerificationBatch]], None],
        on_proposals: Callable[[DraftConnection, list[ProposalBatch]], None],
    ) -> None:
        self._recorder = recorder
        self._targets = TargetRouting(
            directory=targets,
            sessions=sessions,
            settings=settings,
            recorder=recorder,
            clock=clock,
            owner=owner,
            on_results=on_verifications,
        )
        self._drafts = DraftRouting(
            directory=drafts,
            sessions=sessions,
            settings=settings,
            recorder=recorder,
            clock=clock,
            owner=owner,
            target_card=lambda: self._targets.card,
            on_results=on_proposals,
        )
        self.targets = self._targets.pool
        self.drafts = self._drafts.pool

    async def refresh(self) -> None:
        """Look who is in the tiers now."""
        await self.targets.refresh()
        if self._targets.card is not None:  # a draft can only be checked against a target
            await self.drafts.refresh()
        self._drafts.place_all()
        self._recorder.set(telemetry.READY_REPLICAS, len(self.targets.ready), tier="target")
        self._recorder.set(telemetry.READY_REPLICAS, len(self.drafts.ready), tier="draft")

    async def close(self) -> None:
        """End all links."""
        await self.targets.close()
        await self.drafts.close()

    def place(self, session: Session) -> None:
        """Open a new session at both tiers."""
        self._targets.place(session)
        self._drafts.place(session)

    def release(self, session: Session) -> None:
        """Give back what a session holds at both tiers."""
        self._targets.release(session)
        self._drafts.drop(session)

    def drop_draft(self, session: Session, notify: bool = True) -> None:
        """End the session at its draft, if it has one. notify: the draft does not know yet."""
        self._drafts.drop(session, notify)
