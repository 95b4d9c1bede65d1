"""A thousand replicas on paper: what a day costs, and what becomes the bottleneck (`python -m benchmarks scale`).

Measured here: what one message on a wire and one Ray call cost, and what one look of the autoscaling policies takes
with so many replicas. Computed from that and from the replayed day: what every orchestrator and Ray Serve's controller
must do per second when all replicas are one application, and how many replicas one application can have.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.messages import GenerationRequest, OpenSequence, VerificationBatch, VerificationResult
from actors.orchestrator.session import Session
from actors.settings import SamplingSettings
from actors.text.emulated_codec import EmulatedCodec
from actors.transport.connection import PULSE_PERIOD_S
from actors.transport.socket import Endpoint, SocketPeer, SocketServer
from benchmarks.support import options
from cluster.config.deployment import Health
from cluster.planning.replay import replay, speed
from cluster.planning.traffic import PRESETS
from cluster.scaling.policies import DraftGoals, DraftLoad, TargetGoals, TargetLoad, draft_replicas, target_replicas
from deployments.runtime.local import ray_cluster

BATCH = 8
"""Sequences of one orchestrator in one target's pass; a message names each."""
BUSY = 0.6
"""Share of a core that may go to one of these; the rest is for what the process is there for."""
LOOKS_PER_S = 10.0
"""How often Ray Serve's controller calls a policy."""


class _Source:
    """Streams verdict batches as fast as they are taken."""

    def __init__(self, count: int) -> None:
        verdicts = [VerificationResult(f"sequence-{i:04d}", 100, (1, 2, 3), 5, 2) for i in range(BATCH)]
        self._batches = [VerificationBatch("target:0", n, verdicts, 0.025, 48, 0.0) for n in range(count)]

    async def deliver(self, link: str, mail: Sequence[Any]) -> None:
        """Nothing is sent this way."""

    async def leave(self, link: str) -> None:
        """Nothing is held."""

    async def results(self, link: str) -> AsyncIterator[list[Any]]:
        for batch in self._batches:
            yield [batch]


class _Behind:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def call(self, method: str, *args: Any) -> Any:
        return self._endpoint

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        yield None

    def close(self, link: str | None = None) -> None:
        """There is nothing to give back."""


async def message_s(count: int = 4000) -> float:
    """Processor seconds that sending and taking one verdict batch take; both ends run here, so it is halved."""
    server = SocketServer(_Source(count))
    peer = SocketPeer(_Behind(await server.endpoint("127.0.0.1")))
    taken, began = 0, time.process_time()
    async for _ in peer.stream("results", "link"):
        taken += 1
        if taken == count:
            break
    spent = time.process_time() - began
    peer.close()
    await server.close()
    return spent / count / 2


def look_s(targets: int, drafts: int, repeats: int = 20) -> float:
    """Seconds that one look of both policies takes."""
    loads = [TargetLoad(40, 2, 64, 0.5, 0.02, 0.05, 0.0) for _ in range(targets)]
    followers = [DraftLoad(20, 64) for _ in range(drafts)]
    began = time.perf_counter()
    for _ in range(repeats):
        target_replicas(loads, targets, 0, 0.0, TargetGoals())
        draft_replicas(followers, loads, drafts, 0, DraftGoals())
    return (time.perf_counter() - began) / repeats


async def verdict_s(count: int = 4000) -> float:
    """Processor seconds that an orchestrator spends on one verdict: commit, commit to the draft, text, delta."""
    codec = EmulatedCodec(32000)
    sampling = SamplingSettings(max_tokens=10 * count)
    opening = OpenSequence("sequence", (1, 2, 3), sampling, seed=1)
    request = GenerationRequest("sequence", sampling, tokens=(1, 2, 3))
    session = Session(request, opening, [1, 2, 3], codec.stream((1, 2, 3)))
    began = time.process_time()
    for n in range(count):
        session.commit(VerificationResult("sequence", 3 + 3 * n, (5, 6, 7), 5, 2))
        event = session.events.get_nowait()
        assert isinstance(event, VerificationResult)
        session.deliver(event)
    return (time.process_time() - began) / count


