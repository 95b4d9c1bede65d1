"""What stands between a request and the service: its key, its tenant's rates, and its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from actors.errors import DeadlineError, OverloadedError
from deployments.ingress.auth import KeyRing, Tenant
from deployments.ingress.fair_queue import FairQueue

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """A token bucket that holds one minute's worth. It may be overdrawn by what is only known afterwards."""

    per_minute: float
    updated: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.per_minute

    def wait_s(self, now: float, amount: float) -> float:
        """Seconds until `amount` (at most a minute's worth) is there; 0 if it is."""
        self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / MINUTE_S)
        self.updated = now
        return max(0.0, (min(amount, self.per_minute) - self.level) * MINUTE_S / self.per_minute)

    def take(self, amount: float) -> None:
        """Take it, whether it is there or not."""
        self.level -= amount


class RequestGate:
    """Admits requests. One per ingress replica: limits and fairness hold per replica."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        queue: FairQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys or KeyRing(None, clock)
        self._queue = queue or FairQueue()
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def identify(self, authorization: str | None) -> Tenant:
        """Who asks. Raises ForbiddenError."""
        return self._keys.identify(authorization)

    def tenant(self, name: str) -> Tenant:
        """The tenant of a name, for work that goes on without a connection. Raises ForbiddenError if it is gone."""
        return self._keys.tenant(name)

    @asynccontextmanager
    async def admit(
        self, tenant: Tenant, priority: int, weight: int, limit_s: float | None = None
    ) -> AsyncIterator[None]:
        """Holds a place for `weight` answers.

        Raises OverloadedError when the tenant's rates are used up or too many wait, DeadlineError when the turn does
        not come within `limit_s`.
        """
        self._charge(tenant)
        place = self._queue.place(tenant.name, min(priority, tenant.priority), weight)
        try:
            async with asyncio.timeout(limit_s):
                await place.__aenter__()
        except TimeoutError:
            raise DeadlineError(f"the request's turn did not come within {limit_s:g} s") from None
        try:
            yield
        finally:
            await place.__aexit__(None, None, None)

    def settle(self, tenant: Tenant, tokens: int) -> None:
        """Count the tokens of an answer that has ended."""
        if tenant.tokens_per_minute is not None:
            self._bucket(self._tokens, tenant.name, tenant.tokens_per_minute).take(tokens)

    def _charge(self, tenant: Tenant) -> None:
        if tenant.tokens_per_minute is not None:
            bucket = self._bucket(self._tokens, tenant.name, tenant.tokens_per_minute)
            self._refuse(bucket.wait_s(self._clock(), 1.0), f"{tenant.tokens_per_minute:g} tokens")
        if tenant.requests_per_minute is not None:
            bucket = self._bucket(self._requests, tenant.name, tenant.requests_per_minute)
            self._refuse(bucket.wait_s(self._clock(), 1.0), f"{tenant.requests_per_minute:g} requests")
            bucket.take(1.0)

    def _refuse(self, wait_s: float, what: str) -> None:
        if wait_s > 0:
            error = OverloadedError(f"this key's rate of {what} per minute is used up")
            error.code = "rate_limit_exceeded"
            error.retry_after = wait_s
            raise error

    def _bucket(self, buckets: dict[str, Bucket], name: str, per_minute: float) -> Bucket:
        bucket = buckets.get(name)
        if bucket is None or bucket.per_minute != per_minute:  # new, or changed in the file
            bucket = buckets[name] = Bucket(per_minute, self._clock())
        return bucket
