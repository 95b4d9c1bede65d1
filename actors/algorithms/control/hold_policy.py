"""The waiting rule: how long a target pass is worth holding for drafts that are due.

Waiting costs everyone in the pass: each second held is worth the tokens that the target commits in a second, as it
has done lately. It gains, for each sequence whose drafts are due, the probability that the awaited tokens are
accepted. The pace at which drafts arrive is learned from the holds themselves. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping

UNTRIED = 128
"""Passes after which a wait is tried that does not look worth it, so that a draft that recovered is noticed."""

CATCHING_UP = 1.2
"""Cost of a second of waiting, over what the target commits in a second. A pass without drafts is not lost: it gives
the draft time for a deep tree under whatever it commits, and few of those are misses. (Measured with
cluster.planning.simulator: 1.0 waits too often when many sequences share a pass, 1.3 too rarely for one sequence.)"""

LONGEST_SHARE = 1.0
"""All holds before one pass add up to at most so many usual passes: enough for a draft and a target to take turns."""

SOONEST_S = 2e-4
"""Waits shorter than this are not worth a timer."""


class _Arrival:
    """Seconds that one sequence's draft takes: time waited over arrivals, so that what never came counts too."""

    __slots__ = ("_arrivals", "_fresh", "_waited")

    def __init__(self) -> None:
        self._waited = 0.0
        self._arrivals = 0.0
        self._fresh = False

    def observe(self, waited: float, arrivals: int) -> None:
        self._fresh = self._fresh or waited > 0.0
        self._waited += waited
        self._arrivals += arrivals

    def end_hold(self) -> None:
        """The last few holds in which something was waited for count."""
        if self._fresh:
            self._waited *= 0.8
            self._arrivals *= 0.8
            self._fresh = False

    @property
    def seconds(self) -> float | None:
        """None while nothing was waited for."""
        return self._waited / max(self._arrivals, 0.1) if self._waited > 0.0 else None


class HoldPolicy:
    """Decides when to hold a pass of one target.

    cap: seconds that all holds before one pass may add up to; None leaves it to what passes take (LONGEST_SHARE).
    """

    def __init__(self, cap: float | None = None) -> None:
        self._cap = cap
        self._pass_seconds = 0.0
        """Of a usual pass; 0 while none was seen."""
        self._followed: set[str] = set()
        """Sequences for which drafts have come before."""
        self._first = _Arrival()
        """From the end of a pass to the first draft token of a sequence that had none."""
        self._next = _Arrival()
        """From one draft token of a sequence to its next."""
        self._acceptance = 0.7
        """Of the draft's first guess."""
        self._any = 0.7
        """Of any guess that was verified in the same place: where trees are verified, more."""
        self._committed = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._now = 0.0
        self._seen: dict[str, int] = {}
        self._grew_at = 0.0
        self._idle_passes = UNTRIED
        self._try_again = False

    def offer(self, sequence: str) -> None:
        """Drafts for `sequence` arrived."""
        self._followed.add(sequence)

    def forget(self, sequence: str) -> None:
        """The sequence has ended."""
        self._followed.discard(sequence)

    def end_pass(self, rows: int, accepted: int, tried: int, seconds: float, branches: int = 0) -> None:
        """A pass of `seconds` over `rows` sequences accepted draft tokens in `accepted` of `tried` places up to each
        rejection, `branches` of which were not the first guess there."""
        held = self._elapsed(self._now)
        self._pass_seconds += (0.1 if self._pass_seconds else 1.0) * (seconds - self._pass_seconds)
        self._committed += 0.05 * (rows + accepted - self._committed)
        self._seconds += 0.05 * (seconds + held - self._seconds)
        if tried:
            weight = tried / (tried + 50.0)
            self._acceptance += weight * ((accepted - branches) / tried - self._acceptance)
            self._any += weight * (accepted / tried - self._any)
        self._first.end_hold()
        self._next.end_hold()
        self._since = None
        self._idle_passes = UNTRIED if self._try_again else self._idle_passes + 1
        self._try_again = False

    def hold(self, now: float, ready: Mapping[str, int], limit: int, token_seconds: float, demanded: int) -> float:
        """Seconds to hold from `now` on; 0 means go.

        ready: draft tokens at hand per sequence. limit: most that are of use. token_seconds: what verifying one
        more token adds to a pass. demanded: wait until every sequence has so many, whether it pays or not.
        """
        awaited = {name: count for name, count in ready.items() if count < limit and name in self._followed}
        if self._since is None:
            self._since = self._grew_at = now
        else:
            self._learn(now, ready, limit)
        self._now, self._seen = now, awaited
        due = [0] * limit
        for count in awaited.values():
            due[count] += 1
        left = self._longest(demanded) - self._elapsed(now)
        if left < SOONEST_S or not awaited:
            return 0.0
        wait = (left if any(due[:demanded]) else 0.0) if demanded else self._worth(now, due, left, token_seconds)
        if wait < SOONEST_S:
            return 0.0
        self._idle_passes = 0
        return wait

    def _longest(self, demanded: int) -> float:
        """Seconds that all holds before this pass may add up to. Who demands to wait is bounded by the cap alone."""
        share = LONGEST_SHARE * self._pass_seconds
        if self._cap is None:
            return share
        return self._cap if demanded else min(share, self._cap)

    def _elapsed(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def _learn(self, now: float, ready: Mapping[str, int], limit: int) -> None:
        """What has come since the last call, of what was awaited then."""
        passed = now - self._now
        firsts = nexts = 0
        for name, before in self._seen.items():
            grown = min(ready.get(name, before), limit) - before
            if grown > 0:
                firsts += before == 0
                nexts += grown - (before == 0)
        usual = self._first.seconds
        if firsts and usual is not None and self._elapsed(now) < usual / 2:
            self._try_again = True  # much sooner than it used to be: find out at once whether that lasts
        empty = sum(1 for count in self._seen.values() if count == 0)
        self._first.observe(passed * empty, firsts)
        self._next.observe(passed * (len(self._seen) - empty), nexts)
        if firsts or nexts:
            self._grew_at = now

    def _worth(self, now: float, due: list[int], left: float, token_seconds: float) -> float:
        """The wait with the largest gain over its cost; 0 if there is none."""
        usual = self._first.seconds
        if usual is None or self._idle_passes >= UNTRIED:  # no experience, or an old one: try
            return left if due[0] else 0.0
        limit = len(due)
        rate = self._committed / self._seconds if self._seconds > 0.0 else 0.0
        # The next token of a path comes with its alternatives.
        values = [max(0.0, self._acceptance**n * self._any - rate * token_seconds) for n in range(limit)]
        gap = max(self._next.seconds or usual / 2, SOONEST_S)
        # What is overdue is expected to take as long again.
        first_in, next_in = abs(usual - self._elapsed(now)), abs(gap - (now - self._grew_at))
        best, best_wait = 0.0, 0.0
        for start in (first_in, next_in):
            for more in range(limit):
                wait = start + more * gap
                if wait > left:
                    break
                gain = -CATCHING_UP * rate * wait
                for n, count in enumerate(due):
                    begin = next_in if n else first_in
                    if count and wait >= begin:
                        gain += count * sum(values[n : n + int((wait - begin) / gap + 1.001)])
                if gain > best:
                    best, best_wait = gain, max(wait, SOONEST_S)
        return best_wait
