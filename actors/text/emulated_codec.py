"""Text for engines that have no vocabulary of their own (the emulated ones): every token id is a word.

Id 17 reads " w17". Text that is no such word is given an id by a hash, so any prompt can be sent.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence

from actors.errors import PromptError, PromptTooLongError
from actors.text.codec import TextStream

_WORD = re.compile(r"w(\d{1,9})")


class EmulatedCodec:
    """The same surface as TextCodec, for `vocabulary` ids of which `reserved` at the start are never made from text."""

    def __init__(self, vocabulary: int, reserved: int = 1, eos: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.eos = eos
        self._reserved = min(reserved, vocabulary - 1)

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> tuple[int, ...]:
        """One id per word. Raises PromptTooLongError as TextCodec does."""
        words = text.split()
        if limit is not None and len(words) > limit:
            raise PromptTooLongError(f"the prompt has {len(words)} tokens; at most {limit} fit", "prompt")
        return tuple(map(self._id, words))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        limit: int | None = None,
    ) -> tuple[int, ...]:
        """Each message as its role and its words."""
        return self.encode(self.render_chat(messages, tools), limit)

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Roles and contents as plain words."""
        if not messages:
            raise PromptError("messages is empty: send at least one message", "messages")
        offered = [f"tools: {json.dumps(list(tools))}"] if tools else []
        lines = [f"{message.get('role', 'user')}: {message.get('content') or ''}" for message in messages]
        return "\n".join([*offered, *lines, "assistant:"])

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """There are none."""
        return {}

    def describe(self) -> dict[str, object]:
        """See TextCodec."""
        return {"tokenizer_class": type(self).__name__, "vocab_size": self.vocabulary}

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of `tokens`."""
        return "".join(map(self._text, tokens))

    def piece(self, token: int) -> bytes:
        """The bytes of one token."""
        return self._text(token).encode()

    def stream(
        self, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0, special: bool = False
    ) -> TextStream:
        """A stream for one answer."""
        return TextStream(_WordDetokeniser(self), stop, min_tokens)

    def _id(self, word: str) -> int:
        match = _WORD.fullmatch(word)
        if match and int(match[1]) < self.vocabulary:
            return int(match[1])
        return self._reserved + zlib.crc32(word.encode()) % (self.vocabulary - self._reserved)

    def _text(self, token: int) -> str:
        return f" w{token}"


class _WordDetokeniser:
    def __init__(self, codec: EmulatedCodec) -> None:
        self._codec = codec

    def push(self, token: int) -> str:
        return self._codec.decode((token,))

    def flush(self) -> str:
        return ""
