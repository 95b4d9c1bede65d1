"""Time and trouble of emulated hardware: passes that take as long as they are said to, and faults on demand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from actors.errors import EngineError
from actors.settings import Settings

LEFT_TO_OTHERS_S = 0.0005
"""Most of a pass that is slept away before its bookkeeping."""


class Pacer:
    """Makes a pass end a given time after it began, by sleeping.

    A sleep returns late by the timer's slack; the next pass is shortened by that much, so that over many passes the
    time is the configured one. Lateness above `forgiven_s` is not the timer's (a starved core, a busy interpreter)
    and stays in the measurement, as does a pass whose own bookkeeping took longer than its time.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None], forgiven_s: float = 0.0005) -> None:
        self._clock = clock
        self._sleep = sleep
        self._forgiven = forgiven_s
        self._late = 0.0

    def begin(self, seconds: float) -> float:
        """Start a pass of about `seconds`; returns when it started.

        The processor is left to others first, as it is while a device computes: without that, an engine's own
        bookkeeping would keep this process's other threads from sending what the last pass decided.
        """
        started = self._clock()
        self._sleep(min(0.2 * seconds, LEFT_TO_OTHERS_S))
        return started

    def finish(self, started: float, seconds: float) -> None:
        """Return `seconds` after the clock showed `started`."""
        deadline = started + seconds - self._late
        self._late = 0.0
        slept = False
        while (left := deadline - self._clock()) > 0:
            self._sleep(left)
            slept = True
        if slept:
            self._late = min(self._clock() - deadline, self._forgiven)


class Fault(Settings):
    """Something goes wrong at pass (or draft step) number `at`, counted from 0."""

    kind: Literal["freeze", "crash", "slow"]
    at: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(gt=0)] | None = None
    """freeze: for how long; None is for ever (until `Faults.thaw`)."""
    factor: Annotated[float, Field(gt=0)] = 1.0
    """slow: multiplies the time of a pass."""
    passes: Annotated[int, Field(ge=1)] | None = None
    """slow: for how many passes; None is for good."""
    hard: bool = False
    """crash: end the process, rather than raise."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind != "freeze" and self.seconds is not None:
            raise ValueError("seconds belongs to kind 'freeze'")
        if self.kind != "slow" and (self.passes is not None or self.factor != 1.0):
            raise ValueError("factor and passes belong to kind 'slow'")
        if self.kind != "crash" and self.hard:
            raise ValueError("hard belongs to kind 'crash'")
        return self


@dataclass
class _Slowness:
    factor: float
    left: int | None


class Faults:
    """The handle by which a running engine is frozen, crashed or slowed down. Callable from any thread."""

    def __init__(self, plan: Sequence[Fault] = (), leave: Callable[[int], None] = os._exit) -> None:
        self._plan: dict[int, list[Fault]] = {}
        for fault in plan:
            self._plan.setdefault(fault.at, []).append(fault)
        self._leave = leave
        self._number = 0
        self._lock = threading.Lock()
        self._thawed = threading.Event()
        self._thawed.set()
        self._slow: list[_Slowness] = []
        self._crash: Fault | None = None

    def freeze(self) -> None:
        """Stand still from the next pass on, until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        """End a freeze."""
        self._thawed.set()

    def slow(self, factor: float, passes: int | None = None) -> None:
        """Multiply the time of the next `passes` passes (all, when None)."""
        with self._lock:
            self._slow.append(_Slowness(factor, passes))

    def crash(self, *, hard: bool = False) -> None:
        """Fail at the next pass, and at every one after it."""
        with self._lock:
            self._crash = Fault(kind="crash", at=0, hard=hard)

    def clear(self) -> None:
        """Forget everything that was injected or planned."""
        with self._lock:
            self._plan.clear()
            self._slow.clear()
            self._crash = None
        self._thawed.set()

    def begin_pass(self) -> float:
        """Called by an engine at the start of a pass. Returns the factor on its time.

        Blocks while frozen; raises EngineError, or ends the process, on a crash.
        """
        with self._lock:
            number, self._number = self._number, self._number + 1
            due = self._plan.pop(number, [])
        for fault in due:
            self._apply(fault)
        self._thawed.wait()
        with self._lock:
            if self._crash is not None:
                if self._crash.hard:
                    self._leave(70)
                raise EngineError(f"emulated crash at pass {number}")
            factor = 1.0
            for slowness in self._slow:
                factor *= slowness.factor
                if slowness.left is not None:
                    slowness.left -= 1
            self._slow = [slowness for slowness in self._slow if slowness.left != 0]
            return factor

    def _apply(self, fault: Fault) -> None:
        if fault.kind == "crash":
            self.crash(hard=fault.hard)
        elif fault.kind == "slow":
            self.slow(fault.factor, fault.passes)
        elif fault.seconds is None:
            self.freeze()
        else:
            self._thawed.clear()
            self._thawed.wait(fault.seconds)
            self._thawed.set()
