"""Faults at random, seeded times: which processes of an application are killed or stopped, and when.

Tiers are struck one process at a time: the next of a kind is struck when there are two of it again, because what is
shown is that one death loses nothing, not that an application survives its own absence.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.support.processes import KINDS, ApplicationProcess, Kind, find

How = Literal["kill", "freeze"]
WAIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to what."""

    how: How
    kind: Kind

    def __str__(self) -> str:
        return f"{self.how} {self.kind}"


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that happened, at a time of the monotonic clock."""

    fault: Fault
    victim: ApplicationProcess
    at: float


# A frozen ingress replica is a connection that stands still until its process goes on or is replaced: there is
# nobody behind it who could take over, so the suite kills ingress replicas and freezes everything else.
ALL = (*(Fault("kill", kind) for kind in KINDS), *(Fault("freeze", kind) for kind in KINDS if kind != "ingress"))


def schedule(
    seed: int, rounds: int, faults: tuple[Fault, ...] = ALL, spacing_s: float = 1.0
) -> list[tuple[float, Fault]]:
    """(seconds to wait, fault): every fault once a round, in random order, after pauses around `spacing_s`."""
    chance = random.Random(seed)
    return [
        (chance.uniform(0.5, 1.5) * spacing_s, fault)
        for _ in range(rounds)
        for fault in chance.sample(faults, len(faults))
    ]


async def strike(application: str, fault: Fault, chance: random.Random, thaw_after_s: float) -> Struck:
    """Do it to one of at least two. A frozen process goes on after `thaw_after_s`, if it still exists then.

    Raises TimeoutError when there are not two of the kind within a minute and a half.
    """
    deadline = time.monotonic() + WAIT_S
    while len(victims := await find(application, fault.kind)) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{fault}: fewer than two are running")
        await asyncio.sleep(0.1)
    victim = chance.choice(victims)
    at = time.monotonic()
    if fault.how == "kill":
        victim.send(signal.SIGKILL)
    else:
        victim.send(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(thaw_after_s, _thaw, victim)
    return Struck(fault, victim, at)


def _thaw(victim: ApplicationProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        victim.send(signal.SIGCONT)


async def strike_all(
    application: str, plan: list[tuple[float, Fault]], seed: int, thaw_after_s: float, say: Callable[[str], None]
) -> list[Struck]:
    """Carry out a plan; returns when the last frozen process has had its time."""
    chance, struck = random.Random(seed), list[Struck]()
    for pause, fault in plan:
        await asyncio.sleep(pause)
        struck.append(await strike(application, fault, chance, thaw_after_s))
        say(f"{fault}: {struck[-1].victim.name}")
    await asyncio.sleep(thaw_after_s)
    return struck
