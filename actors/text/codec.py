"""Between text and token ids: encoding, chat templates, incremental detokenising. Knows nothing of models or links.

Works with any transformers tokenizer, handed in; nothing of transformers is imported here.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from actors.errors import InvalidSettingError, PromptError, PromptTooLongError
from actors.text import tool_prompt
from actors.text.stop_strings import StopMatcher

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Tokens that one character can be split over at most: UTF-8 has at most four bytes."""


class Detokeniser(Protocol):
    """Turns tokens into text one by one; text appears with the token that completes it."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str:
        """What is left of an unfinished character, as a one-shot decode would show it."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What some tokens said. `texts` has one entry per token, up to the one that completed a stop string.

    texts: text released by each token: it joins to the answer, without the stop string. Text that could still begin
        a stop string is held back and released by a later token.
    stop: the stop string found; the token that completed it is texts' last.
    """

    texts: tuple[str, ...]
    stop: str | None = None

    @property
    def index(self) -> int | None:
        """Index, among the tokens pushed, of the one that completed the stop string."""
        return None if self.stop is None else len(self.texts) - 1


class TextStream:
    """The text of one answer as its tokens arrive. Amortised O(1) per token."""

    def __init__(self, detokeniser: Detokeniser, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokeniser = detokeniser
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._seen = 0

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Take tokens in order. Stop strings completed before `min_tokens` tokens do not count."""
        texts = []
        for token in tokens:
            self._seen += 1
            text, stop = self._matcher.feed(self._detokeniser.push(token), armed=self._seen >= self._min_tokens)
            texts.append(text)
            if stop is not None:
                return Pushed(tuple(texts), stop)
        return Pushed(tuple(texts))

    def flush(self) -> str:
        """Text still held back; call once, when the answer ended without a stop string."""
        return self._matcher.flush() + self._detokeniser.flush()


