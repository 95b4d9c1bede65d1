"""A draft with a tokenizer of its own: it reads and writes text, and its guesses are cut into the target's tokens.

It is greedy, since it cannot share the noise of tokens that it does not know. One answer is a chain. What follows a
wrong guess is computed again from where the draft's own tokens part (rollback is by length, as in every slot).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from actors.algorithms.retokenising import Codec, Transcript
from actors.engines.protocol import Expand, ModelCard, Ranked
from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.slots import SlotRow
from actors.errors import OverloadedError
from actors.messages import OpenSequence, Support
from actors.settings import DraftSettings

_STEPS = 6
"""Most passes in one answer: a token of the target may take several of the draft's, and one more to be sure of it."""


class _Session:
    """One sequence. `cached` are the draft's tokens whose keys and values are in the slot."""

    def __init__(self, slot: int, transcript: Transcript) -> None:
        self.slot, self.transcript = slot, transcript
        self.cached: list[int] = []

    def pending(self, budget: int) -> tuple[int, list[int]]:
        """Where to go on in the slot, and with which tokens, at most `budget`; at least the last one."""
        ids = self.transcript.ids
        start = 0
        while start < min(len(self.cached), len(ids) - 1) and self.cached[start] == ids[start]:
            start += 1
        return start, ids[start : start + budget]

    def follows(self, path: Sequence[int]) -> bool:
        """Whether `path` is the beginning of the chain."""
        return [guess.token for guess in self.transcript.guesses[: len(path)]] == list(path)


class RetokenisedDraft:
    """Implements protocol.DraftModel. Its own vocabulary is nobody's business, so it fits every target.

    target, draft: the text of both models. eos: how the target ends a text, None if it does not.
    """

    def __init__(
        self, model: CausalLM, settings: DraftSettings, *, target: Codec, draft: Codec, eos: int | None = None
    ) -> None:
        self._model, self._settings = model, settings
        self._target, self._draft, self._eos = target, draft, eos
        self._cache = model.cache(slots=settings.slots, context=settings.context)
        self._free = list(range(settings.slots - 1, -1, -1))
        self._sessions: dict[str, _Session] = {}

    def card(self) -> ModelCard:
        return ModelCard(self._model.name, 0, self._settings.context, self._settings.slots)

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence. Raises OverloadedError when no slot is free."""
        self.close(opening.sequence)
        if not self._free:
            raise OverloadedError(f"all {self._settings.slots} draft slots are taken")
        transcript = Transcript(self._target, self._draft, (*opening.prompt, *opening.committed))
        self._sessions[opening.sequence] = _Session(self._free.pop(), transcript)

    def close(self, sequence: str) -> None:
        """Give the slot back. Unknown sequences are ignored."""
        session = self._sessions.pop(sequence, None)
        if session is not None:
            self._free.append(session.slot)

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """`tokens` were committed past the committed prefix."""
        self._sessions[sequence].transcript.commit(tokens)

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """A chain per request, each node after its parent.

        Left out are sequences that need more passes before anything is certain; an answer without tokens says that
        nothing follows, because the draft ended its text, its context is full, or the committed text ends inside a
        character.
        """
        for _ in range(_STEPS):
            waiting = dict.fromkeys(request.sequence for request in requests if self._can_write(request))
            if not waiting or not self._step([self._sessions[name] for name in waiting]):
                break
        return [answer for request in requests for answer in self._answers(request)]

    def _can_write(self, request: Expand) -> bool:
        """Whether nothing is known to follow, and one more token may help."""
        session = self._sessions[request.sequence]
        known = session.transcript
        room = len(known.ids) < self._settings.context
        return known.writable and room and session.follows(request.path) and len(known.guesses) == len(request.path)

    def _step(self, sessions: Sequence[_Session]) -> bool:
        """One pass: each of the sessions reads what is new to it, and writes one token if it has read everything.

        False if there was more to read than fits into a pass: then it is the others' turn.
        """
        budget = self._settings.prefill_chunk
        rows: list[SlotRow] = []
        ends: list[int] = []
        writers: list[_Session] = []
        total = 0
        for session in sessions:
            start, tokens = session.pending(budget)
            if not tokens:
                continue
            budget -= len(tokens)
            rows.append(SlotRow(session.slot, tokens, start))
            session.cached[start:] = tokens
            total += len(tokens)
            if start + len(tokens) == len(session.transcript.ids):
                ends.append(total - 1)
                writers.append(session)
        logits = self._model.run(self._cache, rows, ends)  # [writers, V']
        if writers:
            self._write(writers, logits)
        return len(writers) == len(sessions)

    def _write(self, writers: Sequence[_Session], logits: Tensor) -> None:
        best, places = logits.float().log_softmax(-1).max(-1)
        vocabulary = self._model.vocabulary
        tokens: list[int] = (places if vocabulary is None else vocabulary[places]).tolist()
        for session, token, confidence in zip(writers, tokens, best.exp().tolist(), strict=True):
            if token in self._model.eos:
                session.transcript.end(self._eos, confidence)
            elif self._draft.is_special(token) or not confidence > 0:  # NaN is not
                session.transcript.end(None, 0.0)
            else:
                session.transcript.write(token, confidence)

    def _answers(self, request: Expand) -> Iterator[Ranked]:
        session, path = self._sessions[request.sequence], request.path
        known = session.transcript
        if not session.follows(path) or (len(known.guesses) == len(path) and not self._can_write(request)):
            yield Ranked(request.sequence, path, (), ())
            return
        for guess in known.guesses[len(path) :]:
            yield Ranked(request.sequence, path, (guess.token,), (guess.confidence,), self._support(guess.token))
            path = (*path, guess.token)

    def _support(self, token: int) -> Support | None:
        """A greedy draft is certain of what it says: q is one on the proposed token."""
        return Support((token,), (1.0,)) if self._settings.rule in ("rejection", "block") else None