def call_s(count: int = 2000) -> float:
    """Processor seconds that the caller of a Ray actor spends on one call; pulses and health checks are such calls."""
    import ray

    class Answering:
        async def pulse(self, link: str) -> bool:
            return True

    with ray_cluster():
        actor = ray.remote(num_cpus=0, max_concurrency=1000)(Answering).remote()
        ray.get(actor.pulse.remote("link"))
        began = time.process_time()
        ray.get([actor.pulse.remote("link") for _ in range(count)])
        return (time.process_time() - began) / count


def main(argv: Sequence[str]) -> int:
    """Replay, measure, compute and print."""
    parser = options.parser("scale", __doc__)
    parser.add_argument("--orchestrators", type=options.at_least(1), default=64)
    mesh = parser.parse_args(argv).orchestrators
    traffic = PRESETS["internet"]
    day = replay(traffic)
    targets, drafts = max((targets, drafts) for _, targets, drafts in day.sizes)
    replicas = targets + drafts
    message, verdict = asyncio.run(message_s()), asyncio.run(verdict_s())
    look, call = look_s(targets, drafts), call_s()
    rate = speed(traffic, 20.0 * targets, targets, drafts).tokens_per_s
    running = traffic.requests_per_s * traffic.tokens / rate
    hardware = traffic.target_hardware
    pass_s = (hardware.pass_ms + hardware.token_ms * running / targets * 3) / 1e3
    # A pass sends one batch to every orchestrator that has a sequence in it; drafts are taken to send as many.
    messages = 2 * targets * min(1.0, running / targets / mesh) / pass_s
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    verdicts = running / mesh / pass_s
    pulses = replicas / PULSE_PERIOD_S
    checks = replicas / Health().period_s
    rows = [
        ("a day: requests, tokens", f"{day.requests:.3g}, {day.tokens:.3g}"),
        ("replica-hours: targets, drafts", f"{day.target_hours:.0f}, {day.draft_hours:.0f}"),
        ("requests that began to run within the objective", f"{day.attainment:.2%}"),
        ("spot drafts lost and replaced", f"{day.lost_replicas}"),
        ("sequences at once at the peak", f"{running:.0f}"),
        (
            "measured: a message on a wire, a Ray call, both policies",
            f"{message * 1e6:.0f} µs, {call * 1e6:.0f} µs, {look * 1e3:.1f} ms",
        ),
        ("measured: a verdict at an orchestrator", f"{verdict * 1e6:.0f} µs"),
        (f"each of {mesh} orchestrators, linked to every replica:", ""),
        ("  messages with verdicts and offers", _cores(messages, message)),
        ("  verdicts in them", _cores(verdicts, verdict)),
        ("  pulses", _cores(pulses, call)),
        ("  sockets: a wire and a connection of Ray's for each replica", f"{2 * replicas} (soft limit here {files})"),
        ("Ray Serve's controller:", ""),
        ("  health checks", _cores(checks, call)),
        ("  looks of the policies", _cores(LOOKS_PER_S, look)),
        ("names that the orchestrators read from Ray's control store", f"{mesh * replicas:.3g} per second"),
        ("replicas of one application whose pulses fit an orchestrator", f"{BUSY * PULSE_PERIOD_S / call:.0f}"),
        ("replicas of one application whose checks fit the controller", f"{BUSY * Health().period_s / call:.0f}"),
    ]
    title = f"{targets} targets, {drafts} drafts at the peak ({platform.machine()}, {os.cpu_count()} cores)"
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    return 0


def _cores(per_s: float, each_s: float) -> str:
    return f"{per_s:.0f} per second, {per_s * each_s:.2f} cores"
