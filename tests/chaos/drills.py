"""What the drills share: an application on the connected cluster, a checked load, and a verdict as JSON.

A drill is a process of its own, because it needs a cluster of its own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.messages import DRAFTED, GenerationRequest
from actors.settings import SamplingSettings
from benchmarks.support import emulated_application
from benchmarks.support.checked_load import CheckedLoad, Told
from deployments.client.http_service import HttpService

NAME = "drill"


@dataclass
class Verdict:
    """What a drill found."""

    lost: list[str]
    changed: list[str]
    broken: list[str]
    answers: int
    longest_gap: float
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Told, **facts: Any) -> Verdict:
        return cls(told.lost, told.changed, told.broken, told.answers, told.longest_gap(), facts)

    def print(self) -> None:
        print("VERDICT " + json.dumps(asdict(self)), flush=True)


async def under_load(
    url: str, streams: int, drill: Callable[[HttpService, CheckedLoad], Awaitable[dict[str, Any]]]
) -> None:
    """Run `drill` under a checked load, and print what clients saw, with the facts it returns."""
    service = HttpService(url)
    load = CheckedLoad(service, emulated_application.request, emulated_application.truth, streams)
    await emulated_application.until(lambda: load.told.answers >= streams)
    facts = await drill(service, load)
    told = await load.stop()
    await service.close()
    Verdict.of(told, **facts).print()


async def accepted(service: HttpService, number: int) -> int:
    """Draft tokens accepted in one answer: 0 is plain decoding."""
    sampling = SamplingSettings(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = emulated_application.request(number).tokens
    got = 0
    async for delta in service.generate(GenerationRequest(f"probe-{number}", sampling, tokens=prompt)):
        got += sum(origin in DRAFTED for origin in delta.origins)
    return got
