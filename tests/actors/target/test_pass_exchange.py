"""The exchange: what an engine that schedules itself is told to verify, and what is kept of what it decided."""

from __future__ import annotations

from typing import Any

import pytest

from actors.algorithms.control.lookahead import OFF_BELOW
from actors.engines.vllm.ipc import PassEnd
from actors.errors import InvalidSettingError
from actors.messages import Expansion, OpenSequence, ProposalBatch, VerificationResult, prefix_key
from actors.settings import LookaheadSettings, SamplingSettings, TargetSettings
from actors.target.pass_exchange import SILENT, PassExchange

PROMPT = (5, 6)


def opening(**sampling: Any) -> OpenSequence:
    return OpenSequence("a", PROMPT, SamplingSettings(**{"max_tokens": 10} | sampling), seed=0)


def exchange(**lookahead: Any) -> PassExchange:
    chosen = LookaheadSettings(**{"mode": "fixed", "maximum": 3, "wait": "never"} | lookahead)
    return PassExchange(TargetSettings(context=256, lookahead=chosen), 100, lambda: 0.0)


def offer(exchange: PassExchange, prefix: tuple[int, ...], *tokens: int) -> None:
    path = [*prefix, *tokens]
    chain = [Expansion(prefix_key(path[:i]), i, (path[i],), (0.5,)) for i in range(len(prefix), len(path))]
    exchange.offer(ProposalBatch("draft", {"a": chain}))


def end(*results: VerificationResult, waiting: tuple[str, ...] = ("a",)) -> PassEnd:
    return PassEnd(1, list(results), waiting, tokens=2, rows=1, seconds=0.01)


def test_drafts_continue_what_the_pass_decided() -> None:
    it = exchange()
    it.open(opening())
    offer(it, (*PROMPT, 7), 8, 9, 10, 11)
    answer = it.answer(end(VerificationResult("a", 2, (7,))))
    assert answer.proposals["a"].tokens == (8, 9, 10)  # at most the lookahead
    answer = it.answer(end(VerificationResult("a", 3, (8, 50), proposed=3, accepted=1)))
    assert answer.proposals == {}  # 50 was not foreseen
    assert it.positions == 5


def test_a_pass_is_told_once_however_often_it_is_reported() -> None:
    it = exchange()
    it.open(opening())
    offer(it, (*PROMPT, 7), 8)
    for _ in range(2):
        assert it.answer(end(VerificationResult("a", 2, (7,)))).proposals["a"].tokens == (8,)
    report = it.report("a", 2)
    assert report is not None
    assert report.tokens == (7,)
    assert it.report("a", 3) is None
    assert it.positions == 3


def test_a_lost_report_costs_the_drafts_of_its_sequence() -> None:
    it = exchange()
    it.open(opening())
    offer(it, (*PROMPT, 7), 8)
    assert it.answer(end(VerificationResult("a", 4, (7,)))).proposals == {}
    assert it.report("a", 4) is not None


def test_no_more_is_proposed_than_can_be_committed() -> None:
    it = exchange()
    it.open(opening(max_tokens=3))
    offer(it, (*PROMPT, 7), 8, 9, 10)
    assert it.answer(end(VerificationResult("a", 2, (7,)))).proposals["a"].tokens == (
        8,
    )  # and one token of the target's own
    it.open(opening(speculation=False))
    offer(it, (*PROMPT, 7), 8)
    assert it.answer(end(VerificationResult("a", 2, (7,)))).proposals == {}


def test_sequences_that_have_ended_are_ignored() -> None:
    it = exchange()
    it.open(opening())
    it.close("a")
    offer(it, (*PROMPT, 7), 8)
    assert it.answer(end(VerificationResult("a", 2, (7,)))).proposals == {}
    assert it.report("a", 2) is None


def test_drafts_not_worth_verifying_are_declined() -> None:
    it = exchange(mode="adaptive")
    it.open(opening())
    offer(it, (*PROMPT, 7), 8)
    # Passes of one token take 1 ms and of two tokens 10 ms: a draft accepted half of the time does not pay.
    for number in range(80):
        slow = number % 2
        it.answer(PassEnd(number, [], (), tokens=1 + slow, rows=1, seconds=0.010 if slow else 0.001))
    assert it.answer(end(VerificationResult("a", 2, (7,)))).proposals == {}
    it.answer(end(VerificationResult("a", 3, (8,))))
    assert [report.declined for position in (2, 3) if (report := it.report("a", position))] == [False, True]


