"""Drafts in other tokens: the text is what was written, the tokens are the target's, the slot holds what was read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_llamas import opening
from torch import Tensor
from two_tokenizers import DRAFT, TARGET, pieces, said

from actors.algorithms.retokenising import Reading, Transcript, continued, spoken
from actors.engines.protocol import Expand
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.retokenised_draft import RetokenisedDraft
from actors.engines.transformers.slots import SlotRow
from actors.errors import OverloadedError
from actors.messages import Support
from actors.settings import DraftSettings, TreeSettings
from actors.text.codec import TextCodec

PIECES = pieces("the", "cat", "sat")
TEXT = "the cat sat on the mat, hello héllo 👍 the end"


@pytest.mark.parametrize("codec", [TARGET, DRAFT, PIECES], ids=["target", "draft", "pieces"])
@pytest.mark.parametrize("cut", range(len(TEXT)))
def test_any_text_goes_on_after_any_other(codec: TextCodec, cut: int) -> None:
    """Also where a tokenizer would cut the whole differently, and for one that puts a space before everything."""
    context = codec.encode(TEXT[:cut], special=False)
    ids = continued(codec, context, TEXT[cut:])
    assert spoken(codec, ids).decode() == TEXT[cut:]


def test_the_cut_is_the_tokenizers_own_where_it_can_be() -> None:
    context = TARGET.encode("hello the", special=False)
    assert continued(TARGET, context, " cat sat") == TARGET.encode(" cat sat", special=False)
    # "hel" and "lo" are not how "hello" is cut, so what follows "hel" is cut by itself.
    hel = TARGET.encode("hel", special=False)
    assert continued(TARGET, hel, "lo the") == TARGET.encode("lo the", special=False)


@given(st.text(st.sampled_from("thecasld o é👍\n"), max_size=2000), st.data())
def test_a_growing_text_is_read_whole(text: str, data: st.DataObject) -> None:
    """Whatever pieces it comes in, a character's bytes apart too; nothing is lost and nothing comes twice."""
    raw, reading, start = text.encode(), Reading(DRAFT), 0
    while start < len(raw):
        end = data.draw(st.integers(start + 1, min(len(raw), start + 700)))
        reading.extend(raw[start:end])
        ids = reading.ids()
        start = end
        try:
            whole = raw[:end].decode()
        except UnicodeDecodeError:
            assert ids is None
            continue
        assert ids is not None
        assert said(DRAFT, ids) == whole


def write(transcript: Transcript, text: str, confidence: float = 0.5) -> None:
    for token in DRAFT.encode(text, special=False):
        transcript.write(token, confidence)


def guessed(transcript: Transcript) -> str:
    return said(TARGET, [guess.token for guess in transcript.guesses])


def test_the_last_token_is_held_back_because_it_may_grow() -> None:
    transcript = Transcript(TARGET, DRAFT, TARGET.encode("say"))
    write(transcript, " th")
    assert guessed(transcript) == ""  # may become " the"
    write(transcript, "e c")
    assert [guess.token for guess in transcript.guesses] == list(TARGET.encode(" the", special=False))
    write(transcript, "at")
    transcript.end(0, 0.9)
    assert [guess.token for guess in transcript.guesses] == [*TARGET.encode(" the cat", special=False), 0]


def test_confidences_multiply_over_the_drafts_tokens() -> None:
    """ " the" takes two of the draft's tokens, " th" and "e" (0.5 each), and one more to be sure."""
    transcript = Transcript(TARGET, DRAFT, ())
    transcript.commit(TARGET.encode("x"))
    write(transcript, " the c")
    assert [guess.confidence for guess in transcript.guesses] == [0.25]


def test_what_came_true_stays_and_the_rest_goes() -> None:
    transcript = Transcript(TARGET, DRAFT, TARGET.encode("see"))
    write(transcript, " the cat sat ")
    before = list(transcript.ids)
    transcript.commit(TARGET.encode(" the", special=False))
    assert guessed(transcript) == " cat sat"
    # The same text in other tokens: the draft has nothing to read again.
    transcript.commit([TARGET.encode(c, special=False)[0] for c in " cat"])
    assert guessed(transcript) == " sat"
    assert transcript.ids == before
    transcript.commit(TARGET.encode(" end", special=False))
    assert guessed(transcript) == ""
    assert said(DRAFT, transcript.ids) == "see the cat end"


def test_inside_a_character_nothing_is_written() -> None:
    """👍 is four tokens of the target, and the draft cannot read two of them."""
    hand = TARGET.encode("👍", special=False)
    transcript = Transcript(TARGET, DRAFT, TARGET.encode("ok "))
    transcript.commit(hand[:2])
    assert not transcript.writable
    transcript.commit(hand[2:])
    assert transcript.writable
    assert said(DRAFT, transcript.ids) == "ok 👍"
    write(transcript, "👍")
    assert guessed(transcript) == ""  # its last byte is held back, and so is all of it
    write(transcript, "x")
    assert guessed(transcript) == "👍"
    transcript.commit(hand[:1])  # half of a guess: it goes on where the draft wrote a character whole
    assert transcript.writable
    transcript.commit(hand[1:])
    assert said(DRAFT, transcript.ids) == "ok 👍👍x"


