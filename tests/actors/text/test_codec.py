"""Encoding, incremental detokenising and stop strings, on tokenizers small enough to be built here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import byte_codec
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from actors.errors import PromptError, PromptTooLongError
from actors.text.codec import TextCodec
from actors.text.emulated_codec import EmulatedCodec
from actors.text.stop_strings import StopMatcher


def _metaspace() -> TextCodec:
    """SentencePiece's way: pieces with a leading mark, and bytes for what is not in the vocabulary."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ("<unk>", "▁", "▁the", "▁cat", "s", "!", "</s>"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


BYTES = byte_codec()
PIECES = _metaspace()


def _joined(codec: TextCodec, tokens: list[int], prompt: tuple[int, ...] = ()) -> tuple[list[str], str]:
    stream = codec.stream(prompt)
    texts = [text for token in tokens for text in stream.push([token]).texts]
    return texts, "".join(texts) + stream.flush()


@pytest.mark.parametrize("text", ["hello", "👩‍🚀 한글 é", "\U0001f980" * 5, "a\u0000b", "he " * 40])
def test_split_characters_join_without_replacement(text: str) -> None:
    tokens = list(BYTES.encode(text))
    texts, whole = _joined(BYTES, tokens)
    assert whole == text
    assert not any("\ufffd" in part for part in texts)
    assert BYTES.decode(tokens) == text


def test_text_appears_with_the_token_that_completes_it() -> None:
    texts, _ = _joined(BYTES, list(BYTES.encode("é!")))  # é is two bytes
    assert texts == ["", "é", "!"]


def test_a_cut_character_shows_as_a_one_shot_decode_would() -> None:
    tokens = list(BYTES.encode("a👍"))[:3]
    assert _joined(BYTES, tokens)[1] == "a\ufffd" == bytes([0x61, 0xF0, 0x9F]).decode("utf-8", "replace")


@given(st.lists(st.integers(0, 258), max_size=30))
def test_any_byte_tokens_equal_the_tokenizer_s_own_decode(tokens: list[int]) -> None:
    assert _joined(BYTES, tokens)[1] == BYTES.window(tokens)


def test_special_tokens_are_not_shown() -> None:
    tokens = [1, *BYTES.encode("hi"), 0]
    assert _joined(BYTES, tokens)[1] == "hi"
    assert BYTES.piece(0) == b"<|end|>"
    assert BYTES.piece(10**6) == b""


def test_pieces_keep_the_space_after_a_prompt() -> None:
    the, cat, s = (PIECES.vocabulary - 7 + i for i in (2, 3, 4))
    assert _joined(PIECES, [cat, s], prompt=(the,))[1] == " cats"
    assert _joined(PIECES, [the, cat])[1] == "the cat"
    assert PIECES.piece(cat) == b" cat"
    assert PIECES.piece(0xE2) == b"\xe2"


def test_pieces_hold_back_split_bytes_but_not_for_ever() -> None:
    texts, whole = _joined(PIECES, list("한".encode()))
    assert texts == ["", "", "한"]
    assert whole == "한"
    texts, whole = _joined(PIECES, [0xE2] * 12)  # never becomes a character
    assert whole == "\ufffd" * 12
    assert "".join(texts)  # was not all held back to the end


def test_a_stop_string_over_several_tokens_is_cut_out_whole() -> None:
    stream = BYTES.stream((), ["END"])
    pushed = stream.push(BYTES.encode("say xE"))
    assert "".join(pushed.texts) == "say x"
    assert pushed.stop is None
    pushed = stream.push(BYTES.encode("ND and more"))
    assert "".join(pushed.texts) == ""
    assert (pushed.stop, pushed.index) == ("END", 1)


def test_held_text_is_released_when_it_turns_out_harmless() -> None:
    stream = BYTES.stream((), ["ab!"])
    first = stream.push(BYTES.encode("ab"))
    second = stream.push(BYTES.encode("c"))
    assert (first.texts, second.texts) == (("", ""), ("abc",))
    stream.push(BYTES.encode("a"))
    assert stream.flush() == "a"


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    stream = BYTES.stream((), ["!"], min_tokens=3)
    pushed = stream.push(BYTES.encode("a!b!c"))
    assert "".join(pushed.texts) == "a!b"
    assert pushed.index == 3


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stops_agree_with_a_search_of_the_whole_text(text: str, stops: list[str]) -> None:
    """The reference looks at every prefix of the text for one that ends with a stop string."""
    expected = text
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            expected = text[: end - max(map(len, found))]
            break
    for step in (1, 3):
        matcher, shown, ended = StopMatcher(stops), "", False
        for start in range(0, len(text), step):
            released, stop = matcher.feed(text[start : start + step])
            shown += released
            if stop is not None:
                ended = True
                break
        assert (shown if ended else shown + matcher.flush()) == expected


def test_chat_uses_the_template_and_joins_parts() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert BYTES.render_chat([{"role": "user", "content": parts}]) == "<|user|>hi<|end|>"
    tokens = BYTES.encode_chat([{"role": "user", "content": "hi"}])
    assert tokens[0] == 1
    assert tokens[-1] == 0


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "bad", "content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]],
)
def test_messages_that_cannot_be_rendered_are_refused(messages: list[dict[str, object]]) -> None:
    with pytest.raises(PromptError) as caught:
        BYTES.encode_chat(messages)
    assert caught.value.param == "messages"


def test_a_model_without_chat_template_says_so() -> None:
    with pytest.raises(PromptError, match="no chat template"):
        PIECES.encode_chat([{"role": "user", "content": "x"}])


def test_hopelessly_long_text_is_refused_by_its_length() -> None:
    with pytest.raises(PromptTooLongError):
        BYTES.encode("x" * 1000, limit=10)


def test_words_round_trip() -> None:
    codec = EmulatedCodec(100)
    assert codec.encode("w5 w99") == (5, 99)
    assert codec.decode((5, 99)) == " w5 w99"
    assert all(1 <= token < 100 for token in codec.encode("any other text w100"))
    assert codec.stream((), ["w7"]).push([5, 7, 8]).texts == (" w5", " ")
