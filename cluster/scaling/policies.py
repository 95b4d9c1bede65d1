"""Autoscaling policies, one per tier: what the replicas report goes in, how many there should be comes out.

Pure: no Ray, no clock of its own. Ray Serve calls the policies through deployments/tiers/autoscaling_policies.py
and applies its own delays and bounds to what they return; the traffic simulator calls the same functions and
applies `Pace`.

Both policies ask for a number that follows from the demand, not from what the last answer was, so that replicas that
are still starting are not asked for twice; where only a ratio is known (latency, starvation), nothing more is asked
for until those that were asked for have come and what is reported is about them.

Whether fewer would do cannot be seen from how well it goes now: without a memory the draft tier would give a replica
up, find that it starves, and ask for it again, for ever. So a policy remembers for a while at which load it went
badly (`Memory`), and stays clear of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from actors.settings import Settings

Share = Annotated[float, Field(gt=0, le=1)]


class TargetGoals(Settings):
    """When a target tier is the right size."""

    utilisation: Share = 0.8
    """Sequences per slot to aim for: the rest is room for what comes before a new replica is up."""
    kv_share: Share = 0.9
    """KV positions in use, at most."""
    inter_token_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Latency objective between tokens of one answer; None: none."""
    backlog_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """A large number that waits is to be served within this time."""
    slack: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """A replica is only given up if the rest would still be this far below the goals."""
    growth: Annotated[float, Field(gt=1, le=10)] = 4.0
    """At most this many times as many replicas as run now, those on their way included: what piles up while replicas
    start is no reason to ask for ever more of them."""


