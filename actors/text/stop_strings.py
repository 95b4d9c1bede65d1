"""Stop strings, found while the text is still growing. Knows nothing of tokens.

Each stop string has its own Knuth-Morris-Pratt automaton: one step per character, however long the text. The state of
an automaton is how much of the stop string the text ends with, so the largest state is also how much text must be
held back because a stop string may have begun in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def _failure(pattern: str) -> list[int]:
    """Length of the longest proper border of pattern[: i + 1], for each i (Knuth, Morris, Pratt 1977)."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


@dataclass(slots=True)
class _Automaton:
    pattern: str
    table: list[int]
    state: int = 0

    def step(self, character: str) -> bool:
        """Take one character; True when the text now ends with the whole pattern."""
        state = self.state
        if state == len(self.pattern):
            state = self.table[state - 1]
        while state and self.pattern[state] != character:
            state = self.table[state - 1]
        if self.pattern[state] == character:
            state += 1
        self.state = state
        return state == len(self.pattern)


class StopMatcher:
    """Releases text that can no longer be part of a stop string, and ends at the first stop string completed.

    Of several completed by the same character the longest wins, so that nothing of any of them is shown.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._automata = [_Automaton(pattern, _failure(pattern)) for pattern in dict.fromkeys(stop) if pattern]
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Returns the text released, and the stop string that ended it, if one did.

        Unless `armed`, a completed stop string is let through (min_tokens is not reached yet).
        """
        if not self._automata:
            return text, None
        held = len(self._held)
        text = self._held + text
        for end in range(held, len(text)):
            character = text[end]
            complete = [a.pattern for a in self._automata if a.step(character)]
            if complete and armed:
                found = max(complete, key=len)
                self._held = ""
                return text[: end + 1 - len(found)], found
        # A pattern that was completed while unarmed cannot be completed again by the same characters.
        keep = max(a.table[-1] if a.state == len(a.pattern) else a.state for a in self._automata)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held
