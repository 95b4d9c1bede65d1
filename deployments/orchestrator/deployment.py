"""The orchestrator's deployment, and how the doors reach it through a Serve handle."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from actors.errors import EngineError, OutriderError, UnavailableError
from actors.messages import Delta, GenerationRequest
from actors.orchestrator.admission import Admission
from actors.orchestrator.orchestrator import Orchestrator
from cluster.config.deployment import DeploymentConfig
from cluster.models import factory
from cluster.models.default_sampling import completed
from cluster.models.factory import TextFacts
from cluster.observability.otel_tracer import tracer_for
from cluster.observability.ray_recorder import RayRecorder
from deployments.orchestrator.answer_recording import answer_recorder
from deployments.orchestrator.failover import leave_alone, take_over
from deployments.orchestrator.handle import Call, LostError
from deployments.orchestrator.heartbeat import SILENCE_S, SilenceError, listening, with_heartbeats
from deployments.orchestrator.request_batching import Outcome, RequestBatcher, answered
from deployments.runtime.ray_internals import over_grpc
from deployments.tiers.actor_discovery import NamedActors
from deployments.tiers.serve_status import overview

MOST_MOVES = 3
"""Orchestrators that one answer may lose before it ends with an error."""
MOST_ASKED = 4
"""Orchestrators that are asked at the beginning of an answer, and each time that one was lost."""


class OwnService:
    """A Service over an orchestrator in this process. Make it with `await OwnService.start(...)`."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        config: DeploymentConfig,
        application: str,
        needs_drafts: bool,
        sampling: Mapping[str, float],
    ) -> None:
        self._orchestrator = orchestrator
        self._config = config
        self._application = application
        self._needs_drafts = needs_drafts
        self._sampling = sampling
        self.check = orchestrator.check

    @classmethod
    async def start(cls, config: DeploymentConfig, facts: TextFacts, application: str, replica: str) -> OwnService:
        """Build the orchestrator of one Serve replica, and let it look for both tiers."""
        common = {
            "application": application,
            "tier": "orchestrator",
            "model": config.model_id,
            "replica": replica,
        }
        answers = await asyncio.to_thread(answer_recorder, config)
        scaling = config.draft.autoscaling
        least = config.draft.replicas if scaling is None else scaling.min_replicas
        orchestrator = Orchestrator(
            targets=NamedActors(application, "target"),
            drafts=NamedActors(application, "draft"),
            admission=Admission(facts.codec, facts.vocabulary, facts.context),
            settings=config.orchestrator.settings,
            recorder=RayRecorder(common),
            tracer=tracer_for(config.tracing, "orchestrator", replica),
            keep=answers.keep if answers is not None else None,
        )
        await orchestrator.start()
        return cls(orchestrator, config, application, config.draft.kind != "none" and least > 0, facts.sampling)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """See Orchestrator.generate; settings that the request does not name are the deployment's."""
        return self._orchestrator.generate(completed(request, self._sampling))

    async def status(self) -> dict[str, Any]:
        """Both tiers as this orchestrator sees them, and as Serve does."""
        status = self._orchestrator.status()
        status["ready"] = self._ready(status)
        for tier, told in (await overview(self._application, self._config)).items():
            status[tier]["serve"] = told
        return status

    async def ready(self) -> bool:
        """Whether both tiers can serve; a draft tier that may be empty is not waited for."""
        return self._ready(self._orchestrator.status())

    def _ready(self, status: dict[str, Any]) -> bool:
        drafts = status["draft"]["replicas"]
        return bool(status["target"]["replicas"]) and (bool(drafts) or not self._needs_drafts)


