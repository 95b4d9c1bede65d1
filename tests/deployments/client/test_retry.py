"""Pauses between tries."""

from __future__ import annotations

import pytest

from deployments.client.retry import backoff_s


@pytest.mark.parametrize(
    ("attempt", "asked_s", "draw", "expected"),
    [
        (0, 0.0, 1.0, 0.5),
        (3, 0.0, 1.0, 4.0),  # 0.5 doubled three times
        (3, 0.0, 0.25, 1.0),  # jitter is over the whole pause
        (3, 2.0, 0.25, 2.0),  # the server knows better
        (10, 0.0, 1.0, 20.0),  # and not for ever
        (10, 60.0, 1.0, 60.0),
    ],
)
def test_pauses_double_up_to_a_bound_and_are_never_shorter_than_asked(
    attempt: int, asked_s: float, draw: float, expected: float
) -> None:
    assert backoff_s(attempt, asked_s, draw=lambda: draw) == expected


def test_the_first_pause_can_be_chosen() -> None:
    assert backoff_s(2, first_s=0.01, draw=lambda: 0.5) == 0.02