class Writer:
    """Writes a text, in the draft's tokens, whatever it has read of it. It sees only what its slots hold."""

    name, eos, vocabulary = "writer", (0,), None

    def __init__(self, text: str, codec: TextCodec = DRAFT) -> None:
        self._text, self._codec = text, codec
        self._slots: dict[int, list[int]] = {}
        self._bytes = {codec.piece(token): token for token in reversed(range(codec.vocabulary))}
        self.read = 0

    def tell(self, text: str) -> None:
        self._text = text

    def cache(self, **sizes: int) -> object:
        return SimpleNamespace(**sizes)

    def run(self, cache: object, rows: Sequence[SlotRow], keep: Sequence[int]) -> Tensor:
        seen = []
        for row in rows:
            slot = self._slots.setdefault(row.slot, [])
            assert row.start <= len(slot), "a gap in the slot"
            for i, token in enumerate(row.tokens):
                slot[row.start + i :] = [token]
                seen.append(list(slot))
                self.read += 1
        logits = torch.full((len(keep), self._codec.vocabulary), -20.0)
        for n, place in enumerate(keep):
            logits[n, self._next(seen[place])] = 0.0
        return logits

    def _next(self, read: list[int]) -> int:
        """The next token of the text; a byte where the text that was read ends inside a character."""
        raw, done = self._text.encode(), spoken(self._codec, read)
        done = done if raw.startswith(done) else done[1:]  # the space that pieces put before everything
        assert raw.startswith(done)
        rest = raw[len(done) :]
        try:
            return continued(self._codec, read, rest.decode())[0] if rest else 0
        except UnicodeDecodeError:
            return self._bytes[rest[:1]]


def draft(writer: Writer, codec: TextCodec = DRAFT, **changes: Any) -> RetokenisedDraft:
    settings = DraftSettings(**{"slots": 2, "context": 256, "tree": TreeSettings(depth=6), **changes})
    return RetokenisedDraft(cast(CausalLM, writer), settings, target=TARGET, draft=codec, eos=0)


def chain(model: RetokenisedDraft, path: Sequence[int] = ()) -> list[int]:
    """The chain past `path`, as far as it is known in one answer, checked to hang together."""
    said_so_far = list(path)
    for answer in model.expand([Expand("s", tuple(path))]):
        assert list(answer.path) == said_so_far
        said_so_far += answer.tokens
    return said_so_far[len(path) :]


@pytest.mark.parametrize(("codec", "prefill"), [(DRAFT, 256), (PIECES, 256), (DRAFT, 3)])
def test_a_right_draft_writes_the_answer_in_the_targets_tokens(codec: TextCodec, prefill: int) -> None:
    """From every place of the answer on; the end of the text is said in the target's way."""
    answer = [*TARGET.encode(TEXT[7:], special=False), 0]
    writer = Writer(TEXT, codec)
    model = draft(writer, codec, prefill_chunk=prefill)
    model.open(opening("s", TARGET.encode(TEXT[:7])))
    place, proposed, idle = 0, 0, 0
    while place < len(answer):
        found = chain(model)
        longer = chain(model, found) if found else []
        proposed += len(found)
        for i, token in enumerate([*found, *longer]):
            assert token == answer[place + i]
        step = max(1, len(found)) if place % 2 else 1  # whole chains and single tokens by turns
        model.advance("s", answer[place : place + step])
        place += step
        idle += not found
    assert proposed >= len(answer) / 2
    assert idle < len(answer) / 3


def test_little_is_read_again_after_a_wrong_guess() -> None:
    """After a correction, what the two texts share is in the slot already."""
    prompt = "hello " * 20
    writer = Writer(prompt + "the cat sat on")
    model = draft(writer)
    model.open(opening("s", TARGET.encode(prompt)))
    assert chain(model)
    writer.tell(prompt + "a cat")
    model.advance("s", TARGET.encode("a", special=False))
    before = writer.read
    assert chain(model)
    assert writer.read - before < 12


def test_the_probabilistic_rules_get_a_one_hot_support() -> None:
    model = draft(Writer("say hello the"), rule="block")
    model.open(opening("s", TARGET.encode("say ")))
    (answer, *_) = model.expand([Expand("s", ())])
    assert answer.support == Support(answer.tokens, (1.0,))


def test_nothing_follows_where_nothing_can() -> None:
    """At the end of the draft's context, at a path that is not its own, and for a prompt without text."""
    model = draft(Writer("hello hello hello"), context=8)
    model.open(opening("s", TARGET.encode("hello ")))
    for _ in range(4):
        tokens = chain(model)
        model.advance("s", tokens)
    (answer,) = model.expand([Expand("s", ())])
    assert answer.tokens == ()
    (answer,) = model.expand([Expand("s", (5, 6))])
    assert answer.tokens == ()
    model.open(opening("t", (1,)))
    (answer,) = model.expand([Expand("t", ())])
    assert answer.tokens == ()


def test_slots_are_bounded_and_given_back() -> None:
    model = draft(Writer("abc"), slots=1)
    model.open(opening("s", TARGET.encode("a")))
    with pytest.raises(OverloadedError):
        model.open(opening("t", TARGET.encode("a")))
    model.close("s")
    model.close("nobody")
    model.open(opening("t", TARGET.encode("a")))
    assert model.card().vocabulary == 0