class OrchestratorReplica:
    """One orchestrator. `tiers` are the tiers' handles; they make Serve start the tiers with the application."""

    async def __init__(self, raw: dict[str, Any], version: str, *tiers: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        from ray import serve

        self._raw, self._version = raw, version
        context = serve.get_replica_context()
        config = DeploymentConfig.model_validate(raw)
        facts = await asyncio.to_thread(factory.text_facts, config)
        self._own = await OwnService.start(config, facts, context.app_name, context.replica_id.unique_id)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Serve one request; see Orchestrator.generate. An empty Delta now and then is a sign of life."""
        async with aclosing(with_heartbeats(self._own.generate(request))) as deltas:
            async for delta in deltas:
                yield delta

    async def answer(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Outcome]]:
        """Serve many requests, and tell each when it is complete; see bundles.answered."""
        async with aclosing(answered(self._own.generate, requests)) as outcomes:
            async for found in outcomes:
                yield found

    def check_health(self) -> None:
        """Serve's health check. Raises EngineError when the orchestrator does not look for replicas any more."""
        self._own.check()

    async def status(self) -> dict[str, Any]:
        """Both tiers as this orchestrator sees them."""
        return await self._own.status()

    async def configuration(self) -> dict[str, Any]:
        """What the application was started with; the draft may have been exchanged since."""
        return self._raw

    async def version(self) -> str:
        """Of the application, as app.code_version told when it was started: the code may have changed since."""
        return self._version

    async def ready(self) -> bool:
        """Whether both tiers can serve."""
        return await self._own.ready()


class RemoteService:
    """A Service over the orchestrator's handle.

    An answer whose orchestrator dies, or stands still, goes on at another one, from the tokens that were delivered.
    """

    def __init__(self, handle: Any, silence_s: float = SILENCE_S) -> None:
        self._handle = over_grpc(handle)
        self._silence = silence_s
        streaming = self._handle.options(stream=True)  # one handle for all requests: each costs a long-poll
        self._generate, self._answer = streaming.generate, streaming.answer
        self._bundlers: WeakKeyDictionary[asyncio.AbstractEventLoop, RequestBatcher] = WeakKeyDictionary()

    async def answer(self, request: GenerationRequest) -> Delta:
        """The whole answer, in one call with whatever else is asked at the same time.

        Raises the errors of actors/errors.py; UnavailableError when its orchestrator is lost: ask again.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._bundlers:
            self._bundlers[loop] = RequestBatcher(self._bundle, _lost_or_own, self._silence)
        return await self._bundlers[loop].answer(request)

    async def _bundle(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Outcome]]:
        call: Call[list[Outcome]] = Call(self._answer.remote(requests))
        ended = False
        try:
            async for found in call:
                yield found
            ended = True
        finally:
            if not ended:
                call.cancel()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Deltas of one answer. Raises the errors of actors/errors.py."""
        delivered, calls, began = list(request.committed), itertools.count(), time.monotonic()

        def ask() -> Call[Delta]:
            number = next(calls)
            name = request.id if number == 0 else f"{request.id}~{number}"
            elapsed_s = request.elapsed_s + time.monotonic() - began if number else request.elapsed_s
            resumed = replace(request, id=name, committed=tuple(delivered), elapsed_s=elapsed_s)
            return Call(self._generate.remote(resumed))

        for move in range(MOST_MOVES + 1):
            call, ended = None, False
            try:
                # Under load alone nobody is asked twice. To go on two are asked at once: the router gives the second
                # call to whoever has fewer, and so hardly both to the one that stands still.
                first_s = 0.0 if move else self._silence
                call, deltas, first = await take_over(ask, MOST_ASKED, LostError, first_s, self._silence)
                async for delta in listening(deltas, self._silence, first):
                    ended = delta.finish is not None
                    delivered += delta.tokens
                    yield delta
                return
            except (LostError, SilenceError) as error:
                ended = True
                if call is not None and isinstance(error, SilenceError):
                    leave_alone(call, deltas)
                if move == MOST_MOVES:
                    seconds = time.monotonic() - began
                    raise UnavailableError(
                        f"orchestrators were lost under this request: {next(calls)} were asked in {seconds:.1f} s, "
                        f"the last ended with {type(error).__name__}: {error}"
                    ) from None
            except Exception as error:
                ended = True
                raise own_error(error) from error
            finally:
                if call is not None and not ended:
                    call.cancel()

    async def status(self) -> dict[str, Any]:
        """Both tiers as an orchestrator sees them."""
        status: dict[str, Any] = await self._handle.status.remote()
        return status

    async def ready(self) -> bool:
        """Whether both tiers can serve; an orchestrator that cannot be reached is not ready."""
        try:
            return bool(await self._handle.ready.remote())
        except Exception:
            return False


def _lost_or_own(error: Exception) -> Exception:
    if isinstance(error, LostError | SilenceError | StopAsyncIteration):
        return UnavailableError("the orchestrator was lost under this request")
    return own_error(error)


def own_error(error: Exception) -> Exception:
    """The error that was raised at the other end of a handle, unwrapped."""
    from ray.serve.exceptions import BackPressureError

    cause = getattr(error, "cause", None)
    if isinstance(cause, OutriderError):
        return cause
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, BackPressureError):
        return UnavailableError("the orchestrators' queues are full")
    return EngineError(f"the orchestrator failed: {type(cause or error).__name__}")
