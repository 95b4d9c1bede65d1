"""An actor that keeps dying is placed again ever more rarely, and at last not here."""

from __future__ import annotations

from cluster.supervision import Supervision


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
