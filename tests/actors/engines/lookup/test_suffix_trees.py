"""Suffix drafts on the library's trees: what is remembered, for whom, and how much. Letters stand for token ids."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from small_llamas import opening

from actors.engines.lookup.predicted_draft import PredictedDraft
from actors.engines.lookup.suffix_draft import SuffixDraft
from actors.engines.lookup.suffix_memory import PROMPT_TAIL, SuffixMemory, suffix_caches
from actors.engines.protocol import Expand
from actors.errors import OverloadedError
from actors.messages import OpenSequence
from actors.settings import DraftSettings, MemorySettings, TreeSettings

QUESTION, ANSWER = "How many? Say it. ", "one two three"


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def asked(name: str, prompt: str, tenant: str = "") -> OpenSequence:
    return replace(opening(name, ids(prompt)), tenant=tenant)


def memory(**bounds: object) -> SuffixMemory:
    return SuffixMemory(MemorySettings(**bounds), suffix_caches())  # type: ignore[arg-type]


def draft(held: SuffixMemory | None = None, **changes: object) -> SuffixDraft:
    values = {"slots": 2, "tree": TreeSettings(depth=8, branching=2), **changes}
    return SuffixDraft(DraftSettings(**values), held or memory())  # type: ignore[arg-type]


def answered(model: SuffixDraft, name: str, prompt: str, answer: str, tenant: str = "") -> None:
    """One request from its beginning to its end, token by token."""
    model.open(asked(name, prompt, tenant))
    for token in ids(answer):
        model.advance(name, (token,))
    model.close(name)


def chain(model: SuffixDraft, name: str, path: str = "") -> str:
    """The best child of each node, from `path` on."""
    best = {answer.path: answer.tokens for answer in model.expand([Expand(name, ids(path))])}
    place = ids(path)
    while best.get(place):
        place = (*place, best[place][0])
    return "".join(map(chr, place[len(path) :]))


def test_the_requests_own_text_is_searched() -> None:
    model = draft()
    model.open(asked("s", "the cat sat; the c"))
    assert chain(model, "s") == "at sa"  # "the c", five tokens, occurred before, so at most five follow
    assert chain(model, "s", "at") == " sat; "  # seven match; the tree ends 8 past the committed prefix
    model.advance("s", ids("ow; the co"))
    assert chain(model, "s")[:3] == "w; "


def test_a_second_request_is_drafted_from_the_first() -> None:
    model = draft()
    answered(model, "first", QUESTION, ANSWER)
    model.open(asked("second", QUESTION))
    assert chain(model, "second") == ANSWER[:8]  # 16 tokens of the prompt match; depth 8
    model.advance("second", ids(ANSWER[:8]))
    assert chain(model, "second") == ANSWER[8:]


def test_running_requests_of_a_tenant_help_each_other() -> None:
    model = draft()
    model.open(asked("first", QUESTION))
    model.advance("first", ids(ANSWER))
    model.open(asked("second", QUESTION))
    assert chain(model, "second") == ANSWER[:8]


@pytest.mark.parametrize(("shared", "said"), [(False, "m"), (True, ANSWER[:8])])
def test_tenants_are_isolated_unless_memory_is_shared(shared: bool, said: str) -> None:
    model = draft(memory(shared=shared))
    answered(model, "theirs", QUESTION, ANSWER, "them")
    model.open(asked("ours", QUESTION, "us"))
    assert chain(model, "ours") == said  # alone, the request knows that its " " was followed by "m"
    model.close("ours")
    model.open(asked("theirs-2", QUESTION, "them"))
    assert chain(model, "theirs-2") == ANSWER[:8]


def test_the_oldest_answer_goes_first() -> None:
    held = memory(answers=2)
    model = draft(held)
    for name in ("a", "b", "c"):
        answered(model, name, QUESTION, name * 3)
    assert held.held("") == ("b", "c")
    model.open(asked("d", QUESTION))  # a running request takes a place from its beginning
    assert held.held("") == ("c", "d")
    assert chain(model, "d") == "ccc"


def test_tokens_are_bounded_answers_and_the_tails_of_prompts_together() -> None:
    held = memory(tokens=2 * (PROMPT_TAIL + 3))
    model = draft(held)
    for name in ("a", "b"):
        answered(model, name, QUESTION, name * 3)
    assert (held.tokens, held.held("")) == (2 * (PROMPT_TAIL + 3), ("a", "b"))
    answered(model, "c", QUESTION, "c")
    assert (held.tokens, held.held("")) == (2 * PROMPT_TAIL + 4, ("b", "c"))


def test_an_answer_longer_than_the_memory_is_left_out_and_goes_on() -> None:
    held = memory(tokens=PROMPT_TAIL + 4)
    model = draft(held)
    model.open(asked("s", QUESTION))
    model.advance("s", ids("abcd"))
    model.advance("s", ids("abc"))
    assert (held.tokens, held.held("")) == (0, ())
    assert chain(model, "s") == "dab"  # its own tree is searched as before
    model.close("s")
    assert held.tenants == 0


def test_rubbish_costs_the_speed_of_whoever_sends_it() -> None:
    held = memory(tokens=400)
    model, rng = draft(held), random.Random(1)
    answered(model, "ours", QUESTION, ANSWER, "us")
    for i in range(50):
        rubbish = "".join(chr(rng.randrange(33, 120)) for _ in range(30))
        answered(model, f"theirs-{i}", QUESTION, rubbish, "them")
        assert held.tokens <= 400
    assert held.held("us") == ("ours",)
    # Ours are 16 + 13 tokens and theirs 16 + 30 each: eight of theirs fit beside, 29 + 8 * 46 = 397.
    assert held.held("them") == tuple(f"theirs-{i}" for i in range(42, 50))
    model.open(asked("again", QUESTION, "us"))
    assert chain(model, "again") == ANSWER[:8]


def test_many_tenants_stay_within_the_bounds_and_are_forgotten() -> None:
    """Random openings, commits and closes; the counts are compared with an account kept apart."""
    held = memory(tokens=300, answers=7)
    model, rng = draft(held, slots=5), random.Random(2)
    running: list[str] = []
    for i in range(1500):
        if len(running) < 5 and rng.random() < 0.4:
            running.append(f"s{i}")
            model.open(asked(f"s{i}", "ab" * rng.randrange(1, 20), f"t{rng.randrange(6)}"))
        elif running and rng.random() < 0.3:
            model.close(running.pop(rng.randrange(len(running))))
        elif running:
            name = rng.choice(running)
            model.advance(name, tuple(rng.randrange(97, 100) for _ in range(rng.randrange(1, 30))))
            model.expand([Expand(name, ())])
        assert held.tokens <= 300
        assert held.answers <= 7
        assert held.answers == sum(len(held.held(f"t{t}")) for t in range(6))
        assert held.tenants <= 6
    assert model.broken == 0
    for name in running:
        model.close(name)
    for i in range(7):  # one tenant's short answers push out no more than they must
        answered(model, f"last-{i}", "a", "b", "last")
    assert held.answers == 7
    assert held.tokens <= 300


def test_a_sequence_that_comes_back_replaces_its_answer() -> None:
    held = memory()
    model = draft(held)
    model.open(asked("s", QUESTION))
    model.advance("s", ids("one"))
    model.open(replace(asked("s", QUESTION), committed=ids("one t")))
    assert (held.tokens, held.answers) == (PROMPT_TAIL + 5, 1)
    model.advance("s", ids("wo"))
    assert held.tokens == PROMPT_TAIL + 7


def test_slots_are_bounded_and_given_back() -> None:
    model = draft(slots=1)
    model.open(asked("s", "abc"))
    with pytest.raises(OverloadedError):
        model.open(asked("t", "a"))
    model.close("s")
    model.close("nobody")
    model.open(asked("t", "a"))


def test_facts_pass_through_the_lookup_of_predictions() -> None:
    model = PredictedDraft(draft(), DraftSettings())
    model.open(asked("s", "abc"))
    assert model.facts() == {"memory_tokens": 3.0, "memory_answers": 1.0, "broken_trees": 0.0}


class Broken:
    """The library's trees, each token of which claims to be its own parent."""

    def __init__(self) -> None:
        self._cache = suffix_caches()()

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)

    def speculate(self, *given: object, **named: object) -> object:
        found = self._cache.speculate(*given, **named)  # type: ignore[arg-type]
        found.parents = list(range(len(found.parents)))
        return found


def test_a_broken_tree_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = draft(SuffixMemory(MemorySettings(), Broken))  # type: ignore[arg-type]
    model.open(asked("s", "the cat sat; the c"))
    (answer,) = model.expand([Expand("s", ())])
    assert (answer.path, answer.tokens) == ((), ())
    assert model.facts()["broken_trees"] == 1.0
    assert "a tree of the suffix memory is dropped: token 0 has the parent 0" in caplog.text
