"""Tool calls in what a model wrote, for the ways in which common model families write them.

Hermes and Qwen: <tool_call>{"name", "arguments"}</tool_call>. Mistral: [TOOL_CALLS][{...}]. Llama 3: a bare JSON
object, after <|python_tag|> or not, at the start of the answer; several are parted by semicolons. A call to a function
that was not offered is text, not a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from deployments.ingress.tools.call_scanner import BLANK, CallScanner, ToolCall, calls_in

__all__ = ["ToolCall", "ToolCallReader"]

_TAG, _END_TAG, _ARRAY, _PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_MARKERS = (_TAG, _ARRAY, _PYTHON)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))


class ToolCallReader:
    """Parts text from calls as they are written.

    Text is held only while it can still become a call; a call is told once it is complete. White space around calls
    is no text. What began as a call and never became one, or was cut off, is text.
    """

    def __init__(self, names: Iterable[str], parallel: bool = True) -> None:
        """parallel: whether several calls may be told; otherwise the first one is."""
        self._names = frozenset(names)
        self._parallel = parallel
        self._text = ""
        """Not told yet, outside of a call that may have begun."""
        self._candidate: list[str] = []
        """Pieces of what may become a call, after its marker."""
        self._before = ""
        """Separators before it, which are text if it is none."""
        self._marker = ""
        self._scanner: CallScanner | None = None
        self._bare = True
        """Whether a call may begin without a marker: nothing was said yet, or a bare call just now."""
        self._separators = BLANK
        """Held back here, as long as nothing but them has come: what may stand before a call, or after one."""
        self._around = True
        self._closing = False
        """A tagged call is complete; its end tag may follow."""
        self._told = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certainly no call, and the calls that are complete."""
        if not self._names:
            return text, []
        self._text += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while self._step(shown, calls):
            pass
        return "".join(shown), self._counted(calls)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, when no more will come."""
        shown: list[str] = []
        calls: list[ToolCall] = []
        while self._scanner is not None:  # it was cut off; but a call may stand within it
            self._give_up(shown)
            while self._step(shown, calls):
                pass
        rest = self._text
        if self._closing and _END_TAG.startswith(rest.lstrip()):
            rest = ""
        if self._around and (self._told or calls) and not rest.strip(self._separators):
            rest = ""
        self._text = ""
        return "".join(shown) + rest, self._counted(calls)

    def _counted(self, calls: list[ToolCall]) -> list[ToolCall]:
        kept = calls if self._parallel else calls[: max(0, 1 - self._told)]
        self._told += len(calls)
        return kept

    def _step(self, shown: list[str], calls: list[ToolCall]) -> bool:
        """Go on with what is there. False when more must come first."""
        if self._scanner is not None:
            return self._scan(shown, calls)
        if self._closing:
            rest = self._text.lstrip(BLANK)
            if len(rest) < len(_END_TAG) and _END_TAG.startswith(rest):
                return False
            self._closing = False
            if rest.startswith(_END_TAG):
                self._text = rest[len(_END_TAG) :]
        if self._around:
            rest = self._text.lstrip(self._separators)
            if not rest or any(len(rest) < len(marker) and marker.startswith(rest) for marker in _MARKERS):
                return False
            if self._bare and rest[0] in "{[" and not rest.startswith(_ARRAY):
                self._begin("", rest)
                return True
        found = _MARKER.search(self._text)
        if found is None:
            keep = _started(self._text)
            self._say(self._text[: len(self._text) - keep], shown)
            self._text = self._text[len(self._text) - keep :]
            return False
        before = self._text[: found.start()]
        if not self._around or before.strip(self._separators):
            self._say(before, shown)
            before = ""
        self._begin(found.group(), self._text[found.end() :], before)
        return True

    def _say(self, text: str, shown: list[str]) -> None:
        if text:
            shown.append(text)
            self._bare = self._around = False

    def _begin(self, marker: str, rest: str, before: str | None = None) -> None:
        """A call may begin here."""
        if before is None:
            before = self._text[: len(self._text) - len(rest)]
        self._scanner, self._marker = CallScanner(self._names), marker
        self._candidate, self._text, self._before = [], rest, before

    def _scan(self, shown: list[str], calls: list[ToolCall]) -> bool:
        assert self._scanner is not None
        for i, character in enumerate(self._text):
            verdict = self._scanner.feed(character)
            if verdict == "open":
                continue
            self._candidate.append(self._text[: i + 1])
            self._text = self._text[i + 1 :]
            read = calls_in("".join(self._candidate), self._names, not self._marker) if verdict == "complete" else []
            if not read:
                self._give_up(shown)
                return True
            calls += read
            self._scanner, self._candidate = None, []
            self._around, self._closing = True, self._marker == _TAG
            self._bare = self._marker in ("", _PYTHON)
            self._separators = BLANK + ";" if self._bare else BLANK
            return True
        self._candidate.append(self._text)
        self._text = ""
        return False

    def _give_up(self, shown: list[str]) -> None:
        """It is no call: its beginning is text, and in what follows another may begin."""
        written = "".join(self._candidate)
        certain = 0 if self._marker else 1  # at least a character, so that it does not begin here once more
        self._say(self._before + self._marker + written[:certain], shown)
        self._text = written[certain:] + self._text
        self._scanner, self._candidate = None, []


def _started(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, _MARKERS)) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in _MARKERS)),
        0,
    )