def test_while_no_draft_is_worth_verifying_none_is_waited_for() -> None:
    """The draft of a sequence that nobody wants drafts seldom: passes in between must not wake it."""
    it = exchange(mode="adaptive")
    it.open(opening(max_tokens=200))
    for number in range(80):  # a second token makes a pass ten times as long
        slow = number % 2
        it.answer(PassEnd(number, [], (), tokens=1 + slow, rows=1, seconds=0.010 if slow else 0.001))

    def run(count: int, drafted: bool) -> list[tuple[bool, bool]]:
        """Passes: was the exchange quiet, and were drafts declined in the pass that followed?"""
        found = []
        for _ in range(count):
            position = it.positions
            if drafted:
                offer(it, (*PROMPT, *[7] * (position - 1)), 8)
            quiet = it.answer(end(VerificationResult("a", position, (7,)))).quiet
            it.answer(end(VerificationResult("a", position + 1, (7,))))
            report = it.report("a", position + 1)
            assert report is not None
            found.append((quiet, report.declined))
        return found

    assert run(10, drafted=True) == [(False, True)] * 10  # 0.2 * 0.8 ** 10 is above OFF_BELOW
    assert run(2, drafted=True) == [(True, True)] * 2  # 0.2 * 0.8 ** 11 is below
    assert run(2, drafted=False) == [(True, True)] * 2
    for number in range(300):  # verifying costs nothing now
        it.answer(PassEnd(number, [], (), tokens=1 + number % 2, rows=1, seconds=0.010))
    assert run(1, drafted=True) == [(False, False)]
    assert run(1, drafted=False) == [(False, False)]
    assert 0.2 * 0.8**11 < OFF_BELOW < 0.2 * 0.8**10


def test_where_nobody_drafts_nobody_is_waited_for() -> None:
    it = exchange()
    it.open(opening(max_tokens=SILENT * 3))
    answers = [it.answer(end(VerificationResult("a", 2 + i, (7,)))) for i in range(SILENT + 2)]
    assert [answer.quiet for answer in answers] == [False] * SILENT + [True] * 2
    offer(it, (*PROMPT, *[7] * (SILENT + 3)), 8)
    answer = it.answer(end(VerificationResult("a", 2 + SILENT + 2, (7,))))
    assert (answer.quiet, answer.proposals["a"].tokens) == (False, (8,))


def test_a_draft_that_is_too_late_is_waited_for() -> None:
    """It would never catch up with passes that take less time than its answers do."""
    it = ticking(wait="full", max_wait_ms=5)
    it.open(opening(max_tokens=SILENT * 3))
    for i in range(SILENT + 2):  # so long nothing comes that the passes do not even ask
        quiet = it.answer(end(VerificationResult("a", 2 + i, (7,)))).quiet
    assert (quiet, it.take_facts().hold_seconds) == (True, 0.0)
    offer(it, PROMPT, 7)  # the first answer of the draft: long overtaken
    assert not it.answer(end(VerificationResult("a", it.positions, (7,)))).quiet
    assert it.take_facts().hold_seconds >= 0.005


def test_a_pass_is_not_held_for_drafts_that_cannot_fit() -> None:
    """The draft named what follows, and the target said something else, of which the draft hears after this answer."""
    it = ticking(wait="full", max_wait_ms=5)
    it.open(opening())
    offer(it, PROMPT, 50)
    it.answer(end(VerificationResult("a", 2, (7,))))
    assert it.take_facts().hold_seconds < 0.005
    it.answer(end(VerificationResult("a", 3, (7,))))  # of this position the draft has said nothing yet
    assert it.take_facts().hold_seconds >= 0.005


def test_a_token_that_cannot_be_chosen_is_reported() -> None:
    rung: list[bool] = []
    it = PassExchange(TargetSettings(context=16), 100, lambda: 0.0, lambda: rung.append(True))
    it.open(opening())
    error = InvalidSettingError("nothing is left", "logit_bias")
    it.answer(end(VerificationResult("a", 2, (), error=error), waiting=()))
    assert rung == [True]
    assert it.has_failed
    assert [result.error for result in it.take_failed()] == [error]
    assert not it.has_failed
    assert (it.take_facts().passes, it.take_facts().passes) == (1, 0)


def ticking(**lookahead: Any) -> PassExchange:
    """An exchange whose clock moves a millisecond whenever it is read."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    chosen = LookaheadSettings(**{"mode": "fixed", "maximum": 2} | lookahead)
    return PassExchange(TargetSettings(context=256, lookahead=chosen), 100, clock)


@pytest.mark.parametrize("wait", ["bounded", "full"])
def test_a_pass_is_held_for_drafts_within_its_bound(wait: str) -> None:
    it = ticking(wait=wait, max_wait_ms=5)
    it.open(opening())
    offer(it, (*PROMPT, 50), 8)  # so a draft follows this sequence
    answer = it.answer(end(VerificationResult("a", 2, (7,))))
    assert answer.proposals == {}
    assert 0.005 <= it.take_facts().hold_seconds < 0.02
