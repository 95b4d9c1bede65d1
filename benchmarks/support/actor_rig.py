"""A rig for measurements: targets, drafts and one orchestrator as Ray actors (or in this process), and a client.

The client runs in the orchestrator's process. What carries answers to HTTP clients is measured elsewhere; here it
would only take the cores that the emulated hardware needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.engines.protocol import DraftModel, TargetModel
from actors.errors import UnavailableError
from actors.messages import GenerationRequest, Usage
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from actors.orchestrator.replica_pool import StaticDirectory
from actors.settings import OrchestratorSettings
from actors.telemetry import MemoryRecorder
from actors.transport.links import LocalPeer, Peer, RayPeer
from actors.transport.socket import SocketPeer
from benchmarks.support.timed_actors import ProbedDraft, ProbedTarget, ReplicaNotes
from cluster.config.deployment import DeploymentConfig
from cluster.models.factory import draft_model, pin, target_model, text_facts

START_LIMIT_S = 120.0


@dataclass(frozen=True)
class RigPlan:
    """What to build: a deployment, and how much slower its links are than they would be."""

    config: DeploymentConfig
    link_delay_ms: float = 0.0
    wires: bool = True
    """False: mail and results go through Ray."""

    @property
    def targets(self) -> int:
        """Target replicas."""
        return self.config.target.replicas

    @property
    def drafts(self) -> int:
        """Draft replicas."""
        return 0 if self.config.draft.kind == "none" else self.config.draft.replicas


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. arrivals: when tokens came, and how many at once."""

    id: str
    prompt: tuple[int, ...]
    seed: int
    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What one run produced: answers, and the notes of every replica."""

    answers: list[Answer]
    targets: list[ReplicaNotes]
    drafts: list[ReplicaNotes]
    orchestrator_messages: int
    """Calls that the orchestrator made to replicas."""


class Station:
    """The orchestrator and its client. Methods run on one event loop."""

    def __init__(self, plan: RigPlan, targets: dict[str, Peer], drafts: dict[str, Peer]) -> None:
        self._wanted = (len(targets), len(drafts))
        facts = text_facts(plan.config)
        self._orchestrator = Orchestrator(
            targets=StaticDirectory(targets),
            drafts=StaticDirectory(drafts),
            admission=Admission(facts.codec, facts.vocabulary, facts.context),
            settings=OrchestratorSettings(discovery_period_s=0.1, request_timeout_s=3600.0),
            recorder=MemoryRecorder(),
        )

    async def start(self) -> None:
        """Returns when every replica is at work. Raises UnavailableError when that takes too long."""
        await self._orchestrator.start()
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            status = self._orchestrator.status()
            if problems := {**status["target"]["refused"], **status["draft"]["refused"]}:
                raise UnavailableError(f"replicas cannot be used: {problems}")
            if (len(status["target"]["replicas"]), len(status["draft"]["replicas"])) == self._wanted:
                return
            await asyncio.sleep(0.02)
        raise UnavailableError(f"not all replicas were ready within {START_LIMIT_S:g} s")

    async def serve(self, requests: Sequence[GenerationRequest], concurrency: int) -> list[Answer]:
        """Answer all requests, `concurrency` at a time, in order."""
        waiting = iter(requests)
        answers: list[Answer] = []

        async def client() -> None:
            for request in waiting:
                answers.append(await self._one(request))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return answers

    async def _one(self, request: GenerationRequest) -> Answer:
        answer = Answer(request.id, request.tokens or (), request.sampling.seed or 0, time.monotonic())
        try:
            async for delta in self._orchestrator.generate(request):
                answer.arrivals.append((time.monotonic(), len(delta.tokens)))
                answer.tokens.extend(delta.tokens)
                answer.usage = delta.usage or answer.usage
        except Exception as error:  # an error is a result here
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def messages(self) -> int:
        """Calls made to replicas so far."""
        status = self._orchestrator.status()
        return sum(r["messages"] for tier in ("target", "draft") for r in status[tier]["replicas"].values())

    async def stop(self) -> None:
        """End all links."""
        await self._orchestrator.stop()


class Rig(Protocol):
    """A running rig."""

    async def run(self, requests: Sequence[GenerationRequest], concurrency: int) -> Run: ...

    async def close(self) -> None: ...


class LocalRig:
    """Everything in this process: for tests and first looks. Build with `await LocalRig.start(plan)`."""

    def __init__(self, station: Station, targets: list[ProbedTarget], drafts: list[ProbedDraft]) -> None:
        self._station = station
        self._targets = targets
        self._drafts = drafts

    @classmethod
    async def start(cls, plan: RigPlan) -> LocalRig:
        targets = [ProbedTarget(*_target(plan, i)) for i in range(plan.targets)]
        drafts = [ProbedDraft(*_draft(plan, i)) for i in range(plan.drafts)]
        for actor in (*targets, *drafts):
            actor.start()
        station = Station(
            plan,
            {f"target-{i}": LocalPeer(actor) for i, actor in enumerate(targets)},
            {f"draft-{i}": LocalPeer(actor) for i, actor in enumerate(drafts)},
        )
        await station.start()
        return cls(station, targets, drafts)

    async def run(self, requests: Sequence[GenerationRequest], concurrency: int) -> Run:
        """Serve `requests` and collect what was noted."""
        before = await self._station.messages()
        await self._notes()
        answers = await self._station.serve(requests, concurrency)
        targets, drafts = await self._notes()
        return Run(answers, targets, drafts, await self._station.messages() - before)

    async def _notes(self) -> tuple[list[ReplicaNotes], list[ReplicaNotes]]:
        return (
            [await actor.take_notes() for actor in self._targets],
            [await actor.take_notes() for actor in self._drafts],
        )

    async def close(self) -> None:
        """Stop everything."""
        await self._station.stop()
        for target in self._targets:
            await target.stop()
        for draft in self._drafts:
            await draft.stop()


class RayRig:
    """Every part a Ray actor of its own. Ray must be initialised. Build with `await RayRig.start(plan)`."""

    def __init__(self, station: Any, targets: list[Any], drafts: list[Any]) -> None:
        self._station = station
        self._targets = targets
        self._drafts = drafts

    @classmethod
    async def start(cls, plan: RigPlan) -> RayRig:
        import ray

        # CPUs are not reserved: emulated hardware sleeps, and a real pair is pinned by its own settings.
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
        replica = {**options, "concurrency_groups": {"health": 2}}
        targets = [ray.remote(**replica)(ProbedTarget).remote(*_target(plan, i)) for i in range(plan.targets)]
        drafts = [ray.remote(**replica)(ProbedDraft).remote(*_draft(plan, i)) for i in range(plan.drafts)]
        for actor in (*targets, *drafts):
            actor.start.remote()
        station = ray.remote(**options)(Station).remote(
            plan,
            {f"target-{i}": _peer(actor, plan.wires) for i, actor in enumerate(targets)},
            {f"draft-{i}": _peer(actor, plan.wires) for i, actor in enumerate(drafts)},
        )
        rig = cls(station, targets, drafts)
        try:
            await station.start.remote()
        except BaseException:
            await rig.close()
            raise
        return rig

    async def run(self, requests: Sequence[GenerationRequest], concurrency: int) -> Run:
        """Serve `requests` and collect what was noted."""
        before = await self._station.messages.remote()
        await self._notes()
        answers = await self._station.serve.remote(list(requests), concurrency)
        targets, drafts = await self._notes()
        return Run(answers, targets, drafts, await self._station.messages.remote() - before)

    async def _notes(self) -> tuple[list[ReplicaNotes], list[ReplicaNotes]]:
        async def take(actors: list[Any]) -> list[ReplicaNotes]:
            calls: list[Awaitable[ReplicaNotes]] = [actor.take_notes.remote() for actor in actors]
            return list(await asyncio.gather(*calls))

        return await take(self._targets), await take(self._drafts)

    async def close(self) -> None:
        """End the actors."""
        import ray

        for actor in [self._station, *self._targets, *self._drafts]:
            ray.kill(actor)


def _peer(actor: Any, wires: bool) -> Peer:
    return SocketPeer(RayPeer(actor)) if wires else RayPeer(actor)


def _target(plan: RigPlan, index: int) -> tuple[Any, ...]:
    config = plan.config

    def build() -> TargetModel:
        pin(config.target.resources)
        return target_model(config)

    return f"target-{index}", build, config.resolved_target(), MemoryRecorder(), plan.link_delay_ms


def _draft(plan: RigPlan, index: int) -> tuple[Any, ...]:
    config = plan.config

    def build() -> DraftModel:
        pin(config.draft.resources)
        return draft_model(config)

    return f"draft-{index}", build, config.resolved_draft(), MemoryRecorder(), plan.link_delay_ms
