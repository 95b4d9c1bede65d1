"""The deployments of the two tiers. A replica owns one model actor: it places it, watches it, and replaces it.

The actors are not detached, so whatever ends a replica also ends its actor and gives its GPUs back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, Literal

from actors import telemetry
from actors.draft import DraftActor
from actors.engines.protocol import ModelCard
from actors.settings import DraftSettings, TargetSettings
from actors.target import TargetActor
from cluster import factory
from cluster.config import DeploymentConfig, Resources
from cluster.recorder import RayRecorder
from cluster.traces import tracer_for
from deployments.directory import NAMESPACE, actor_prefix

logger = logging.getLogger("ray.serve")

TierName = Literal["target", "draft"]
PING_LIMIT_S = 10.0
MOST_RESTARTS = 3
"""Actors that die so often under one replica are given up, so that Serve looks for another place."""


class TierReplica:
    """One replica of a tier. Its model actor is named after it, which is how orchestrators find it."""

    async def __init__(self, raw: dict[str, Any], tier: TierName) -> None:  # type: ignore[misc]  # Serve awaits it
        from ray import serve

        context = serve.get_replica_context()
        self._config = DeploymentConfig.model_validate(raw)
        self._tier = tier
        self._name = actor_prefix(context.app_name, tier) + context.replica_id.unique_id
        self._application = context.app_name
        self._restarts = 0
        self._actor = self._place()
        try:
            self._card: ModelCard = await self._actor.card.remote()
        except Exception as error:
            raise RuntimeError(f"the {tier} model could not be built: {_first_line(error)}") from error

    def _place(self) -> Any:
        """Create the actor in this replica's placement group, if it has one."""
        import ray
        from ray.util import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self._config
        tier = config.target if self._tier == "target" else config.draft
        actor = TargetActor if self._tier == "target" else DraftActor
        options: dict[str, Any] = {"num_cpus": tier.resources.num_cpus, "num_gpus": actor_gpus(config, self._tier)}
        group = get_current_placement_group()
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        name = f"{self._name}.{self._restarts}"
        common = {"application": self._application, "tier": self._tier, "model": config.model_id, "replica": name}
        self._recorder = RayRecorder(common)
        self._recorder.set(telemetry.GPUS, sum(bundle.get("GPU", 0.0) for bundle in bundles(config, self._tier)))
        return (
            ray.remote(concurrency_groups={"health": 2})(actor)
            .options(name=name, namespace=NAMESPACE, max_concurrency=1000, **options)
            .remote(
                name,
                functools.partial(_make_model, config, self._tier),
                self._settings(),
                RayRecorder(common),
                tracer=tracer_for(config.tracing, self._tier, name),
            )
        )

    def _settings(self) -> TargetSettings | DraftSettings:
        return self._config.resolved_target() if self._tier == "target" else self._config.resolved_draft()

    async def check_health(self) -> None:
        """Serve's health check: raises when the actor is stuck or was lost too often. A dead actor is replaced."""
        from ray.exceptions import RayActorError

        try:
            ping = self._actor.ping.options(concurrency_group="health").remote()
            await asyncio.wait_for(ping, PING_LIMIT_S)
        except RayActorError:
            if self._restarts == MOST_RESTARTS:
                raise
            self._restarts += 1
            logger.warning("the actor of %s died; placing it again (%d)", self._name, self._restarts)
            self._actor = self._place()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the tier's autoscaling policy goes by (deployments/scaling.py)."""
        load: dict[str, float] = await self._actor.load.remote()
        return load

    async def card(self) -> ModelCard:
        """The model that this replica serves."""
        return self._card


def actor_gpus(config: DeploymentConfig, tier: TierName) -> float:
    """GPUs of a replica's actor. vLLM spreads over its GPUs from inside one process."""
    if tier == "target" and config.target.engine == "vllm":
        return config.target.resources.num_gpus * config.target.tensor_parallel_size
    return (config.target if tier == "target" else config.draft).resources.num_gpus


def bundles(config: DeploymentConfig, tier: TierName) -> list[dict[str, float]]:
    """The placement group of one replica: a bundle per actor, the first one's actor being the one orchestrators know.

    Empty when the replica needs nothing that could be reserved.
    """
    resources = (config.target if tier == "target" else config.draft).resources
    first = _bundle(resources, actor_gpus(config, tier))
    ranks = config.target.tensor_parallel_size if tier == "target" and config.target.engine == "transformers" else 1
    others = [_bundle(resources, resources.num_gpus) for _ in range(ranks - 1)]
    return [first, *others] if first else []


def _bundle(resources: Resources, gpus: float) -> dict[str, float]:
    amounts = {"CPU": resources.num_cpus, "GPU": gpus, "memory": resources.memory_gib * 2**30}
    if resources.accelerator_type is not None:
        amounts[f"accelerator_type:{resources.accelerator_type}"] = 0.001  # Ray's way to ask for the type only
    return {name: amount for name, amount in amounts.items() if amount}


def _make_model(config: DeploymentConfig, tier: TierName) -> Any:
    """Runs on the actor's model thread: pin it, then build the model there."""
    factory.pin((config.target if tier == "target" else config.draft).resources)
    return factory.target_model(config) if tier == "target" else factory.draft_model(config)


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)
