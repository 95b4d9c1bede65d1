"""The waiting rule: how long a target pass is worth holding for drafts that are due.

Waiting costs everyone in the pass: each second held is worth the tokens that the target commits in a second, as it
has done lately. It gains, for each sequence whose drafts are due, the probability that the awaited tokens are
accepted. The pace at which drafts arrive is learned from the holds themselves. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping

UNTRIED = 64
"""Passes after which a wait is tried that does not look worth it, so that a draft that recovered is noticed."""

CATCHING_UP = 1.2
"""Cost of a second of waiting, over what the target commits in a second. A pass without drafts is not lost: it gives
the draft time for a deep tree under whatever it commits, and few of those are misses. (Measured with
cluster.simulator: 1.0 waits too often when many sequences share a pass, 1.3 too rarely for one sequence.)"""

SOONEST_S = 2e-4
"""Waits shorter than this are not worth a timer."""


class _Arrival:
    """How long drafts take to arrive, and how often they do when waited for."""

    __slots__ = ("reliability", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.reliability = 1.0

    def came(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else self.seconds + 0.2 * (seconds - self.seconds)
        self.reliability += 0.2 * (1.0 - self.reliability)

    def failed(self) -> None:
        self.reliability *= 0.7

    def due_in(self, elapsed: float) -> float:
        """From `elapsed` on. What is overdue is expected to take as long again."""
        return abs((self.seconds or 0.0) - elapsed)


class WaitingRule:
    """Decides when to hold a pass of one target. longest: seconds that all holds before one pass may add up to."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._followed: set[str] = set()
        """Sequences for which drafts have come before."""
        self._first = _Arrival()
        """From the end of a pass to the first draft token of a sequence that had none."""
        self._next = _Arrival()
        """From one draft token of a sequence to its next."""
        self._acceptance = 0.7
        self._committed = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._seen: dict[str, int] = {}
        self._grew_at = 0.0
        self._now = 0.0
        self._awaited: set[int] = set()
        self._idle_passes = UNTRIED

    def offer(self, sequence: str) -> None:
        """Drafts for `sequence` arrived."""
        self._followed.add(sequence)

    def forget(self, sequence: str) -> None:
        """The sequence has ended."""
        self._followed.discard(sequence)

    def end_pass(self, rows: int, accepted: int, tried: int, seconds: float) -> None:
        """A pass of `seconds` over `rows` sequences accepted `accepted` of `tried` tokens up to each rejection."""
        held = self._elapsed(self._now)
        self._committed += 0.05 * (rows + accepted - self._committed)
        self._seconds += 0.05 * (seconds + held - self._seconds)
        if tried:
            weight = tried / (tried + 50.0)
            self._acceptance += weight * (accepted / tried - self._acceptance)
        self._since = None
        self._idle_passes += 1

    def hold(self, now: float, ready: Mapping[str, int], limit: int, token_seconds: float, demanded: int) -> float:
        """Seconds to hold from `now` on; 0 means go.

        ready: draft tokens at hand per sequence. limit: most that are of use. token_seconds: what verifying one
        more token adds to a pass. demanded: wait until every sequence has so many, whether it pays or not.
        """
        if self._since is None:
            self._since = self._grew_at = now
            self._seen = dict(ready)
            self._awaited = set()
        else:
            self._learn(now, ready)
        self._now = now
        due = [0] * limit
        for name, count in ready.items():
            if count < limit and name in self._followed:
                due[count] += 1
        left = self._longest - self._elapsed(now)
        wait = 0.0
        if left >= SOONEST_S and any(due):
            wait = (left if any(due[:demanded]) else 0.0) if demanded else self._worth(now, due, left, token_seconds)
        if wait >= SOONEST_S:
            self._idle_passes = 0
            return wait
        self._give_up(now)
        return 0.0

    def _elapsed(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def _learn(self, now: float, ready: Mapping[str, int]) -> None:
        grew = False
        for name, count in ready.items():
            before = self._seen.get(name, count)
            if count <= before:
                continue
            grew = True
            if before == 0:
                self._first.came(self._elapsed(now))
            else:
                self._next.came((now - self._grew_at) / (count - before))
        if grew:
            self._seen = dict(ready)
            self._grew_at = now

    def _worth(self, now: float, due: list[int], left: float, token_seconds: float) -> float:
        """The wait with the largest gain over its cost; 0 if there is none."""
        elapsed, limit = self._elapsed(now), len(due)
        if self._first.seconds is None or self._idle_passes >= UNTRIED:  # no experience, or an old one: try
            self._awaited.add(0)
            return left if due[0] else 0.0
        rate = CATCHING_UP * self._committed / self._seconds if self._seconds > 0 else 0.0
        gap = self._next.seconds if self._next.seconds is not None else self._first.seconds / 2
        first_in = self._first.due_in(elapsed)
        next_in = abs(gap - (now - self._grew_at))
        values = [max(0.0, self._acceptance ** (n + 1) - rate / CATCHING_UP * token_seconds) for n in range(limit)]
        gap = max(gap, SOONEST_S)
        best, best_wait = 0.0, 0.0
        for start in (first_in, next_in):
            for more in range(limit):
                wait = start + more * gap
                if wait > left:
                    break
                gain = -rate * wait
                for n, count in enumerate(due):
                    if count:
                        begin, arrival = (first_in, self._first) if n == 0 else (next_in, self._next)
                        come = int((wait - begin) / gap + 1.001) if wait >= begin else 0
                        gain += count * arrival.reliability * sum(values[n : n + come])
                if gain > best:
                    best, best_wait = gain, wait
        if best_wait:
            self._awaited.add(0 if due[0] and best_wait >= first_in else 1)
        return max(best_wait, SOONEST_S) if best_wait else 0.0

    def _give_up(self, now: float) -> None:
        """The hold ends. What was awaited for twice its usual time and did not come has failed."""
        first, following = self._first, self._next
        patience = self._longest if first.seconds is None else min(2 * first.seconds, self._longest)
        if 0 in self._awaited and 0 in self._seen.values() and self._elapsed(now) >= patience - SOONEST_S:
            first.failed()
            if first.seconds is None:
                first.seconds = 2 * self._longest  # longer than anyone waits: not before the next trial
        if 1 in self._awaited and following.seconds is not None and now - self._grew_at >= 2 * following.seconds:
            following.failed()
        self._awaited = set()
