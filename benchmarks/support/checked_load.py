"""Clients that never stop asking and check every token they get: what faults are measured with.

A client whose connection breaks asks again from the start, as the protocol allows; what it had been told must be the
beginning of what it is told then.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from actors.errors import UnavailableError
from actors.messages import GenerationRequest
from deployments.ingress.service import Service

Truth = Callable[[GenerationRequest], Sequence[int]]
MOST_TRIES = 8


@dataclass(slots=True)
class Told:
    """What all clients saw. Times are of the monotonic clock."""

    answers: int = 0
    tokens: int = 0
    changed: list[str] = field(default_factory=list)
    """Answers that are not the right ones."""
    lost: list[str] = field(default_factory=list)
    """Answers that ended with an error that a client cannot do anything about."""
    broken: list[str] = field(default_factory=list)
    """Connections that ended early; the client asked again."""
    breaks: list[tuple[float, float]] = field(default_factory=list)
    """(begin, seconds) of the silence before each of those ends."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(begin, seconds) of every pause within an answer."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(begin, seconds) from every request to its first sign."""
    under_way: dict[str, float] = field(default_factory=dict)
    """When each request that has no end yet was made, or last gave a sign."""

    def longest_gap(self, since: float = float("-inf"), until: float = float("inf")) -> float:
        """Seconds, of the pauses that were under way at some time between `since` and `until`."""
        return longest(self.gaps, since, until)

    def rate(self, since: float, until: float) -> float:
        """Tokens per second that reached clients."""
        return sum(count for at, count in self.arrivals if since <= at < until) / (until - since)


class CheckedLoad:
    """`streams` clients of `service`, each asking for one answer after the other, and for one at least.

    requests: makes the n-th request; ids must differ. truth: what it must be answered.
    """

    def __init__(
        self, service: Service, requests: Callable[[int], GenerationRequest], truth: Truth, streams: int
    ) -> None:
        self._service = service
        self._requests = requests
        self._truth = truth
        self._numbers = itertools.count()
        self._stopping = False
        self._clients = [asyncio.create_task(self._client()) for _ in range(streams)]
        self.told = Told()

    async def stop(self) -> Told:
        """Let every client finish its answer, and return what they saw."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        return self.told

    async def _client(self) -> None:
        while True:
            request = self._requests(next(self._numbers))
            truth = tuple(self._truth(request))
            for attempt in range(MOST_TRIES):
                if await self._once(replace(request, id=f"{request.id}-{attempt}"), truth):
                    break
            else:
                self.told.lost.append(f"{request.id}: no answer in {MOST_TRIES} tries")
            if self._stopping:
                return

    async def _once(self, request: GenerationRequest, truth: tuple[int, ...]) -> bool:
        """Ask once. Returns whether that was the end of it."""
        told, got, last = self.told, list[int](), time.monotonic()
        told.under_way[request.id] = last
        try:
            async for delta in self._service.generate(request):
                now = time.monotonic()
                (told.gaps if got else told.waits).append((last, now - last))
                last = told.under_way[request.id] = now
                got += delta.tokens
                if delta.tokens:
                    told.arrivals.append((now, len(delta.tokens)))
        except UnavailableError as error:
            told.broken.append(f"{request.id} after {len(got)} tokens: {error}")
            told.breaks.append((last, time.monotonic() - last))
            if tuple(got) != truth[: len(got)]:
                told.changed.append(f"{request.id}: {_difference(got, truth)}")
            await asyncio.sleep(min(error.retry_after, 1.0))
            return False
        except Exception as error:
            told.lost.append(f"{request.id} after {len(got)} tokens: {type(error).__name__}: {error}")
            return True
        finally:
            del told.under_way[request.id]
        told.answers += 1
        told.tokens += len(got)
        if tuple(got) != truth:
            told.changed.append(f"{request.id}: {_difference(got, truth)}")
        return True


def longest(silences: Sequence[tuple[float, float]], since: float, until: float) -> float:
    """Seconds, of the silences (begin, seconds) that were under way at some time between; 0 when there was none."""
    return max((s for begin, s in silences if begin + s > since and begin < until), default=0.0)


def _difference(got: Sequence[int], truth: Sequence[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(got, truth, strict=False)) if a != b), min(len(got), len(truth)))
    return f"{len(got)} tokens instead of {len(truth)}, the first difference at {place}"
