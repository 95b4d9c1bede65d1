"""Served answers kept for the next draft, where the deployment asks for it: a file per orchestrator, written aside."""

from __future__ import annotations

import asyncio
import atexit
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from actors.errors import ConfigError
from actors.orchestrator.session import Session
from cluster.config.deployment import DeploymentConfig
from cluster.models import factory

if TYPE_CHECKING:
    from cluster.distillation.recorder import TrafficRecorder

logger = logging.getLogger("ray.serve")

FLUSH_S = 2.0
MOST_FILES = 256


class AnswerRecorder:
    """Takes ended sessions on the event loop; a thread writes them every FLUSH_S seconds."""

    def __init__(self, traffic: TrafficRecorder, lock: FileLock) -> None:
        self._traffic = traffic
        self._lock = lock
        self._writer: asyncio.Task[None] | None = None

    def keep(self, session: Session) -> None:
        """An answer has ended as it should. Never waits, never fails; what does not fit is left out and counted."""
        from cluster.distillation.recorder import Served

        start, resumed = session.prompt_tokens, len(session.request.committed)
        committed = tuple(session.tokens[start : start + resumed + session.delivered])
        self._traffic.offer(
            Served(
                session.request.owner,
                session.opening.prompt,
                committed,
                session.opening.sampling.temperature,
                () if resumed else tuple(session.alternatives or ()),
            )
        )
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        await asyncio.sleep(FLUSH_S)
        before = self._traffic.dropped
        await asyncio.to_thread(self._traffic.flush)
        if self._traffic.dropped > before:
            logger.warning("%d answers could not be recorded: is the disk full?", self._traffic.dropped - before)

    def close(self) -> None:
        """Write what is left."""
        if self._lock.is_locked:
            self._traffic.close()
            self._lock.release()


def answer_recorder(config: DeploymentConfig) -> AnswerRecorder | None:
    """The recorder of one orchestrator, None where none is wanted. Loads the target's tokenizer.

    Raises ConfigError when the secret or the folder cannot be used, or holds another target's answers.
    """
    recording = config.recording
    if recording is None:
        return None
    from cluster.distillation.recorder import TrafficRecorder

    try:
        secret = Path(recording.secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read recording.secret_file {recording.secret_file}: {error.strerror}", "recording.secret_file"
        ) from error
    path, lock = _free_file(Path(recording.folder))
    fingerprint = factory.target_fingerprint(config)
    traffic = TrafficRecorder(path, secret=secret, fingerprint=fingerprint, tokens=recording.tokens)
    recorder = AnswerRecorder(traffic, lock)
    atexit.register(recorder.close)
    return recorder


def _free_file(folder: Path) -> tuple[Path, FileLock]:
    """The first file that nobody writes, and the lock that says so: there are never more than orchestrators were."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_FILES):
            lock = FileLock(folder / f"answers-{number}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return folder / f"answers-{number}.db", lock
    except OSError as error:
        raise ConfigError(f"cannot record answers in {folder}: {error.strerror}", "recording.folder") from error
    raise ConfigError(f"{MOST_FILES} orchestrators record answers in {folder} already", "recording.folder")
