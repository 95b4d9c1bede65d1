"""An actor that keeps dying is placed again ever more rarely, and at last not here; one that stands still while it is
built is found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest

from actors.errors import EngineError
from cluster.scaling.supervision import Construction, Supervision, built


def test_a_crash_loop_backs_off_and_ends() -> None:
    supervision, now, pauses = Supervision(), 100.0, []
    while (pause := supervision.died(now)) is not None:
        pauses.append(pause)
        now += pause + 0.5
    # At once, then doubling from one second; the sixth death within ten minutes is the last.
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_a_death_now_and_then_never_waits() -> None:
    supervision = Supervision()
    assert [supervision.died(hour * 3600.0) for hour in range(24)] == [0.0] * 24


def test_old_deaths_are_forgotten_one_by_one() -> None:
    supervision = Supervision()
    assert [supervision.died(now) for now in (0.0, 500.0)] == [0.0, 1.0]
    assert supervision.died(601.0) == 1.0  # the one at 0 no longer counts, the one at 500 does


class Actor:
    """Its model is built after the last of `pings`, each of which takes ten seconds of its own clock: True is answered,
    False is not in time, an error is what it says."""

    def __init__(self, pings: Iterable[bool | Exception]) -> None:
        self.now = 0.0
        self._pings: Iterator[bool | Exception] = iter(pings)
        self._model: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ping(self) -> None:
        self.now += 10.0
        answer = next(self._pings, None)
        if answer is None:
            self._model.set_result("card")
        elif isinstance(answer, Exception):
            raise answer
        elif not answer:
            raise TimeoutError

    async def built(self) -> str:
        limits = Construction(began=0.0, first_sign_s=30.0, silence_s=20.0)
        return await built(self._model, self.ping, limits, lambda: self.now, 0.0)


async def test_a_model_may_take_its_time_while_its_actor_answers() -> None:
    """A first sign after 30 s of 30, then silences of 20 s of 20, for half an hour."""
    assert await Actor([False, False, True, *[False, True] * 90]).built() == "card"


@pytest.mark.parametrize(
    ("pings", "reason", "at"),
    [
        ([False] * 9, "no sign of life within 30 s", 40.0),
        ([True, *[False] * 9], "silent for 20 s", 40.0),  # the last sign at 10
        ([False, True, RuntimeError("a rank has died")], "a rank has died", 30.0),
    ],
)
async def test_one_that_stands_still_while_it_is_built_is_found(
    pings: list[bool | Exception], reason: str, at: float
) -> None:
    actor = Actor(pings)
    with pytest.raises((EngineError, RuntimeError), match=reason):
        await actor.built()
    assert actor.now == at
