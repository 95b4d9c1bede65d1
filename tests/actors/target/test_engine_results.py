"""What an engine that schedules itself hands out becomes one result per pass, whatever comes together or is lost."""

from __future__ import annotations

from actors.messages import Alternatives, VerificationResult
from actors.target.engine_results import by_pass


def put_together(output: VerificationResult, *reports: VerificationResult) -> list[VerificationResult]:
    return by_pass(output, {report.position: report for report in reports}.get)


def test_tokens_of_two_passes_become_two_results() -> None:
    view = Alternatives(-1.0)
    output = VerificationResult("a", 10, (1, 2, 3, 4, 5), alternatives=(view,) * 5)
    first = VerificationResult("a", 10, (1, 2, 3), proposed=4, accepted=2, margins=(0.1, 0.2, 0.3))
    one, other = put_together(output, first, VerificationResult("a", 13, (4, 5), proposed=1, accepted=1))
    assert (one.position, one.tokens, one.proposed, one.accepted) == (10, (1, 2, 3), 4, 2)
    assert one.origins() == ["accepted", "accepted", "correction"]
    assert (one.margins, len(one.alternatives)) == ((0.1, 0.2, 0.3), 3)
    assert (other.position, other.tokens, other.origins()) == (13, (4, 5), ["accepted", "bonus"])


def test_a_stop_inside_a_block_cuts_it() -> None:
    output = VerificationResult("a", 10, (1, 2), finish="stop")
    [result] = put_together(output, VerificationResult("a", 10, (1, 2, 3, 4), 3, 3, margins=(1.0,) * 4))
    assert (result.tokens, result.accepted, result.finish, result.margins) == ((1, 2), 2, "stop", (1.0, 1.0))


def test_a_report_longer_than_what_came_with_it_says_nothing_of_the_rest() -> None:
    """Two passes, of which the first reported three tokens and two were handed out: the third comes next time."""
    report = VerificationResult("a", 10, (1, 2, 3), 2, 2, declined=True)
    [result] = put_together(VerificationResult("a", 10, (1, 2)), report)
    assert (result.tokens, result.declined, result.finish) == ((1, 2), True, None)


def test_tokens_go_out_without_a_lost_report() -> None:
    """Of which passes they are is not known, so nothing is said to have been a draft."""
    [result] = put_together(VerificationResult("a", 10, (1, 2, 3), finish="length"))
    assert (result.tokens, result.proposed, result.accepted, result.finish) == ((1, 2, 3), 0, 0, "length")
    assert (result.origins(), result.declined) == (["plain"] * 3, False)


def test_the_end_may_come_without_tokens() -> None:
    [result] = put_together(VerificationResult("a", 10, (), finish="error"))
    assert (result.tokens, result.finish) == ((), "error")