class DraftGoals(Settings):
    """When a draft tier is the right size."""

    utilisation: Share = 0.9
    """Sequences per draft slot."""
    starved_above: Share = 0.15
    """More passes without a proposal than this, and a draft is added."""
    starved_below: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Fewer, and one may go."""
    busy_above: Share = 0.5
    """Drafts that are less busy than this have time to spare: where passes find no proposal all the same, it is not for
    want of drafts."""
    busy: Share = 0.8
    """Drafts that do not starve anyone may become as busy as this."""
    declined_above: Share = 0.9
    """The controllers turn down this share of proposals: speculation does not pay, as few drafts as allowed remain."""
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """How far to stay below a load at which it went badly."""
    slack: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """A draft is only given up if the rest would still be this much further below it."""
    growth: Annotated[float, Field(gt=1, le=10)] = 2.0
    """At most this many times as many replicas as run now."""
    per_target: Annotated[float, Field(gt=0, le=64)] | None = None
    """Drafts for each target to begin with, as `outrider plan` advises; None: one draft, and the rest is found out."""


LOOK_BACK_S = 15.0
"""What is reported is a mean over about so long, unless it is configured otherwise."""
SETTLE = 1.5
"""After a change of size, what is reported is about the size before for this many look-backs: reports travel, too."""
FORGET_S = 3600.0
"""Hardware, models and requests change: after this time a limit is tried again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a policy knows beyond what is reported now; the caller keeps it from call to call.

    starved_at: fewest sequences per draft at which too many passes found no proposal. declined_at: fewest sequences
    per target at which the controllers turned proposals down.
    """

    replicas: int = -1
    since: float = 0.0
    """Since when there have been so many; at the first look, always."""
    asked: int = 0
    """Replicas last asked for because the demand was more than those that ran could carry; 0: they could."""
    relieved: float = -math.inf
    """When replicas last came that the demand had asked for."""
    starved_at: float = math.inf
    starved_when: float = 0.0
    declined_at: float = math.inf
    declined_when: float = 0.0

    def looked(self, now: float, replicas: int) -> Memory:
        """The memory at `now`, with that many replicas running."""
        memory = self
        if replicas != self.replicas:
            memory = replace(self, replicas=replicas, since=-math.inf if self.replicas < 0 else now)
            if 0 < self.replicas < replicas <= self.asked:
                memory = replace(memory, relieved=now)
        if now - memory.starved_when > FORGET_S:
            memory = replace(memory, starved_at=math.inf)
        if now - memory.declined_when > FORGET_S:
            memory = replace(memory, declined_at=math.inf)
        return memory

    def settled(self, now: float, look_back_s: float) -> bool:
        """Is what is reported about the replicas that run now?"""
        return now - self.since >= SETTLE * look_back_s

    def works_off(self, now: float, look_back_s: float, backlog_s: float) -> bool:
        """Have replicas just come for a demand that piled up while they started? They are given the time for it. A tier
        that was deployed, or that a lost replica came back to, was not sized for what is asked of it now.
        """
        return now - self.relieved < SETTLE * look_back_s + backlog_s

    def starving(self, now: float, per_draft: float) -> Memory:
        return replace(self, starved_at=min(self.starved_at, per_draft), starved_when=now)

    def declining(self, now: float, per_target: float) -> Memory:
        return replace(self, declined_at=min(self.declined_at, per_target), declined_when=now)


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """One target replica. Sequences, slots, share of KV positions in use, seconds between tokens of a sequence."""

    running: float = 0.0
    waiting: float = 0.0
    slots: float = 1.0
    kv_share: float = 0.0
    inter_token_s: float = 0.0
    residence_s: float = 0.0
    """Seconds that a sequence is decoded for, on average; 0: not known yet."""
    starved: float = 0.0
    """Share of rows that wanted a proposal and found none: the draft tier's business, seen from here."""
    declined: float = 0.0
    """Share of rows whose proposal was not worth verifying."""


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """One draft replica: sequences it follows, slots for them, and the share of the time in which it drafted."""

    sessions: float = 0.0
    slots: float = 1.0
    busy: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas there should be, and why, for people. `memory` is for the next call."""

    replicas: int
    reason: str
    memory: Memory = Memory()


def target_replicas(
    loads: Sequence[TargetLoad],
    current: int,
    starting: int,
    waiting_outside: float,
    goals: TargetGoals,
    memory: Memory = Memory(),
    now: float = 0.0,
    look_back_s: float = LOOK_BACK_S,
) -> Decision:
    """Replicas for the target tier.

    current: replicas that run; starting: those on their way. waiting_outside: requests that no replica has taken yet
    (there may be none to take them). now: seconds of any clock. look_back_s: what is reported is a mean over so long.
    """
    memory = memory.looked(now, current)
    if not loads:
        if waiting_outside > 0 and current + starting == 0:
            return Decision(1, "requests wait and no target runs", memory)
        return Decision(current + starting, "no replica has reported yet", memory)
    slots = sum(load.slots for load in loads) / len(loads)
    running = sum(load.running for load in loads)
    demand = running + _asked_for(loads, slots * current, goals) + waiting_outside
    wanted = demand / (slots * goals.utilisation)
    reason = f"{demand:.0f} sequences for {slots:.0f} slots a replica"
    held = current + starting
    if wanted > held and memory.works_off(now, look_back_s, goals.backlog_s):
        # What piled up while replicas started is being worked off by those that have come.
        wanted, reason = float(held), "replicas have just come, and work off what had piled up"
    kv = current * _mean([load.kv_share for load in loads]) / goals.kv_share
    if kv > wanted:
        wanted, reason = kv, "KV use"
    if goals.inter_token_ms is not None:
        slow = current * max(load.inter_token_s for load in loads) * 1e3 / goals.inter_token_ms
        # A ratio, not a demand: it says nothing new until the replicas already asked for are up and seen.
        if slow > max(wanted, current) and not starting and memory.settled(now, look_back_s):
            wanted, reason = slow, "latency between tokens above its objective"
        elif slow * (1 + goals.slack) > current > wanted:
            wanted, reason = float(current), "latency between tokens near its objective"
    decision = _settle(wanted, current, starting, goals.growth, goals.slack, reason, memory)
    asked = decision.replicas if decision.replicas > current else 0
    return replace(decision, memory=replace(memory, asked=asked))


def _asked_for(loads: Sequence[TargetLoad], capacity: float, goals: TargetGoals) -> float:
    """Slots that the waiting sequences ask for. They are a stock, not a demand: while replicas start, far more piles up
    than is ever served at once. As many as the tier holds are met with a slot each; of more only as many as it takes
    to serve them within `backlog_s`, at what each takes now (Little's law). capacity: slots of the tier.
    """
    waiting = sum(load.waiting for load in loads)
    residence = _weighted([(load.residence_s, load.running) for load in loads])
    if not residence:
        return waiting
    return min(waiting, max(capacity, waiting * residence / goals.backlog_s))


def draft_replicas(
    loads: Sequence[DraftLoad],
    targets: Sequence[TargetLoad],
    current: int,
    starting: int,
    goals: DraftGoals,
    memory: Memory = Memory(),
    now: float = 0.0,
    look_back_s: float = LOOK_BACK_S,
) -> Decision:
    """Replicas for the draft tier, from its own load and from what the targets miss.

    With no draft running, targets that run sequences bring the first one back, unless speculation did not pay at this
    load; Serve's bounds decide whether that is allowed.
    """
    memory = memory.looked(now, current)
    running = sum(load.running for load in targets)
    per_target = running / len(targets) if targets else 0.0
    declined = _weighted([(load.declined, load.running) for load in targets])
    starved = _weighted([(load.starved, load.running) for load in targets])
    if declined > goals.declined_above and current > 0:
        memory = memory.declining(now, per_target)
        reason = f"{declined:.0%} of proposals are turned down: speculation does not pay at this load"
        return Decision(0, reason, memory)
    if running == 0:
        return Decision(0, "no sequences run", memory)
    if per_target >= memory.declined_at * (1 - goals.margin):
        return Decision(0, "speculation did not pay at this load", memory)
    if current + starting == 0:
        first = math.ceil((goals.per_target or 0.0) * len(targets) - 1e-9)
        return Decision(max(1, first), "sequences run without a draft", memory)
    if not loads:
        return Decision(current + starting, "no replica has reported yet", memory)
    slots = sum(load.slots for load in loads) / len(loads)
    wanted = sum(load.sessions for load in loads) / (slots * goals.utilisation)
    reason = "sequences per draft"
    busy = _mean([load.busy for load in loads])
    if starved > goals.starved_above and busy < goals.busy_above:
        wanted = max(wanted, float(current))
        reason = "passes find no proposal, though drafts have time to spare"
    elif starved > goals.starved_above and not starting and memory.settled(now, look_back_s):
        memory = memory.starving(now, running / max(1, current))
        wanted = max(wanted, current * _relief(starved, goals))
        reason = f"{starved:.0%} of passes found no proposal"
    elif starved > goals.starved_below:
        wanted = max(wanted, float(current))
        reason = "starvation within bounds"
    else:  # where it is not known how many it takes, one less is tried, or as many as are idle
        if memory.starved_at == math.inf:
            idle = current * busy / goals.busy if memory.settled(now, look_back_s) else float(current)
            wanted = max(wanted, min(current - 1.0, idle))
        reason = "proposals are ready with room to spare"
    clear = running / (memory.starved_at * (1 - goals.margin))
    least = clear if clear > current else min(float(current), clear / (1 - goals.slack))
    if least > wanted:
        wanted, reason = least, "fewer starved at this load"
    if wanted > max(1.0, running):  # one sequence is one draft's work
        wanted, reason = max(1.0, running), "a draft for each sequence"
    return _settle(wanted, current, starting, goals.growth, 0.0, reason, memory)


def _relief(starved: float, goals: DraftGoals) -> float:
    """How many times as many drafts are asked for when this share of passes finds no proposal: 1 + starved, but never
    more than feed so many passes that one draft may go again.

    n drafts feed a share 1 - starved of the passes, so that m feed (1 - starved) m / n: at n (1 - starved_below) /
    (1 - starved) starvation has come down to `starved_below`. One more would be given up again, and the policy would
    swing over two counts and more whenever it looks whether fewer do.
    """
    enough = (1 - goals.starved_below) / (1 - starved) if starved < 1 else math.inf
    return min(1 + starved, enough)


def _settle(
    wanted: float, current: int, starting: int, growth: float, slack: float, reason: str, memory: Memory
) -> Decision:
    """A whole number near `wanted`: never many at once, and fewer only if that leaves slack."""
    replicas = math.ceil(wanted - 1e-9)
    held = current + starting
    if replicas < held:
        replicas = min(held, math.ceil(wanted / (1 - slack) - 1e-9))
    most = max(held, current + 1, math.floor(current * growth))
    return Decision(max(0, min(replicas, most)), reason, memory)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _weighted(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / weight if weight else 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Applies a decision as Ray Serve does: only once it has pointed the same way for the whole delay."""

    upscale_delay_s: float
    downscale_delay_s: float
    minimum: int
    maximum: int
    direction: int = 0
    since: float = 0.0

    def apply(self, now: float, current: int, wanted: int) -> tuple[int, Pace]:
        """Replicas from now on, and the pace to go on with."""
        wanted = max(self.minimum, min(self.maximum, wanted))
        direction = (wanted > current) - (wanted < current)
        since = self.since if direction == self.direction else now
        delay = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
        if direction and now - since >= delay:
            return wanted, replace(self, direction=0, since=now)
        return current, replace(self, direction=direction, since=since)
