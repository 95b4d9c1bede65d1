"""Whether JSON that is still being written can become a call of a function that was offered. Knows no markers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["open", "complete", "no"]
BLANK = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id")
"""What an object that is a call may hold; any other key makes it an answer in JSON."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is JSON text, as OpenAI has it."""

    id: str
    name: str
    arguments: str

    def as_openai(self, index: int | None = None) -> dict[str, object]:
        """With `index` as a delta of a stream, without as part of a message."""
        call: dict[str, object] = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


class CallScanner:
    """Reads one JSON value character by character: a call, or an array of calls. O(1) per character."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._open: list[str] = []
        self._string: list[str] | None = None
        self._escaped = False
        self._key: str | None = None
        """The key of the call whose value is being read; None where a key comes next."""
        self._begun = False
        """Whether that value has begun."""

    def feed(self, character: str) -> Verdict:
        """Take one character: the value is complete with it, still open, or no call whatever follows."""
        if self._string is not None:
            return self._in_string(character)
        if character in BLANK:
            return "open"
        if self._open == ["["] and character not in "{,]":
            return "no"
        if self._in_call:
            if self._key is None and character not in '",}':
                return "no"
            if self._key is not None and not self._begun and character != ":":
                self._begun = True
                if character not in _starts(self._key, character):
                    return "no"
            if character == ",":
                self._key, self._begun = None, False
        if character == '"':
            self._string = []
            return "open" if self._open else "no"
        if character in "{[":
            self._open.append(character)
            return "open"
        return self._close(character) if character in "}]" else "open" if self._open else "no"

    def _close(self, character: str) -> Verdict:
        if not self._open or self._open.pop() != ("{" if character == "}" else "["):
            return "no"
        if self._open in ([], ["["]):
            self._key, self._begun = None, False
        return "open" if self._open else "complete"

    @property
    def _in_call(self) -> bool:
        """Directly inside the object of a call."""
        return self._open in (["{"], ["[", "{"])

    def _in_string(self, character: str) -> Verdict:
        assert self._string is not None
        ends = character == '"' and not self._escaped
        self._escaped = character == "\\" and not self._escaped
        wanted = self._wanted()
        if wanted is None:
            if ends:
                self._string = None
            return "open"
        if not ends:
            self._string.append(character)
        text = "".join(self._string)
        if not ends:
            return "open" if "\\" in text or any(one.startswith(text) for one in wanted) else "no"
        self._string = None
        try:
            text = json.loads(f'"{text}"', strict=False)
        except ValueError:
            return "no"
        if text not in wanted:
            return "no"
        if self._key is None:
            self._key = text
        return "open"

    def _wanted(self) -> Iterable[str] | None:
        """What the string being read may say; None where it may say anything."""
        if not self._in_call:
            return None
        if self._key is None:
            return _KEYS
        return self._names if self._key == "name" else None


def _starts(key: str, otherwise: str) -> str:
    """What the value of a key of a call may begin with."""
    return '"' if key == "name" else '{"n' if key in _ARGUMENTS else otherwise


def calls_in(text: str, names: Iterable[str], needs_arguments: bool) -> list[ToolCall]:
    """The calls that a complete JSON value is; empty if it is none.

    needs_arguments: whether an object with a name alone is no call (outside of the markers of a call it is data).
    """
    known = frozenset(names)
    try:
        written = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []
    calls = [_call(one, known, needs_arguments) for one in (written if isinstance(written, list) else [written])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(written: Any, names: frozenset[str], needs_arguments: bool) -> ToolCall | None:
    if not isinstance(written, dict) or written.get("name") not in names or not set(written) <= set(_KEYS):
        return None
    given = [written[key] for key in _ARGUMENTS if key in written]
    if needs_arguments and not given:
        return None
    arguments = given[0] if given else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", written["name"], json.dumps(arguments, ensure_ascii=False))
