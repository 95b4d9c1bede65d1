"""Lookup drafts continue with what followed before. Letters stand for token ids."""

from __future__ import annotations

import pytest
from small_llamas import opening

from actors.algorithms.outcome_tree import Forest
from actors.engines.lookup.prompt_lookup import LookupSettings, PromptLookupDraft
from actors.engines.protocol import Expand
from actors.errors import OverloadedError
from actors.messages import Support, prefix_key
from actors.settings import DraftSettings, TreeSettings


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def draft(prompt: str, prediction: str = "", **changes: object) -> PromptLookupDraft:
    tree = TreeSettings(depth=4, branching=2)
    made = PromptLookupDraft(DraftSettings(**{"slots": 1, "tree": tree, **changes}))  # type: ignore[arg-type]
    made.open(opening("s", ids(prompt), prediction=ids(prediction)))
    return made


def chain(model: PromptLookupDraft, path: str = "") -> str:
    """The tokens proposed first, after checking that each answer follows from the one before."""
    said, place = "", ids(path)
    for answer in model.expand([Expand("s", place)]):
        assert answer.path == place
        if answer.tokens:
            said += chr(answer.tokens[0])
            place = (*place, answer.tokens[0])
    return said


def test_what_followed_the_last_tokens_follows_again() -> None:
    model = draft("the cat sat; the c")
    assert chain(model) == "at s"
    assert chain(model, "at") == " s"  # the chain is 4 deep, counted from the committed prefix


def test_the_longest_match_wins_then_the_latest() -> None:
    assert chain(draft("abcX.bcY.abc")) == "X.bc"  # 'abc' before X is longer than 'bc' before Y
    assert chain(draft("bcX.bcY..bc")) == "Y..b"


def test_alternatives_are_other_continuations() -> None:
    answer = draft("bcX!bcY?.bc").expand([Expand("s", ())])[0]
    assert answer.tokens == ids("YX")
    # A match of two tokens: 2/3, and 2/3 of what is left.
    assert answer.confidences == pytest.approx((2 / 3, 2 / 9))


def test_nothing_to_say() -> None:
    answers = draft("abcdef").expand([Expand("s", ())])
    assert [(answer.path, answer.tokens) for answer in answers] == [((), ())]


def test_a_draft_with_nothing_to_say_is_asked_again_after_a_commit_only() -> None:
    model, forest = draft("abcdef."), Forest(TreeSettings(depth=4))
    forest.open("s", prefix_key(ids("abcdef.")), 7)
    asked = forest.frontier(8)
    assert [request.path for request in asked] == [()]
    assert forest.grow(model.expand(asked)) == {}
    assert forest.frontier(8) == []
    forest.commit("s", 7, ids("ab"))
    model.advance("s", ids("ab"))
    grown = forest.grow(model.expand(forest.frontier(8)))
    assert [chr(expansion.tokens[0]) for expansion in grown["s"]] == ["c", "d", "e", "f"]


def test_the_answer_itself_is_searched() -> None:
    model = draft("Q: ")
    model.advance("s", ids("one two one"))
    assert chain(model) == " two"


def test_a_prediction_is_proposed_from_its_start() -> None:
    model = draft("rewrite", prediction="def f(x)")
    assert chain(model) == "def "
    model.advance("s", ids("def "))
    assert chain(model) == "f(x)"


def test_after_an_edit_the_prediction_is_found_again_where_it_goes_on() -> None:
    prediction = "aa=1; aa=2; aa=3; end"
    model = draft("edit", prediction=prediction)
    model.advance("s", ids("aa=1; bb=7; "))  # the edit; "; " occurs twice ahead, the nearer one counts
    assert chain(model) == "aa=2"
    model.advance("s", ids("aa=2; aa="))
    assert chain(model) == "3; e"


def test_the_probabilistic_rules_get_a_one_hot_support() -> None:
    answer = draft("xyz.xy", rule="block").expand([Expand("s", ())])[0]
    assert answer.support == Support(ids("z"), (1.0,))


def test_sessions_are_bounded_and_given_back() -> None:
    model = draft("abc")
    with pytest.raises(OverloadedError):
        model.open(opening("t", (1,)))
    model.close("s")
    model.close("nobody")
    model.open(opening("t", (1,)))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="shortest"):
        LookupSettings(longest=1, shortest=2)