_PROBE = "zqxprobe"


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a chat template has a place for."""

    tools: bool
    system: bool
    calls: bool
    results: bool


def _template_errors() -> tuple[type[Exception], ...]:
    """What a chat template fails with that cannot be filled."""
    from jinja2.exceptions import TemplateError

    return (TemplateError, TypeError, KeyError, ValueError)


class TextCodec:
    """Encoder and decoder over one transformers tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special = frozenset(tokenizer.all_special_ids) | {
            id_ for id_, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        self._added = {id_: added.content for id_, added in tokenizer.added_tokens_decoder.items()}
        self._pieces: dict[int, bytes] = {}

    @property
    def vocabulary(self) -> int:
        """Ids that this tokenizer knows are below this."""
        return len(self._tokenizer)

    @property
    def eos(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> tuple[int, ...]:
        """Ids of `text`, with the special tokens that the tokenizer puts around a prompt unless told otherwise.

        Raises PromptTooLongError when the text cannot possibly fit into `limit` tokens; that is found from its
        length alone, so that megabytes are refused without being tokenised.
        """
        if limit is not None and len(text) > limit * self._longest_token:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, far more than fit into {limit} tokens", "prompt"
            )
        if self._backend is None:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special))
        # The batch call releases the interpreter lock; the transformers wrapper is not safe across threads.
        return tuple(self._backend.encode_batch([text], add_special_tokens=special)[0].ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        limit: int | None = None,
    ) -> tuple[int, ...]:
        """Ids of a conversation under the model's own chat template, ready for the assistant's answer.

        Raises PromptError when the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, tools), limit, special=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """The conversation as the model reads it. What the template has no place for (tools, calls, their results) is
        written into the messages.

        Raises PromptError like `encode_chat`, InvalidSettingError when tools cannot be told in any way.
        """
        if not messages:
            raise PromptError("messages is empty: send at least one message", "messages")
        if not getattr(self._tokenizer, "chat_template", None):
            raise PromptError("this model has no chat template; use /v1/completions", "messages")
        plain = [_plain(message) for message in messages]
        if any(message.get("tool_calls") for message in plain) and not self._shows.calls:
            plain = [tool_prompt.with_written_calls(message) for message in plain]
        if any(message.get("role") == "tool" for message in plain) and not self._shows.results:
            plain = [tool_prompt.as_user(message) for message in plain]
        if tools and not self._shows.tools:
            if not self._shows.system:
                raise InvalidSettingError("this model's chat template has no place for tools", "tools")
            plain, tools = tool_prompt.with_tools(plain, tools), None
        try:
            return self._filled(plain, tools)
        except _template_errors() as error:
            raise PromptError(f"the model's chat template refuses these messages: {error}", "messages") from error

    def _filled(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
        )
        return rendered

    @cached_property
    def _shows(self) -> _Shown:
        """Found out by filling the template with words that can only come from their place."""

        def shown(*messages: dict[str, object], tools: Sequence[Mapping[str, object]] | None = None) -> bool:
            try:
                return _PROBE in self._filled(messages, tools)
            except _template_errors():
                return False

        user: dict[str, object] = {"role": "user", "content": "x"}
        function = {"name": _PROBE, "description": "x", "parameters": {"type": "object", "properties": {}}}
        call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        calling: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": [call]}
        plain_call = {**call, "function": {"name": "x", "arguments": {}}}
        result: dict[str, object] = {"role": "tool", "tool_call_id": "call00000", "name": "x", "content": _PROBE}
        return _Shown(
            tools=shown(user, tools=[{"type": "function", "function": function}]),
            system=shown({"role": "system", "content": _PROBE}, user),
            calls=shown(user, calling, {**result, "content": "x"}),
            results=shown(user, {**calling, "tool_calls": [plain_call]}, result),
        )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens by how they are written."""
        return {str(content): id_ for id_, content in self._added.items() if id_ in self._special}

    def describe(self) -> dict[str, object]:
        """What a client must know to use this tokenizer from afar, in the words of tokenizer_config.json."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            **{name: getattr(self._tokenizer, name, None) for name in names},
            "chat_template": getattr(self._tokenizer, "chat_template", None),
            "vocab_size": self.vocabulary,
        }

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of `tokens`, without special tokens unless asked for."""
        stream = self.stream((), (), special=special)
        return "".join(stream.push(tokens).texts) + stream.flush()

    def piece(self, token: int) -> bytes:
        """The bytes that `token` stands for, special tokens by name; empty for ids that mean nothing."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._look_up(token)
        return known

    def stream(
        self, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0, special: bool = False
    ) -> TextStream:
        """A stream for one answer to `prompt`, whose last tokens decide whether a leading space is shown.

        special: whether special tokens are part of the text.
        """
        detokeniser: Detokeniser = (
            _ByteDetokeniser(self, special) if self._byte_level else _WindowDetokeniser(self, prompt, special)
        )
        return TextStream(detokeniser, stop, min_tokens)

    def is_special(self, token: int) -> bool:
        """Whether `token` is left out of the text."""
        return token in self._special

    def window(self, tokens: Sequence[int], special: bool = False) -> str:
        """One-shot decode of a few tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _byte_level(self) -> bool:
        """Whether every token is a string of bytes in GPT-2's printable alphabet."""
        if self._backend is None or self._backend.decoder is None:
            return False
        return bool(json.loads(self._backend.to_str())["decoder"]["type"] == "ByteLevel")

    @cached_property
    def _longest_token(self) -> int:
        return max((len(piece) for piece in self._tokenizer.get_vocab()), default=1)

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        if not 0 <= token < len(self._tokenizer):
            return b""
        if not self._byte_level:
            return self._piece_between(token)
        written = self._backend.id_to_token(token) if self._backend is not None else None
        if written is None:
            return b""
        if all(character in _BYTES for character in written):
            return bytes(_BYTES[character] for character in written)
        return str(written).encode()

    def _piece_between(self, token: int) -> bytes:
        """Bytes of a token of any other tokenizer: what it adds after itself, so that no leading space is lost."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # SentencePiece's byte fallback
            return bytes([int(name[3:5], 16)])
        once = self.window([token])
        return self.window([token, token])[len(once) :].encode()


class _ByteDetokeniser:
    """For byte-level vocabularies: exact, and independent of what came before."""

    def __init__(self, codec: TextCodec, special: bool) -> None:
        self._codec = codec
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        hidden = not self._special and self._codec.is_special(token)
        return "" if hidden else self._decoder.decode(self._codec.piece(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokeniser:
    """For any other vocabulary: what a one-shot decode of the last few tokens shows beyond the one before.

    The window slides to the last token boundary at which the text was whole, so its length is bounded.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], special: bool) -> None:
        self._codec = codec
        self._special = special
        self._window = [token for token in prompt[-2 * _LONGEST_CHARACTER :] if not codec.is_special(token)]
        self._read = len(self._window)
        self._shown = codec.window(self._window, special)

    def push(self, token: int) -> str:
        if not self._special and self._codec.is_special(token):
            return ""
        self._window.append(token)
        text = self._codec.window(self._window, self._special)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _LONGEST_CHARACTER:
            return ""
        return self._slide(text)

    def flush(self) -> str:
        return self._slide(self._codec.window(self._window, self._special)) if len(self._window) > self._read else ""

    def _slide(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self._codec.window(self._window, self._special)
        return new


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins for bytes of byte-level BPE (Radford et al. 2019): printable bytes are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _plain(message: Mapping[str, object]) -> dict[str, object]:
    """A message as chat templates expect it: text parts joined, tool-call arguments as a mapping, no nulls."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise PromptError("only text parts are supported in a message's content", "messages")
        plain["content"] = "".join(str(part) for part in parts)
    plain.setdefault("content", "")
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    function["arguments"] = arguments or {}  # absent, empty and null are a call without arguments
    return {**call, "function": function}
