"""A draft without a model: what followed the last few tokens when they occurred before.

Looks in the request's prediction (text that the client expects), its prompt and its answer so far. One answer is a
whole chain, since looking costs nothing. (Saxena, "Prompt lookup decoding", 2023; LLMA: Yang et al., "Inference with
reference", 2023.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.errors import OverloadedError
from actors.messages import OpenSequence, Support
from actors.settings import DraftSettings

_RECENT = 16
"""Most earlier occurrences of one n-gram that are looked at, latest first."""


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """How a match is made: the longest of `longest` .. `shortest` last tokens that occurred before."""

    longest: int = 4
    shortest: int = 2
    prediction_alone: bool = False
    """Leave the prompt and the answer out."""

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError("1 <= shortest <= longest is needed")


class _Text:
    """Tokens with an index of where each n-gram ends. Appending costs O(longest) per token."""

    def __init__(self, tokens: Sequence[int], settings: LookupSettings) -> None:
        self._settings = settings
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(self._settings.shortest, min(self._settings.longest, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - n : end]), []).append(end)

    def find(self, gram: tuple[int, ...]) -> list[int]:
        """Ends of `gram`, those with nothing after them left out, latest first."""
        ends = [end for end in self._ends.get(gram, ())[-_RECENT - 1 :] if end < len(self.tokens)]
        return ends[::-1]

    def next(self, gram: tuple[int, ...], position: int) -> int | None:
        """The first end of `gram` at or after `position`, or else its last one before; something must follow it."""
        ends: Sequence[int] = self._ends.get(gram, ())
        i = bisect_left(ends, position)
        for end in (*ends[i : i + 1], *ends[max(i - 1, 0) : i]):
            if end < len(self.tokens):
                return end
        return None


class _Session:
    """One sequence."""

    def __init__(self, opening: OpenSequence, settings: LookupSettings) -> None:
        self._settings = settings
        self._text = _Text(() if settings.prediction_alone else (*opening.prompt, *opening.committed), settings)
        self._prediction = _Text(opening.sampling.prediction, settings)
        self._answer: list[int] = []
        self._reached = 0
        """How much of the prediction the answer has come past, as far as it was followed."""
        self._follow(opening.committed)

    def advance(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed."""
        if not self._settings.prediction_alone:
            self._text.extend(tokens)
        self._follow(tokens)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Keep track of where in the prediction the answer is: the nearest match at or after the last one."""
        for token in tokens:
            self._answer.append(token)
            for _, gram in self._grams(self._answer):
                end = self._prediction.next(gram, self._reached)
                if end is not None:
                    self._reached = end
                    break

    def chains(self, path: Sequence[int], length: int) -> Iterator[tuple[int, Sequence[int]]]:
        """What may follow `path`, best first: length of the match, and up to `length` tokens."""
        predicted = self._prediction.tokens
        if predicted and not self._answer:
            agrees = list(path) == predicted[: len(path)]
            if agrees and len(path) < len(predicted):
                yield self._settings.longest, predicted[len(path) : len(path) + length]
        context = [*self._text.tokens[-self._settings.longest :], *path]
        answered = [*self._answer[-self._settings.longest :], *path]
        ahead = self._reached + len(path)
        for n, gram in self._grams(answered):
            end = self._prediction.next(gram, ahead)
            if end is not None:
                yield n, predicted[end : end + length]
        for n, gram in self._grams(context):
            for place in self._text.find(gram):
                yield n, self._text.tokens[place : place + length]

    def _grams(self, tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The last n tokens, longest first."""
        for n in range(min(self._settings.longest, len(tokens)), self._settings.shortest - 1, -1):
            yield n, tuple(tokens[len(tokens) - n :])


class PromptLookupDraft:
    """Implements protocol.DraftModel. Knows no vocabulary, so it fits every target."""

    def __init__(self, settings: DraftSettings, lookup: LookupSettings | None = None) -> None:
        self._settings, self._lookup = settings, lookup or LookupSettings()
        self._sessions: dict[str, _Session] = {}

    def card(self) -> ModelCard:
        return ModelCard("prompt_lookup", 0, self._settings.context, self._settings.slots)

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises OverloadedError when settings.slots sequences are held."""
        self.close(opening.sequence)
        if len(self._sessions) >= self._settings.slots:
            raise OverloadedError(f"all {self._settings.slots} draft slots are taken")
        self._sessions[opening.sequence] = _Session(opening, self._lookup)

    def close(self, sequence: str) -> None:
        """Forget a sequence. Unknown ones are ignored."""
        self._sessions.pop(sequence, None)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""
        self._sessions[sequence].advance(tokens)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """A chain per request, each node after its parent; an answer without tokens where nothing matches."""
        return [answer for request in requests for answer in self._expand(request)]

    def _expand(self, request: Expand) -> Iterator[Ranked]:
        tree = self._settings.tree
        length = max(1, tree.depth - len(request.path))
        matches = list(self._sessions[request.sequence].chains(request.path, length))
        if not matches:
            yield Ranked(request.sequence, request.path, (), ())
            return
        n, chain = matches[0]
        first: dict[int, float] = {}
        for other, tokens in matches:  # alternatives share what the better ones leave
            if len(first) < tree.branching and tokens[0] not in first:
                first[tokens[0]] = (1.0 - sum(first.values())) * other / (other + 1)
        path = request.path
        for i, token in enumerate(chain):
            ranked = first if i == 0 else {token: n / (n + 1)}
            yield Ranked(request.sequence, path, tuple(ranked), tuple(ranked.values()), self._support(token))
            path = (*path, token)

    def _support(self, token: int) -> Support | None:
        """A lookup is certain of what it says: q is one on the proposed token."""
        return Support((token,), (1.0,)) if self._settings.rule in ("rejection", "block") else None
