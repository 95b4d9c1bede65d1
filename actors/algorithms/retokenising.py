"""Drafting in other tokens than the target's: text read and written in one vocabulary, guessed in the other.

The draft reads the committed text in its own tokens; what it writes is cut again into the target's. Such guesses are
verified like any others, so everything here costs acceptance at most, never exactness: the text may be cut as no
tokenizer would cut it, and special tokens (of chat templates) are left out of it. (Timor et al., "Accelerating LLM
inference with lossless speculative decoding algorithms for heterogeneous vocabularies", ICML 2025, string-level exact
match; transformers' universal assisted decoding.)

Pure: knows no models. Texts are kept as bytes, because tokens end inside characters.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_WINDOW = 8
"""Tokens before a text that decide how it is cut, at most."""
_TAIL = 256
"""Bytes at the end of a text that are encoded again when it grows."""
_ANCHOR = "\n"
"""Stands before a text where nothing else does, for tokenizers that put a space in front of whatever they are given."""


class Codec(Protocol):
    """What is needed of actors.text.codec.TextCodec."""

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> tuple[int, ...]: ...

    def piece(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


def spoken(codec: Codec, tokens: Sequence[int]) -> bytes:
    """The text of `tokens`, without special ones."""
    return b"".join(codec.piece(token) for token in tokens if not codec.is_special(token))


def continued(codec: Codec, context: Sequence[int], text: str) -> tuple[int, ...]:
    """Ids that say `text` after the tokens `context`, cut as the tokenizer would cut both together where it can.

    Empty if it has no way of saying exactly that.
    """
    wanted = text.encode()
    for length in range(min(_WINDOW, len(context)), 0, -1):
        window = tuple(context[-length:])
        before = _whole(spoken(codec, window))
        if before is None or any(map(codec.is_special, window)):
            continue
        ids = codec.encode(before + text, special=False)
        if ids[:length] == window and spoken(codec, ids[length:]) == wanted:
            return ids[length:]
    ids = codec.encode(text, special=False)
    if spoken(codec, ids) == wanted:
        return ids
    ids = codec.encode(_ANCHOR + text, special=False)
    for length in range(1, len(ids)):
        if spoken(codec, ids[length:]) == wanted:
            return ids[length:]
    return ()


@dataclass(frozen=True, slots=True)
class Guess:
    """A token of the target, and the draft's confidence that it comes true given those before it."""

    token: int
    confidence: float


class Reading:
    """A text that grows, in the draft's tokens. Only its end is encoded again."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._settled: list[int] | None = None
        self._tail = b""
        """What comes after the settled ids."""

    def extend(self, text: bytes) -> None:
        """`text` was said."""
        self._tail += text

    def ids(self) -> list[int] | None:
        """All of it; None while it ends inside a character."""
        while len(self._tail) > 4 * _TAIL:
            cut = self._tail.rfind(b" ", _TAIL, -_TAIL)
            settled = _whole(self._tail[:cut]) if cut > 0 else None
            if settled is None:
                break
            self._settled = [*(self._settled or ()), *self._codec.encode(settled, special=self._settled is None)]
            self._tail = self._tail[cut:]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = decoder.decode(self._tail)
        if decoder.getstate()[0]:
            return None
        return [*(self._settled or ()), *self._codec.encode(tail, special=self._settled is None)]


class Transcript:
    """One sequence: what is committed in the target's tokens, and what the draft has written past it.

    prompt: the target's ids.
    """

    def __init__(self, target: Codec, draft: Codec, prompt: Sequence[int]) -> None:
        self._target, self._draft = target, draft
        self._context = list(prompt)
        self._reading = Reading(draft)
        self._reading.extend(spoken(target, prompt))
        self._forget()

    def _forget(self) -> None:
        """Start again from the committed text."""
        self.guesses: list[Guess] = []
        """The chain of target tokens past the committed ones that follows from what was written so far."""
        self.ended = False
        """The draft has nothing more to write."""
        self._written = b""
        self._steps: list[tuple[int, float]] = []
        """Where in `_written` each of the draft's tokens begins, and its confidence."""
        ids = self._reading.ids()
        self.ids = ids or []
        """The draft's tokens: the committed text, and what was written past it. None yet: there is nothing to read."""
        self._readable = bool(ids)

    @property
    def writable(self) -> bool:
        """Whether one more token of the draft can come of use."""
        return self._readable and not self.ended

    def commit(self, tokens: Sequence[int]) -> None:
        """The target said `tokens`. What was written stays as far as it says the same text, however cut."""
        text = spoken(self._target, tokens)
        agreed = [guess.token for guess in self.guesses[: len(tokens)]] == list(tokens)
        self._context.extend(tokens)
        self._reading.extend(text)
        if not self._written.startswith(text):
            self._forget()
            return
        self._written = self._written[len(text) :]
        self._steps = [(start - len(text), chance) for start, chance in self._steps if start >= len(text)]
        self.guesses = self.guesses[len(tokens) :] if agreed else []
        self._guess()

    def write(self, token: int, confidence: float) -> None:
        """The draft wrote `token` of its own vocabulary."""
        self._steps.append((len(self._written), confidence))
        self.ids.append(token)
        self._written += self._draft.piece(token)
        self._guess()

    def end(self, token: int | None, confidence: float) -> None:
        """The draft ended its text, with `confidence`; `token` is how the target would (None: it has no way)."""
        self.ended = True
        self._guess()
        if token is not None and self._left() == b"":
            self.guesses.append(Guess(token, confidence))

    def _left(self) -> bytes:
        """What was written and is not guessed yet."""
        return self._written[len(spoken(self._target, [guess.token for guess in self.guesses])) :]

    def _guess(self) -> None:
        """Turn what is written into guesses, except the last token: it may yet become part of a longer one."""
        left = self._left()
        text = _readable_part(left)
        if not text:
            return
        context = [*self._context[-_WINDOW:], *(guess.token for guess in self.guesses)]
        ids = continued(self._target, context, text)
        ids = ids if self.ended else ids[:-1]
        place = len(self._written) - len(left)
        fresh: list[Guess] = []
        whole = 0
        for token in ids:
            end = place + len(self._target.piece(token))
            chance = math.prod(chance for start, chance in self._steps if place <= start < end)
            fresh.append(Guess(token, chance))
            place = end
            if _whole(self._written[len(self._written) - len(left) : end]) is not None:
                whole = len(fresh)  # text can only be cut again where a character ends
        self.guesses.extend(fresh[:whole])


def _whole(text: bytes) -> str | None:
    """`text` as characters; None if it begins or ends inside one."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _readable_part(text: bytes) -> str:
    """The characters of `text` up to the first that is broken or unfinished."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
