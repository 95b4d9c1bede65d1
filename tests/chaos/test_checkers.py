"""The checkers of the chaos suite notice what they are there to notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from actors.errors import EngineError, UnavailableError
from actors.messages import Delta, GenerationRequest
from benchmarks.support import emulated_application, fault_schedule
from benchmarks.support.checked_load import MOST_TRIES, CheckedLoad, Told

Script = Callable[[tuple[int, ...], int], tuple[tuple[int, ...], Exception | None]]


class Scripted:
    """Answers as `script` says: from the right tokens and the attempt's number to what is said, and how it ends."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        attempt = int(request.id.rpartition("-")[2])
        tokens, error = self._script(tuple(emulated_application.truth(request)), attempt)
        await asyncio.sleep(0)
        yield Delta(tokens[:10])
        yield Delta(tokens[10:])
        if error is not None:
            raise error

    async def status(self) -> dict[str, object]:
        return {}

    async def ready(self) -> bool:
        return True


async def told(script: Script, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What two clients saw of one answer each."""
    monkeypatch.setattr(UnavailableError, "retry_after", 0.0)
    return await CheckedLoad(Scripted(script), emulated_application.request, emulated_application.truth, 2).stop()


async def test_right_answers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await told(lambda truth, attempt: (truth, None), monkeypatch)
    assert (seen.answers, seen.tokens) == (2, 2 * emulated_application.TOKENS)
    assert (seen.lost, seen.changed, seen.broken) == ([], [], [])


@pytest.mark.parametrize(
    ("script", "place"),
    [
        (lambda truth, attempt: ((*truth[:20], truth[20] + 1, *truth[21:]), None), 20),  # one token changed
        (lambda truth, attempt: ((*truth[:20], *truth[21:]), None), 20),  # one lost
        (lambda truth, attempt: ((*truth[:20], truth[19], *truth[20:]), None), 20),  # one said twice
        (lambda truth, attempt: (truth[:-1], None), emulated_application.TOKENS - 1),  # ended early
    ],
)
async def test_a_wrong_answer_is_noticed(script: Script, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await told(script, monkeypatch)
    assert len(seen.changed) == 2
    assert f"the first difference at {place}" in seen.changed[0]


async def test_what_was_told_before_a_connection_broke_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_then_right(truth: tuple[int, ...], attempt: int) -> tuple[tuple[int, ...], Exception | None]:
        return ((truth[0] + 1,), UnavailableError("gone")) if attempt == 0 else (truth, None)

    seen = await told(wrong_then_right, monkeypatch)
    assert (seen.answers, len(seen.broken), len(seen.changed), seen.lost) == (2, 2, 2, [])


async def test_answers_that_cannot_be_had_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    final = await told(lambda truth, attempt: (truth[:5], EngineError("it broke")), monkeypatch)
    assert (len(final.lost), final.answers) == (2, 0)
    never = await told(lambda truth, attempt: (truth[:5], UnavailableError("gone")), monkeypatch)
    assert (len(never.lost), len(never.broken)) == (2, 2 * MOST_TRIES)


def test_pauses_and_rates_are_of_the_time_asked_for() -> None:
    seen = Told(arrivals=[(0.0, 4), (1.0, 4), (9.0, 2)], gaps=[(0.0, 1.0), (1.0, 8.0)])
    assert seen.longest_gap() == 8.0
    assert seen.longest_gap(until=1.0) == 1.0
    assert seen.longest_gap(since=2.0, until=3.0) == 8.0  # it was under way
    assert seen.rate(0.0, 2.0) == 4.0


def test_a_schedule_holds_every_fault_once_a_round_and_follows_its_seed() -> None:
    plan = fault_schedule.schedule(1, rounds=3)
    assert plan == fault_schedule.schedule(1, rounds=3) != fault_schedule.schedule(2, rounds=3)
    assert Counter(fault for _, fault in plan) == dict.fromkeys(fault_schedule.ALL, 3)
    assert Counter(str(fault) for fault in fault_schedule.ALL)["freeze ingress"] == 0
    assert all(0.5 <= pause <= 1.5 for pause, _ in plan)
