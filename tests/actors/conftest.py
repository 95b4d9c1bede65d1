"""Both tiers and an orchestrator in one process: the real actors over local peers, with chaos where a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.draft.actor import DraftActor
from actors.engines.emulated.engines import EmulatedDraft, EmulatedTarget
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.engines.protocol import DraftModel, TargetModel
from actors.messages import GenerationRequest
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from actors.orchestrator.replica_pool import StaticDirectory
from actors.orchestrator.session import Session
from actors.settings import DraftSettings, OrchestratorSettings, SamplingSettings, TargetSettings
from actors.target.actor import TargetActor
from actors.telemetry import MemoryRecorder
from actors.text.emulated_codec import EmulatedCodec
from actors.transport.links import LocalPeer, Peer
from benchmarks.support.chaos_link import ChaosLink, ChaosSettings


class CuttablePeer:
    """A local peer that can die (every call and stream raises) or freeze (nothing ever answers)."""

    def __init__(self, target: object) -> None:
        self._peer = LocalPeer(target)
        self.dead = asyncio.Event()
        self.frozen = False

    async def call(self, method: str, *args: Any) -> Any:
        if self.dead.is_set():
            raise ConnectionError("dead")
        while self.frozen:
            await asyncio.sleep(3600)
        return await self._peer.call(method, *args)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        stream = self._peer.stream(method, *args)
        while True:
            step = asyncio.ensure_future(anext(stream))
            death = asyncio.ensure_future(self.dead.wait())
            try:
                await asyncio.wait({step, death}, return_when=asyncio.FIRST_COMPLETED)
            finally:  # also when whoever reads this is cancelled: the step's end would be an exception that nobody saw
                death.cancel()
                if self.dead.is_set() or not step.done():
                    step.cancel()
                    await asyncio.gather(step, return_exceptions=True)
            if self.dead.is_set():
                raise ConnectionError("dead")
            try:
                item = step.result()
            except StopAsyncIteration:
                return
            while self.frozen:
                await asyncio.sleep(3600)
            yield item

    def close(self, link: str | None = None) -> None:
        """There is nothing to give back."""


class ChaosPeer:
    """Delays, reorders, drops and repeats mail to, and results of, a draft. Openings are only delayed."""

    def __init__(self, target: object, settings: ChaosSettings) -> None:
        self._peer = LocalPeer(target)
        self._settings = settings
        self._mail: ChaosLink[Any] | None = None
        self.ended = False
        """Mail that is still under way is lost."""

    async def call(self, method: str, *args: Any) -> Any:
        if method != "deliver":
            return await self._peer.call(method, *args)
        link, items = args
        if self._mail is None:
            self._mail = ChaosLink(self._deliver, self._settings)
        for item in items:
            self._mail((link, item))
        return None

    def _deliver(self, mail: tuple[str, Any]) -> None:
        if self.ended:
            return
        task = asyncio.ensure_future(self._peer.call("deliver", mail[0], [mail[1]]))
        task.add_done_callback(lambda t: t.exception())

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        link: ChaosLink[Any] = ChaosLink(arrived.put_nowait, self._settings)

        async def pump() -> None:
            async for items in self._peer.stream(method, *args):
                for item in items:
                    link([item])

        task = asyncio.create_task(pump())
        try:
            while True:
                yield await arrived.get()
        finally:
            task.cancel()

    def close(self, link: str | None = None) -> None:
        """There is nothing to give back."""


@dataclass
class Local:
    """A running deployment in this process."""

    orchestrator: Orchestrator
    recorder: MemoryRecorder
    targets: StaticDirectory
    drafts: StaticDirectory
    actors: dict[str, Any] = field(default_factory=dict)

    async def tokens(self, request: GenerationRequest) -> list[int]:
        """All tokens of one answer."""
        return [token async for delta in self.orchestrator.generate(request) for token in delta.tokens]


Started = Callable[..., Any]


@asynccontextmanager
async def deployment(
    *,
    targets: int = 1,
    drafts: int = 1,
    target_spec: TargetSpec | None = None,
    draft_spec: DraftSpec | None = None,
    target_settings: TargetSettings | None = None,
    draft_settings: DraftSettings | None = None,
    settings: OrchestratorSettings | None = None,
    wrap_target: Callable[[object], Peer] = LocalPeer,
    wrap_draft: Callable[[object], Peer] = LocalPeer,
    make_target: Callable[[], TargetModel] | None = None,
    make_draft: Callable[[], DraftModel] | None = None,
    admission: Admission | None = None,
    keep: Callable[[Session], None] | None = None,
) -> AsyncIterator[Local]:
    """Both tiers, on emulated engines that are fast enough for tests unless others are given."""
    tspec = target_spec or TargetSpec(pass_ms=2, token_ms=0.02, prompt_token_ms=0)
    dspec = draft_spec or DraftSpec(step_ms=0.3, row_ms=0.01, prompt_token_ms=0)
    tset, dset = target_settings or TargetSettings(), draft_settings or DraftSettings()
    recorder = MemoryRecorder()
    actors: dict[str, Any] = {}
    target_model = make_target or (lambda: EmulatedTarget(tspec, tset))
    draft_model = make_draft or (lambda: EmulatedDraft(dspec, dset))
    for i in range(targets):
        actors[f"target-{i}"] = TargetActor(f"target-{i}", target_model, tset, recorder)
    for i in range(drafts):
        actors[f"draft-{i}"] = DraftActor(f"draft-{i}", draft_model, dset, recorder)
    for actor in actors.values():
        actor.start()
    target_directory = StaticDirectory({n: wrap_target(a) for n, a in actors.items() if n.startswith("target")})
    draft_directory = StaticDirectory({n: wrap_draft(a) for n, a in actors.items() if n.startswith("draft")})
    vocabulary = tspec.language.vocabulary
    orchestrator = Orchestrator(
        targets=target_directory,
        drafts=draft_directory,
        admission=admission or Admission(EmulatedCodec(vocabulary), vocabulary, tset.context),
        settings=settings or OrchestratorSettings(discovery_period_s=0.02),
        recorder=recorder,
        keep=keep,
    )
    await orchestrator.start()
    try:
        yield Local(orchestrator, recorder, target_directory, draft_directory, actors)
    finally:
        await orchestrator.stop()
        for peer in (*target_directory.peers.values(), *draft_directory.peers.values()):
            if isinstance(peer, ChaosPeer):
                peer.ended = True
        await asyncio.gather(*(actor.stop() for actor in actors.values()))


@pytest.fixture
def start() -> Started:
    """`async with start(...) as local:`"""
    return deployment


@pytest.fixture
def cuttable() -> type[CuttablePeer]:
    return CuttablePeer


@pytest.fixture
def chaotic() -> Callable[[ChaosSettings], Callable[[object], ChaosPeer]]:
    return lambda settings: lambda target: ChaosPeer(target, settings)


def make_request(name: str, prompt: tuple[int, ...], **sampling: Any) -> GenerationRequest:
    sampling.setdefault("max_tokens", 40)
    sampling.setdefault("temperature", 0.0)
    return GenerationRequest(id=name, sampling=SamplingSettings(**sampling), tokens=prompt)


@pytest.fixture
def request_for() -> Callable[..., GenerationRequest]:
    return make_request
