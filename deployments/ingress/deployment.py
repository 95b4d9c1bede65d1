"""The ingress deployment: the routes of routes.py over the orchestrator's handle, with its keys, limits and meter."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.config.deployment import DeploymentConfig, Ingress
from cluster.models import factory
from cluster.observability.otel_tracer import tracer_for
from cluster.observability.ray_recorder import RayRecorder
from deployments.batch_api.routes import BatchLimits
from deployments.ingress.auth import KeyRing
from deployments.ingress.browser_guard import names_this_machine
from deployments.ingress.fair_queue import FairQueue
from deployments.ingress.http_app import http_app
from deployments.ingress.metrics_middleware import MetricsMiddleware
from deployments.ingress.middleware import access_log
from deployments.ingress.rate_limit import RequestGate
from deployments.ingress.routes import HttpLimits
from deployments.ingress.service import Served, Service
from deployments.ingress.traced_service import traced
from deployments.orchestrator.deployment import OwnService, RemoteService


@serve.ingress()
class IngressReplica:
    """The HTTP door as a deployment.

    With `orchestrator.embedded` it runs an orchestrator of its own, which spares every answer a hop between
    processes; otherwise answers come from the orchestrators behind `orchestrator`, a handle.
    """

    def __init__(self, raw: dict[str, Any], orchestrator: Any) -> None:
        self._config = DeploymentConfig.model_validate(raw)
        self._handle = orchestrator
        self._own: OwnService | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        facts = await asyncio.to_thread(factory.text_facts, self._config)
        vocabulary = await asyncio.to_thread(factory.target_fingerprint, self._config)
        served = _served(self._config, facts.context, facts.vocabulary, vocabulary)
        served = replace(served, sampling=facts.sampling)
        limits, gate = _limits(self._config), _gate(self._config.ingress)
        context = serve.get_replica_context()
        replica = context.replica_id.unique_id
        service: Service
        if self._config.orchestrator.embedded:
            service = self._own = await OwnService.start(self._config, facts, context.app_name, replica)
        else:
            silence = self._config.orchestrator.settings.stall_timeout_s
            service = RemoteService(self._handle, silence)
        service = traced(service, tracer_for(self._config.tracing, "ingress", replica))
        app = http_app(
            service,
            facts.codec,
            served,
            limits,
            gate,
            stamp_ids=False,
            batch_folder=self._config.ingress.batches(context.app_name),
            batch_limits=BatchLimits(file_bytes=self._config.ingress.max_file_bytes),
        )
        common = {
            "application": context.app_name,
            "tier": "ingress",
            "model": self._config.model_id,
            "replica": replica,
        }
        app.add_middleware(MetricsMiddleware, recorder=RayRecorder(common))
        return app

    def check_health(self) -> None:
        """Serve's health check. Raises EngineError when the orchestrator in this process has come to an end."""
        if self._own is not None:
            self._own.check()


def _limits(config: DeploymentConfig) -> HttpLimits:
    settings, target = config.ingress, config.target
    replicas = target.replicas if target.autoscaling is None else target.autoscaling.min_replicas
    if settings.access_log:
        access_log.setLevel(logging.INFO)
        if not access_log.handlers:
            access_log.addHandler(logging.StreamHandler())
            access_log.propagate = False
    return HttpLimits(
        body_bytes=settings.max_body_bytes,
        cors_origins=settings.cors_origins,
        access_log=settings.access_log,
        at_once=target.settings.slots * max(1, replicas),
        guards_browsers=settings.keys_file is None,
        is_loopback=names_this_machine(settings.host if ":" not in settings.host else f"[{settings.host}]"),
    )


def _gate(settings: Ingress) -> RequestGate:
    return RequestGate(KeyRing(settings.keys_file, time.monotonic), FairQueue(settings.running, settings.queue))


def _served(config: DeploymentConfig, context: int, ids: int, vocabulary: str) -> Served:
    try:
        release = version("outrider")
    except PackageNotFoundError:  # run from a source tree on PYTHONPATH
        release = "0"
    created = int(time.time())
    return Served(
        config.model_id,
        context,
        config.rule,
        created=created,
        version=release,
        vocabulary=vocabulary,
        ids=ids,
        closed_schemas=config.ingress.closed_schemas,
    )
