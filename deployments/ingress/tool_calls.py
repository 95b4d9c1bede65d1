"""Tool calls in what a model wrote, for the ways in which common model families write them.

Hermes and Qwen: <tool_call>{"name", "arguments"}</tool_call>. Mistral: [TOOL_CALLS][{...}]. Llama 3: a bare JSON
object, after <|python_tag|> or not. A call to a function that was not offered is text, not a call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.text.stop_strings import StopMatcher

_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


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


class ToolCallReader:
    """Lets text through until a call may have begun; what follows is held until the end and then read."""

    def __init__(self, names: Iterable[str], parallel: bool = True) -> None:
        """parallel: whether several calls may be told; otherwise the first one is."""
        self._parallel = parallel
        self._names = frozenset(names)
        self._markers = StopMatcher(_MARKERS)
        self._text = ""
        self._shown = 0
        self._held: str | None = None

    def push(self, text: str) -> str:
        """The part of the text that is certainly no call."""
        if not self._names:
            return text
        if self._held is not None:
            self._held += text
            return ""
        first = not self._text.strip()
        self._text += text
        if first and text.strip() and text.lstrip()[0] in "{[":  # a bare call, or [TOOL_CALLS]
            self._held = self._text[self._shown :]
            return ""
        released, marker = self._markers.feed(text)
        self._shown += len(released)
        if marker is not None:
            self._held = self._text[self._shown :]
        return released

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text, or the calls that it was."""
        if self._held is None:
            return self._markers.flush(), []
        calls = read_calls(self._held, self._names)
        if not calls:
            return self._held, []
        return "", calls if self._parallel else calls[:1]


def read_calls(text: str, names: Iterable[str]) -> list[ToolCall]:
    """All calls in `text`; empty if there is none, or one of them cannot be read."""
    known = frozenset(names)
    bodies: Sequence[str] = _TAGGED.findall(text)
    if not bodies:
        bodies = [text.removeprefix("<|python_tag|>").strip().removeprefix("[TOOL_CALLS]")]
    calls = []
    for body in bodies:
        try:
            written = json.loads(body)
        except ValueError:
            return []
        for call in written if isinstance(written, list) else [written]:
            if not isinstance(call, dict) or call.get("name") not in known:
                return []
            arguments = call.get("arguments", call.get("parameters", {}))
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(f"call_{secrets.token_hex(12)}", call["name"], as_text))
    return calls
