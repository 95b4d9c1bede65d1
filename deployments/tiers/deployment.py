"""The deployments of the two tiers. A replica owns one model actor: it places it, watches it, and replaces it.

The actors are not detached, so whatever ends a replica also ends its actor and gives its GPUs back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from actors import telemetry
from actors.draft.actor import DraftActor
from actors.engines.protocol import ModelCard
from actors.errors import EngineError
from actors.replica.rank import RankActor
from actors.settings import DraftSettings, TargetSettings
from actors.target.actor import TargetActor
from actors.transport.socket import node_address
from cluster.config.deployment import DeploymentConfig, DraftChoice
from cluster.models import factory
from cluster.observability.otel_tracer import tracer_for
from cluster.observability.ray_recorder import RayRecorder
from cluster.scaling.placement import TierName, actor_gpus, bundles
from cluster.scaling.supervision import Construction, Supervision, built
from deployments.tiers.actor_discovery import NAMESPACE, actor_prefix

if TYPE_CHECKING:
    from actors.engines.transformers.causal_lm import CausalLM
    from actors.engines.transformers.ranks import RankGroup, Rendezvous
    from actors.target.vllm_actor import VllmTargetActor

logger = logging.getLogger("ray.serve")

HANDOVER_S = 2.0
"""How long a draft that is exchanged may wait for others to take its sequences; they need no draft to go on."""


class TierReplica:
    """One replica of a tier. Its model actor is named after it, which is how orchestrators find it."""

    async def __init__(self, raw: dict[str, Any], tier: TierName) -> None:  # type: ignore[misc]  # Serve awaits it
        from ray import serve

        context = serve.get_replica_context()
        self._config = DeploymentConfig.model_validate(raw)
        self._tier = tier
        self._settings = self._config.target if tier == "target" else self._config.draft
        self._name = actor_prefix(context.app_name, tier) + context.replica_id.unique_id
        common = {"application": context.app_name, "tier": tier, "model": self._config.model_id}
        self._common = common
        self._recorder = RayRecorder({**common, "replica": self._name})
        self._recorder.set(telemetry.GPUS, sum(bundle.get("GPU", 0.0) for bundle in bundles(self._config, tier)))
        self._supervision = Supervision()
        self._placed = 0
        self._given_up: str | None = None
        self._replacing: asyncio.Task[Any] | None = None
        self._actor: Any = None
        self._ranks: list[Any] = []
        if tier == "target":
            await self._begin()

    async def reconfigure(self, choice: dict[str, Any]) -> None:
        """Serve's word on which draft to run (DraftChoice), at the beginning and whenever it changes.

        Another draft's actor replaces this one's, which first gives its sequences to other drafts, as far as there
        are any: for a while sequences here are decoded plainly.
        """
        config = self._config.with_draft(DraftChoice.model_validate(choice))
        if self._actor is not None and config == self._config:
            return
        former, self._config = self._actor, config
        if former is None:
            await self._begin()
            return
        if self._replacing is not None:  # of the former draft
            self._replacing.cancel()
        self._replacing = asyncio.current_task()  # health checks wait
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(former.drain.remote(), min(self._settings.drain_s, HANDOVER_S))
            self._kill()
            await self._begin()
        finally:
            self._replacing = None

    async def _begin(self) -> None:
        self._actor = self._place()
        try:
            self._card = await self._built()
        except Exception as error:
            raise RuntimeError(f"the {self._tier} model could not be built: {_first_line(error)}") from error

    def _place(self) -> Any:
        """Create the actor in this replica's placement group, if it has one."""
        import ray
        from ray.util import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self._config
        actor = _actor_class(config, self._tier)
        resources = self._settings.resources
        options: dict[str, Any] = {"num_cpus": resources.num_cpus, "num_gpus": actor_gpus(config, self._tier)}
        group = get_current_placement_group()
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
            )
        name = f"{self._name}.{self._placed}"
        self._placed += 1
        self._ranks = self._place_ranks(name, group)
        placed = (
            ray.remote(concurrency_groups={"health": 2})(actor)
            .options(name=name, namespace=NAMESPACE, max_concurrency=1000, **options)
            .remote(
                name,
                functools.partial(_make_model, config, self._tier, self._ranks),
                self._engine_settings(),
                RayRecorder({**self._common, "replica": name}),
                tracer=tracer_for(config.tracing, self._tier, name),
            )
        )
        placed.start.remote()
        return placed

    def _place_ranks(self, name: str, group: Any) -> list[Any]:
        """The actors of the tensor-parallel ranks after the first, each in a bundle of its own."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        target = self._config.target
        if self._tier == "draft" or target.engine != "transformers":
            return []
        options: dict[str, Any] = {"num_cpus": target.resources.num_cpus, "num_gpus": target.resources.num_gpus}
        ranks = []
        for rank in range(1, target.tensor_parallel_size):
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                )
            actor = ray.remote(RankActor).options(max_concurrency=4, **options)
            ranks.append(actor.remote(f"{name}/{rank}", functools.partial(_make_share, self._config)))
        return ranks

    async def _built(self) -> ModelCard:
        """Wait for the actor's model. Raises what building it raised; EngineError when the actor stands still."""
        health = self._settings.health
        construction = Construction(time.monotonic(), health.start_timeout_s, health.stuck_after_s)
        card: ModelCard = await built(
            self._actor.card.remote(), self._ping, construction, time.monotonic, health.period_s
        )
        return card

    def _engine_settings(self) -> TargetSettings | DraftSettings:
        return self._config.resolved_target() if self._tier == "target" else self._config.resolved_draft()

    # -- health --------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Serve's health check. An actor that died, does not answer, or whose model thread stands still is replaced.

        So is a tensor-parallel group of which one rank did. Raises EngineError when too many were lost here, so that
        Serve replaces this replica.
        """
        from ray.exceptions import RayActorError

        if self._given_up is not None:
            raise EngineError(self._given_up)
        if self._replacing is not None:  # it either succeeds, or stands still or fails and counts as the next death
            return
        try:
            await self._ping()
        except TimeoutError:
            self._replace(f"did not answer for {self._settings.health.ping_timeout_s:g} s")
        except RayActorError:
            self._replace("died")
        except Exception as error:  # what the actor itself says of its model thread
            self._replace(_first_line(error))

    async def _ping(self) -> None:
        """Ask the actor and all its ranks. Raises TimeoutError, RayActorError, or what they say of themselves."""
        health = self._settings.health
        ping = self._actor.ping.options(concurrency_group="health").remote(health.stuck_after_s)
        others = [rank.ping.remote() for rank in self._ranks]
        await asyncio.wait_for(asyncio.gather(ping, *others), health.ping_timeout_s)

    def _replace(self, reason: str) -> None:
        pause = self._supervision.died(time.monotonic())
        deaths = len(self._supervision.deaths)
        self._recorder.add(telemetry.ACTOR_LOSSES, 1)
        if pause is None:
            self._given_up = f"{deaths} actors of {self._name} were lost within minutes, the last one: {reason}"
            logger.error(self._given_up)
            return
        logger.warning("the actor of %s: %s; placing another one in %g s (loss %d)", self._name, reason, pause, deaths)
        self._replacing = asyncio.create_task(self._place_after(pause))

    async def _place_after(self, pause: float) -> None:
        """Make sure that the old actor is gone, wait, and place a new one."""
        try:
            self._kill()
            await asyncio.sleep(pause)
            self._actor = self._place()
            await self._built()
        except Exception as error:
            self._replacing = None
            self._replace(f"its model could not be built again: {_first_line(error)}")
        else:
            self._replacing = None

    def _kill(self) -> None:
        import ray

        for member in (self._actor, *self._ranks):
            with contextlib.suppress(Exception):  # it may be gone already
                ray.kill(member)

    async def __del__(self) -> None:
        """Serve's graceful end: the actor finishes its sequences, or hands them over, within `drain_s`."""
        if self._actor is None:
            return
        if self._given_up is None and self._replacing is None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._actor.drain.remote(), self._settings.drain_s)
        self._kill()

    # -- what others ask -----------------------------------------------------------------------------------------

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the tier's autoscaling policy goes by (deployments/tiers/autoscaling_policies.py); nothing while
        there is no actor."""
        try:
            load: dict[str, float] = await self._actor.load.remote()
        except Exception:
            return {}
        return load

    async def card(self) -> ModelCard:
        """The model that this replica serves."""
        return self._card


def _actor_class(config: DeploymentConfig, tier: TierName) -> type[TargetActor | VllmTargetActor | DraftActor]:
    if tier == "draft":
        return DraftActor
    if config.target.engine != "vllm":
        return TargetActor
    from actors.target.vllm_actor import (
        VllmTargetActor,  # brings torch into the replica, 180 MiB that others do without
    )

    return VllmTargetActor


def _make_model(config: DeploymentConfig, tier: TierName, ranks: Sequence[Any]) -> Any:
    """Runs on the actor's model thread: pin it, then build the model there. ranks: actors that follow this one."""
    factory.pin((config.target if tier == "target" else config.draft).resources)
    if tier == "draft":
        return factory.draft_model(config)
    if config.target.engine == "vllm":
        return factory.vllm_model(config)
    return factory.target_model(config, _lead(ranks) if ranks else None)


def _lead(ranks: Sequence[Any]) -> RankGroup:
    from actors.engines.transformers.ranks import RankGroup

    def invite(meeting: Rendezvous) -> None:
        for place, rank in enumerate(ranks, start=1):
            rank.join.remote(place, meeting)

    return RankGroup.lead(node_address(), len(ranks) + 1, invite)


def _make_share(config: DeploymentConfig, group: RankGroup) -> CausalLM:
    """Runs in the actor of a rank after the first."""
    factory.pin(config.target.resources)
    return factory.target_share(config, group)


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)
