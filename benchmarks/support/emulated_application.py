"""An application of emulated tiers made to be broken: quick to notice, exact to check, and clients that check it.

Shared by the chaos suite (tests/chaos), the fault bench and the soak (benchmarks/faults.py, benchmarks/soak.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.engines.emulated.language import expected_tokens
from actors.engines.emulated.presets import TargetSpec
from actors.errors import UnavailableError
from actors.messages import GenerationRequest
from actors.settings import SamplingSettings
from benchmarks.support.load_runner import made_up_prompt
from cluster.config.deployment import DeploymentConfig, load_config
from deployments.ingress.service import Service

LANGUAGE = TargetSpec().language
TOKENS = 40
POLL_S = 0.1


def config(name: str, port: int, streams: int, pass_ms: float | None = None, **changes: Any) -> DeploymentConfig:
    """Two of everything.

    pass_ms: of a target pass; None makes it as long as it takes for one core to carry that many streams.
    changes: top-level sections of the configuration, merged into these.
    """
    if pass_ms is None:
        pass_ms = max(60.0, 7.0 * streams)
    stall_s = max(2.0, 3 * pass_ms / 1e3)
    health = {"period_s": 1.0, "ping_timeout_s": stall_s + 6.0, "stuck_after_s": stall_s + 6.0}
    raw: dict[str, Any] = {
        "name": name,
        "model_id": "emulated",
        "target": {
            "engine": "emulated",
            "model": "emulated:reference",
            "engine_kwargs": {"pass_ms": pass_ms},
            "replicas": 2,
            "settings": {"slots": max(8, streams)},
            "health": health,
        },
        "draft": {
            "kind": "emulated",
            "model": "emulated:reference",
            "engine_kwargs": {"step_ms": pass_ms / 6},
            "replicas": 2,
            "settings": {"slots": max(8, streams), "tree": {"width": min(256, 4 * streams)}},
            "health": health,
        },
        "orchestrator": {
            "embedded": False,
            "replicas": 2,
            "settings": {"stall_timeout_s": stall_s, "discovery_period_s": 0.5},
        },
        "ingress": {"port": port, "route_prefix": f"/{name}", "replicas": 2},
    }
    for section, change in changes.items():
        raw[section] = _merged(raw.get(section, {}), change)
    return load_config(raw)


def freeze_s(config: DeploymentConfig) -> float:
    """Longer than orchestrators wait for a pulse, shorter than it takes until a replica replaces its actor: a process
    frozen for so long goes on as one that was given up, and its late verdicts are ignored."""
    return config.orchestrator.settings.stall_timeout_s + 2.5


def _merged(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: _merged(base.get(key), value) for key, value in change.items()}
    return change


def request(number: int, tokens: int = TOKENS) -> GenerationRequest:
    """The n-th request: half of them greedy, half sampled."""
    sampling = SamplingSettings(temperature=number % 2, max_tokens=tokens, seed=number, ignore_eos=True)
    return GenerationRequest(f"t{number}", sampling, tokens=made_up_prompt(number))


def truth(request: GenerationRequest) -> Sequence[int]:
    """What any deployment of these tiers must answer."""
    sampling = request.sampling
    assert request.tokens is not None  # made by `request`
    seed = None if sampling.greedy else sampling.seed
    return expected_tokens(request.tokens, sampling.max_tokens, seed, LANGUAGE, sampling)


async def until(condition: Callable[[], bool | Awaitable[bool]], limit_s: float = 90.0) -> None:
    """Wait for a state of other processes, which offers no event. Raises TimeoutError.

    A condition that meets a broken connection does not hold: what it asked may have been what died.
    """
    async with asyncio.timeout(limit_s):
        while True:
            with contextlib.suppress(UnavailableError):
                found = condition()
                if found if isinstance(found, bool) else await found:
                    return
            await asyncio.sleep(POLL_S)


async def held(service: Service) -> int:
    """Sessions and sequences that an orchestrator knows of: 0 when everything was given back."""
    status: Any = await service.status()
    tiers = [status[tier]["replicas"].values() for tier in ("target", "draft")]
    return int(status["sessions"]) + sum(int(replica["sequences"]) for tier in tiers for replica in tier)


async def loads(application: str) -> dict[str, dict[str, float]]:
    """What each model actor reports of itself, by its name; actors that are on their way up or down are left out."""
    import ray
    from ray.util import list_named_actors

    from deployments.tiers.actor_discovery import NAMESPACE

    actors = await asyncio.to_thread(list_named_actors, all_namespaces=True)
    names = [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(f"{application}:")]

    async def ask(name: str) -> tuple[str, dict[str, float]] | None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            return name, await asyncio.wait_for(actor.load.remote(), 10.0)
        except Exception:
            return None

    return dict(found for found in await asyncio.gather(*(ask(name) for name in names)) if found is not None)


async def at_rest(application: str, limit_s: float = 60.0) -> dict[str, dict[str, float]]:
    """Wait until no actor holds a sequence, a position or a waiting request. Raises TimeoutError with what is held."""
    deadline = time.monotonic() + limit_s
    while True:
        found = await loads(application)
        keys = ("running", "waiting", "kv_share", "sessions")
        holding = {name: load for name, load in found.items() if any(load.get(key, 0.0) for key in keys)}
        if found and not holding:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"still held after {limit_s:g} s: {holding or 'no actor answers'}")
        await asyncio.sleep(0.1)
