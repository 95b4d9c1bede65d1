"""Messages that pickle themselves come out as they went in, with every field set and with none but the needed ones."""

from __future__ import annotations

import pickle

import pytest

from actors.errors import OverloadedError
from actors.features import Features
from actors.messages import Alternatives, CommitUpdate, Expansion, Support, VerificationResult

FULL = VerificationResult(
    "s",
    position=7,
    tokens=(1, 2),
    proposed=4,
    accepted=1,
    finish="stop",
    alternatives=(Alternatives(-0.5, ((3, -0.5),)),),
    margins=(0.25, 1.0),
    declined=True,
)


@pytest.mark.parametrize(
    "message",
    [
        Expansion(9, 3, (1,), (0.5,)),
        Expansion(9, 3, (1,), (0.5,), Support((1, 2), (0.5, 0.5))),
        CommitUpdate("s", 3, (1, 2)),
        CommitUpdate("s", 3, (), declined=True),
        CommitUpdate("s", 3, (1,), features=Features("print", 2, 1, b"\x00\x3f")),
        VerificationResult("s", 3, (1,), features=Features("print", 2, 1, b"\x00\x3f")),
        VerificationResult("s", 3, (1,)),
        VerificationResult("s", 3, (1,), 4, 1),
        VerificationResult("s", 3, (1,), declined=True),
        FULL,
    ],
)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_message_comes_out_as_it_went_in(message: object, protocol: int) -> None:
    assert pickle.loads(pickle.dumps(message, protocol)) == message


def test_a_verdict_brings_its_error_along() -> None:
    found = pickle.loads(
        pickle.dumps(VerificationResult("s", 3, (), finish="error", error=OverloadedError("all slots are taken")))
    )
    assert isinstance(found.error, OverloadedError)
    assert str(found.error) == "all slots are taken"


def test_a_branch_that_came_true_is_told_apart() -> None:
    """Of three draft tokens two are accepted, the second of which had been named beside a more likely one."""
    result = VerificationResult("s", 4, (7, 8, 9), proposed=3, accepted=2, branches=(1,))
    assert result.origins() == ["accepted", "branch", "correction"]
    assert pickle.loads(pickle.dumps(result)) == result
    result.cut(1)
    assert (result.branches, result.origins()) == ((), ["accepted"])
