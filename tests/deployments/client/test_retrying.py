"""What may pass is tried again, as often as was said and no sooner than was asked for."""

from __future__ import annotations

import pytest

from actors.errors import OverloadedError
from deployments.client.retrying import LONGEST_PAUSE_S, Retries


class Attempts:
    def __init__(self, *errors: Exception) -> None:
        self.errors, self.made = list(errors), 0

    async def __call__(self) -> int:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.made


def busy() -> OverloadedError:
    error = OverloadedError("full")
    error.retry_after = 0.0
    return error


@pytest.mark.parametrize("failures", [0, 1, 3])
async def test_the_first_success_is_the_answer(failures: int) -> None:
    attempts = Attempts(*(busy() for _ in range(failures)))
    assert await Retries(3, pause_s=0.0).run(attempts, (OverloadedError,)) == failures + 1


async def test_the_last_error_is_raised_and_others_at_once() -> None:
    attempts = Attempts(*(busy() for _ in range(9)))
    with pytest.raises(OverloadedError):
        await Retries(2, pause_s=0.0).run(attempts, (OverloadedError,))
    assert attempts.made == 3
    attempts = Attempts(ValueError())
    with pytest.raises(ValueError, match=r"^$"):
        await Retries(2, pause_s=0.0).run(attempts, (OverloadedError,))
    assert attempts.made == 1


def test_pauses_double_up_to_a_bound_and_are_no_shorter_than_asked_for() -> None:
    retries = Retries(9, pause_s=0.5)
    assert [retries.pause(number, 0.0, 1.0) for number in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert retries.pause(30, 0.0, 0.5) == LONGEST_PAUSE_S / 2
    assert retries.pause(0, 7.0, 0.1) == 7.0
