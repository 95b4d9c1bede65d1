"""Grammars of clients: what cannot be followed is named, and what would never be compiled ends with its process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from llguidance import LLMatcher

from actors.errors import InvalidSettingError, OverloadedError, UnavailableError
from deployments.ingress.grammars import grammar_check
from deployments.ingress.grammars.grammar_check import GrammarCheck

ENDLESS = LLMatcher.grammar_from_json_schema(
    json.dumps({"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]})
)
"""Texts with every letter in them: an automaton of 2^26 states."""
GOOD = LLMatcher.grammar_from_json_schema('{"type": "integer"}')


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(limit_s=0.3)
    yield check
    check.close()


async def test_an_endless_grammar_is_refused_and_the_next_one_is_not(check: GrammarCheck) -> None:
    with pytest.raises(InvalidSettingError, match=r"more than 0\.3 s") as refused:
        await check.check(ENDLESS, "response_format")
    assert refused.value.param == "response_format"
    await check.check(GOOD, "tools")
    with pytest.raises(InvalidSettingError, match="regex"):
        await check.check(LLMatcher.grammar_from_regex("(("), "structured_outputs")


async def test_what_was_found_is_remembered(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    await check.check(GOOD, "tools")
    monkeypatch.setattr(check, "_try", None)  # asked again, it would fail
    await check.check(GOOD, "tools")


async def test_not_more_than_so_many_wait(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MOST_WAITING", 2)
    told = await asyncio.gather(
        *(check.check(LLMatcher.grammar_from_regex("a" * n), "x") for n in range(1, 5)), return_exceptions=True
    )
    assert [type(one) for one in told] == [type(None), type(None), OverloadedError, OverloadedError]


async def test_a_process_that_was_ended_is_started_again(check: GrammarCheck) -> None:
    await check.check(GOOD, "tools")
    assert check._process is not None
    check._process.kill()
    check._process.wait()
    await check.check(LLMatcher.grammar_from_regex("b+"), "x")


PROGRAM = grammar_check._PROGRAM


def waiting(seconds: float) -> str:
    """The process's program, where a grammar takes time in which nothing is computed: it gets no turns."""
    idle = f"import time\nclass LLMatcher:\n    validate_grammar = staticmethod(lambda _: time.sleep({seconds}) or '')"
    return PROGRAM.replace("from llguidance import LLMatcher", idle)


async def test_a_busy_machine_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_PROGRAM", waiting(0.3))
    monkeypatch.setattr(grammar_check, "PATIENCE", 1000)
    check = GrammarCheck(limit_s=0.1)
    await check.check(GOOD, "tools")
    check.close()


async def test_a_process_that_never_gets_a_turn_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_PROGRAM", waiting(3600))
    monkeypatch.setattr(grammar_check, "PATIENCE", 2)
    check = GrammarCheck(limit_s=0.1)
    with pytest.raises(UnavailableError, match="too busy") as refused:
        await check.check(GOOD, "tools")
    assert refused.value.status == 503
    monkeypatch.setattr(grammar_check, "_PROGRAM", waiting(0))
    await check.check(GOOD, "tools")  # load is not held against the grammar
    check.close()


async def test_a_bound_that_was_passed_is_forgotten_after_a_time() -> None:
    now = 0.0
    check = GrammarCheck(limit_s=0.2, clock=lambda: now)
    with pytest.raises(InvalidSettingError, match="more than"):
        await check.check(ENDLESS, "tools")
    tried = check._process
    with pytest.raises(InvalidSettingError, match="more than"):
        await check.check(ENDLESS, "tools")
    assert (tried, check._process) == (None, None)  # nothing was started for the second
    now = grammar_check.LIMIT_REMEMBERED_S + 1
    check._limit_s = 1e-3
    with pytest.raises(InvalidSettingError, match=r"more than 0\.001 s"):
        await check.check(ENDLESS, "tools")
    check.close()
