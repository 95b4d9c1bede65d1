"""Which drafts work on which sequences. A sequence is at one draft, or at none; losing it costs speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors import telemetry
from actors.engines.protocol import ModelCard
from actors.messages import Cancel, DraftMessage, ProposalBatch
from actors.orchestrator.replica_pool import Directory, ReplicaPool
from actors.orchestrator.session import DraftConnection, Session
from actors.settings import OrchestratorSettings
from actors.telemetry import Recorder


class DraftRouting:
    """Keeps the draft tier, and sessions at one draft each, where one has room. Hears of its connections
    (replica_pool.PoolListener).

    sessions: the orchestrator's, by the ids of their requests; read here, never written. target_card: what drafts are
    checked against; they are only met once it is known.
    """

    def __init__(
        self,
        *,
        directory: Directory,
        sessions: Mapping[str, Session],
        settings: OrchestratorSettings,
        recorder: Recorder,
        clock: Callable[[], float],
        owner: str,
        target_card: Callable[[], ModelCard | None],
        on_results: Callable[[DraftConnection, list[ProposalBatch]], None],
    ) -> None:
        self._sessions = sessions
        self._recorder = recorder
        self._target_card = target_card
        self.on_results = on_results
        self.pool: ReplicaPool[DraftMessage, ProposalBatch] = ReplicaPool(
            directory, owner=owner, settings=settings, clock=clock, listener=self
        )

    # -- sessions ------------------------------------------------------------------------------------------------

    def place(self, session: Session) -> None:
        """Open the sequence at the least loaded draft, if one has room and it has none and wants one."""
        if session.draft is not None or session.ended or not session.opening.sampling.speculation:
            return
        draft = self.pool.pick()
        if draft is None or draft.draining or len(draft.load) >= draft.card.slots:
            return
        session.draft = draft
        draft.load.add(session.request.id)
        draft.post(session.resumed())

    def place_all(self) -> None:
        """Find drafts for the sessions that have none."""
        for session in self._sessions.values():
            self.place(session)

    def drop(self, session: Session, notify: bool = True) -> None:
        """End the session at its draft, if it has one. notify: the draft does not know yet."""
        if session.draft is not None:
            session.draft.load.discard(session.request.id)
            if notify:
                session.draft.post(Cancel((session.request.id,)))
            session.draft = None

    # -- drafts --------------------------------------------------------------------------------------------------

    def on_ready(self, connection: DraftConnection) -> None:
        """A draft has come: sequences without one go there, and it takes its share from the fullest."""
        self.place_all()
        while True:
            fullest = max(self.pool.ready.values(), key=lambda c: len(c.load))
            if len(fullest.load) - len(connection.load) < 2:
                return
            session = self._sessions[next(iter(fullest.load))]
            self.drop(session)
            self.place(session)

    def on_draining(self, connection: DraftConnection) -> None:
        """Its sequences are handed to other drafts, which catch up by one prefill; what has no room elsewhere stays."""
        for session in [self._sessions[name] for name in connection.load]:
            other = self.pool.pick()
            if other is None or other.draining or len(other.load) >= other.card.slots:
                return
            self.drop(session)
            self.place(session)

    def on_lost(self, connection: DraftConnection, error: BaseException) -> None:
        """Its sequences go to other drafts, as far as there is room; those that find none are decoded plainly."""
        for name in list(connection.load):
            session = self._sessions.get(name)
            if session is not None and session.draft is connection:
                self._recorder.add(telemetry.MOVES, 1, tier="draft")
                self.drop(session, notify=False)
                self.place(session)

    def check(self, connection: DraftConnection) -> str | None:
        """Why a draft cannot propose for this tier's target."""
        card = self._target_card()
        return mismatch(card, connection.card) if card is not None else "no target is known yet"


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
    if draft.features and draft.features != target.features:
        told = "fused in another way than it was trained with" if target.features else "not at all"
        return f"the draft reads the target's hidden states, and gets them {told}: set target and draft up together"
    return None
