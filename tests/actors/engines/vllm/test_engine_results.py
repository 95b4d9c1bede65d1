"""Words of an engine that schedules itself become verdicts: one per pass, whatever comes together or is lost."""

from __future__ import annotations

from actors.engines.vllm.engine import Said
from actors.engines.vllm.ipc import Decided
from actors.errors import InvalidSettingError
from actors.messages import Alternatives
from actors.target.engine_results import Told, verdicts
from actors.target.proposal_broker import Ruled


def told(said: Said, *reports: Decided, declined: bool = False) -> Told:
    """What becomes of words that begin at position 10."""
    known = {report.position: Ruled(report, declined=declined) for report in reports}
    return verdicts("a", 10, said, known.get)


def test_words_of_two_passes_become_two_verdicts() -> None:
    found = Alternatives(-1.0)
    said = Said("a#0", (1, 2, 3, 4, 5), (found,) * 5)
    first = Decided("a", 10, (1, 2, 3), proposed=4, accepted=2, margins=(0.1, 0.2, 0.3))
    one, other = told(said, first, Decided("a", 13, (4, 5), proposed=1, accepted=1)).verdicts
    assert (one.position, one.tokens, one.proposed, one.accepted) == (10, (1, 2, 3), 4, 2)
    assert one.origins() == ["accepted", "accepted", "correction"]
    assert (one.margins, len(one.alternatives)) == ((0.1, 0.2, 0.3), 3)
    assert (other.position, other.tokens, other.origins()) == (13, (4, 5), ["accepted", "bonus"])


def test_a_stop_inside_a_block_cuts_it() -> None:
    [verdict] = told(Said("a#0", (1, 2), finish="stop"), Decided("a", 10, (1, 2, 3, 4), 3, 3)).verdicts
    assert (verdict.tokens, verdict.accepted, verdict.finish) == ((1, 2), 2, "stop")


def test_words_go_out_without_a_lost_report() -> None:
    """Of which passes they are is not known, so nothing is said to have been a draft."""
    result = told(Said("a#0", (1, 2, 3), finish="length"), declined=True)
    [verdict] = result.verdicts
    assert (verdict.tokens, verdict.proposed, verdict.accepted, verdict.finish) == ((1, 2, 3), 0, 0, "length")
    assert verdict.origins() == ["plain"] * 3
    assert (result.length, result.ended, result.declined) == (3, "length", 0)


def test_the_end_may_come_without_words() -> None:
    [verdict] = told(Said("a#0", finish="abort")).verdicts
    assert (verdict.tokens, verdict.finish) == ((), "error")


def test_what_vllm_refuses_is_the_requests_fault() -> None:
    [verdict] = told(Said("a#0", error=ValueError("too long"))).verdicts
    assert isinstance(verdict.error, InvalidSettingError)
    assert str(verdict.error) == "too long"
