"""A prediction speaks where it agrees, the draft elsewhere. Letters stand for token ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_llamas import opening

from actors.engines.lookup.predicted_draft import PredictedDraft
from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.settings import DraftSettings, TreeSettings
from actors.text.predicted_outputs import PredictionTally


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Constant:
    """Always guesses '?', and notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def card(self) -> ModelCard:
        return ModelCard("constant", 200, 64, 4)

    def open(self, opening: object) -> None:
        self.heard.append("open")

    def close(self, sequence: str) -> None:
        self.heard.append("close")

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        self.heard.append("".join(map(chr, tokens)))

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        return [Ranked(r.sequence, r.path, ids("?"), (0.5,)) for r in requests]


def first_words(draft: PredictedDraft, *sequences: str) -> dict[str, str]:
    said = dict.fromkeys(sequences, "")
    for answer in draft.expand([Expand(name, ()) for name in sequences]):
        said[answer.sequence] += chr(answer.tokens[0])
    return said


def test_the_prediction_speaks_where_it_agrees() -> None:
    inner = Constant()
    draft = PredictedDraft(inner, DraftSettings(slots=4, tree=TreeSettings(depth=4)))
    draft.open(opening("edit", ids("abab"), prediction=ids("one two six")))
    draft.open(opening("chat", ids("abab")))
    assert draft.card() == inner.card()
    assert first_words(draft, "edit", "chat") == {"edit": "one ", "chat": "?"}
    draft.advance("edit", ids("one"))
    draft.advance("chat", ids("abab"))  # it occurred before, but only predictions are looked at
    assert first_words(draft, "edit", "chat") == {"edit": " two", "chat": "?"}
    draft.advance("edit", ids(" ten"))
    assert first_words(draft, "edit") == {"edit": "?"}
    draft.advance("edit", ids(" s"))
    assert first_words(draft, "edit") == {"edit": "ix"}
    draft.close("edit")
    draft.open(opening("edit", ids("abab")))
    assert first_words(draft, "edit") == {"edit": "?"}
    assert inner.heard == ["open", "open", "one", "abab", " ten", " s", "close", "open"]


@pytest.mark.parametrize(
    ("prediction", "answer", "accepted"),
    [
        ("", "abc", 0),
        ("abc", "", 0),
        ("abcdef", "abcdef", 6),
        ("abcdef", "abc", 3),  # cut short: the rest was not said
        ("abcdef", "abXdef", 5),  # found again at "de"
        ("abcdef", "abXd", 2),  # one token is not enough to be found by
        ("abcdef", "abXXdef", 5),
        ("abcdef", "XYZ", 0),
        ("abab", "ababab", 4),  # never more than it holds
        ("aXbcd", "abcd", 4),
    ],
)
def test_how_much_came_true(prediction: str, answer: str, accepted: int) -> None:
    tally = PredictionTally(ids(prediction))
    for token in ids(answer):
        tally.follow([token])
    assert (tally.accepted, tally.rejected) == (accepted, len(prediction) - accepted)
