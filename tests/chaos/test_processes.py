"""Real processes are killed and frozen at random, seeded times under clients that check every token.

The emulated target's tokens are a hash of the prefix, so that what each answer must be is known exactly; the demo
model's are taken from plain decoding before anything is broken.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.messages import GenerationRequest
from actors.settings import SamplingSettings
from benchmarks.support import emulated_application, fault_schedule
from benchmarks.support.checked_load import CheckedLoad, Told, Truth
from cluster.config.deployment import DeploymentConfig
from deployments.client.http_service import HttpService

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are not ours to fix


async def under_faults(
    url: str,
    config: DeploymentConfig,
    streams: int,
    rounds: int,
    seed: int,
    make: Any = emulated_application.request,
    truth: Truth = emulated_application.truth,
) -> Told:
    """Strike while clients ask and check, then see that everything was given back and the application still works."""
    service = HttpService(url)
    load = CheckedLoad(service, make, truth, streams)
    plan = fault_schedule.schedule(seed, rounds)
    await fault_schedule.strike_all(config.name, plan, seed, emulated_application.freeze_s(config), print)
    told = await load.stop()
    pauses = sorted(seconds for _, seconds in told.gaps)
    print(f"{len(plan)} faults, {told.answers} answers, {told.tokens} tokens, {len(told.lost)} lost answers")
    print(f"{len(told.changed)} changed answers, {len(told.broken)} connections broken by ingress kills")
    print(f"pauses: median {statistics.median(pauses):.2f} s, longest {pauses[-1]:.2f} s, of {len(pauses)}")
    await emulated_application.at_rest(config.name)
    assert await emulated_application.held(service) == 0
    after = await CheckedLoad(service, lambda number: make(number + 10**6), truth, 4).stop()
    assert (after.answers, after.lost, after.changed) == (4, [], [])
    await service.close()
    return told


def check(told: Told, streams: int) -> None:
    assert told.lost == []
    assert told.changed == []
    assert [one for one in told.broken if "orchestrator" in one] == []  # with an ingress a connection breaks, no other
    assert told.answers >= streams


@pytest.fixture
def chaos(ray_port: int, request: pytest.FixtureRequest) -> Iterator[tuple[str, DeploymentConfig]]:
    from deployments.runtime.local import application

    config = emulated_application.config("chaos", ray_port, streams=request.param)
    with application(config) as url:
        yield url, config


@pytest.mark.parametrize("chaos", [20], indirect=True)
def test_every_kind_of_process_once(chaos: tuple[str, DeploymentConfig]) -> None:
    """20 streams, every process of the application killed, and all but the ingress frozen, once."""
    check(asyncio.run(under_faults(*chaos, streams=20, rounds=1, seed=1)), 20)


@pytest.mark.slow
@pytest.mark.parametrize("chaos", [200], indirect=True)
def test_two_hundred_streams(chaos: tuple[str, DeploymentConfig]) -> None:
    """200 streams, two rounds of every fault at random times."""
    check(asyncio.run(under_faults(*chaos, streams=200, rounds=2, seed=2)), 200)


@pytest.mark.slow
@pytest.mark.demo
def test_sixteen_streams_on_the_demo_model(ray_port: int) -> None:
    """The demo pair, two replicas of each; what must be said is what plain decoding said before."""
    import deployments
    from cluster.config.deployment import load_config
    from deployments.runtime.local import application

    raw = load_config(Path(deployments.__file__).with_name("demo.yaml")).model_dump(mode="json")
    base = emulated_application.config("demo-chaos", ray_port, 16).model_dump(mode="json")
    for tier in ("target", "draft"):
        raw[tier] |= {"replicas": 2, "health": {"period_s": 1.0, "ping_timeout_s": 12.0}}
        raw[tier]["resources"] |= {"cores": None, "threads": 1}
    raw |= {name: base[name] for name in ("name", "orchestrator", "ingress")}
    raw["orchestrator"]["settings"]["stall_timeout_s"] = 5.0  # passes of eight rows take a while on a shared core

    def make(number: int) -> GenerationRequest:
        number %= 16
        sampling = SamplingSettings(temperature=0.8 * (number % 2), max_tokens=48, seed=number)
        return GenerationRequest(f"d{next(numbers)}", sampling, text=f"Story number {number}: once upon a time")

    numbers = iter(range(10**9))

    async def run(url: str) -> Told:
        service = HttpService(url)
        answers: dict[str | None, tuple[int, ...]] = {}
        for number in range(16):
            asked = make(number)
            plain = GenerationRequest(asked.id, asked.sampling.model_copy(update={"speculation": False}), asked.text)
            answers[asked.text] = tuple([t async for delta in service.generate(plain) for t in delta.tokens])
        await service.close()
        return await under_faults(url, config, 16, 1, 3, make, lambda request: answers[request.text])

    config = load_config(raw)
    with application(config) as url:
        check(asyncio.run(run(url)), 16)
