"""Which targets work on which sequences: on opening, when a target comes, goes or is about to go.

A sequence is at one target. Losing it costs the time to prefill the committed prefix somewhere else; with the coupled
rule and at temperature 0 the tokens that follow are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from actors import telemetry
from actors.engines.protocol import ModelCard
from actors.errors import EngineError, UnavailableError
from actors.messages import Cancel, TargetMessage, VerificationBatch
from actors.orchestrator.replica_pool import Directory, ReplicaPool
from actors.orchestrator.session import Session, TargetConnection
from actors.settings import OrchestratorSettings
from actors.telemetry import Recorder

MOST_MOVES = 5
"""A sequence that has seen so many targets die may be what kills them; it ends with an error."""


class TargetRouting:
    """Keeps the target tier, and every session at one target. Hears of its connections (replica_pool.PoolListener).

    sessions: the orchestrator's, by the ids of their requests; read here, never written.
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
        on_results: Callable[[TargetConnection, list[VerificationBatch]], None],
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._recorder = recorder
        self.on_results = on_results
        self.card: ModelCard | None = None
        """What this tier serves; None before a target was ready."""
        self.pool: ReplicaPool[TargetMessage, VerificationBatch] = ReplicaPool(
            directory, owner=owner, settings=settings, clock=clock, listener=self
        )

    # -- sessions ------------------------------------------------------------------------------------------------

    def place(self, session: Session) -> None:
        """Open the sequence at the least loaded target; without one it waits for `on_ready`."""
        target = self.pool.pick()
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

    def release(self, session: Session) -> None:
        """Give back what a session holds at its target."""
        if session.target is not None:
            session.target.load.discard(session.request.id)
            if not session.ended:
                session.target.post(Cancel((session.request.id,)))
            session.target = None

    # -- targets -------------------------------------------------------------------------------------------------

    def on_ready(self, connection: TargetConnection) -> None:
        """A target has come: it takes the sequences that wait for one, and those that wait for a slot elsewhere."""
        target = connection
        self.card = target.card
        for session in list(self._sessions.values()):
            if session.target is None and not session.ended:
                self.place(session)
        for other in self.pool.ready.values():
            queued = [self._sessions[name] for name in other.load if not self._sessions[name].passes]
            spare = min(len(other.load) - other.card.slots, (len(other.load) - len(target.load)) // 2)
            for session in queued[: max(spare, 0)]:
                self._move(session, other, target)

    def _move(self, session: Session, source: TargetConnection, target: TargetConnection) -> None:
        source.load.discard(session.request.id)
        source.post(Cancel((session.request.id,)))
        self._open_at(target, session)

    def on_draining(self, connection: TargetConnection) -> None:
        """Sequences that it has not begun go elsewhere; those that run may finish, and move if they are still there
        when it goes."""
        for session in [self._sessions[name] for name in connection.load if not self._sessions[name].passes]:
            other = self.pool.pick()
            if other is None or other.draining:
                return
            self._move(session, connection, other)

    def on_lost(self, connection: TargetConnection, error: BaseException) -> None:
        """Its sequences go on from their committed prefixes elsewhere; their drafts do not notice."""
        for name in list(connection.load):
            session = self._sessions.get(name)
            if session is None or session.target is not connection or session.ended:
                continue
            session.target = None
            session.moves += 1
            self._recorder.add(telemetry.MOVES, 1, tier="target")
            if session.moves > MOST_MOVES:
                session.events.put_nowait(EngineError(f"{session.moves} targets were lost under this request"))
            else:
                self.place(session)

    def check(self, connection: TargetConnection) -> str | None:
        """A second target must serve the very model that the first one serves."""
        known = self.card
        if known is not None and (known.name, known.fingerprint) != (connection.card.name, connection.card.fingerprint):
            return f"it serves {connection.card.name}, the tier serves {known.name}"
        return None
