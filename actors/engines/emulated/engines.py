"""Emulated engines: real time, exact tokens, no arithmetic.

They stand in for hardware that is not there, through the real actors and links. Beyond taking time and naming
tokens, they hold their caller to the engine protocol as a KV cache would: running tokens past what is cached, or
expanding a node whose parent was never run, is an EngineError rather than a silent wrong answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from actors.algorithms.draft_tree import rejected, walk
from actors.engines.emulated.language import Language, draw_key, ranked_tokens, token_at, uniform
from actors.engines.emulated.presets import DraftSpec, TargetSpec
from actors.engines.emulated.timing import Faults, Pacer
from actors.engines.protocol import Expand, ModelCard, Ranked, Row
from actors.errors import EngineError, InvalidSettingError, OverloadedError
from actors.messages import Alternatives, OpenSequence, VerificationResult, extend_key, prefix_key
from actors.settings import DraftSettings, TargetSettings

_LOGPROB = 0x6A09E667F3BCC908


def _card(name: str, language: Language, settings: TargetSettings | DraftSettings) -> ModelCard:
    return ModelCard(
        name=name,
        vocabulary=language.vocabulary,
        context=settings.context,
        slots=settings.slots,
        eos=language.eos,
        fingerprint=language.fingerprint,
    )


@dataclass
class _Slot:
    """A target's slot: `committed` includes the prompt, `key` names it, `cached` positions were run."""

    opening: OpenSequence
    committed: list[int]
    key: int
    cached: int = 0


class _Said:
    """The target's own tokens along a walk, which asks for them in order (algorithms/draft_tree.Choices)."""

    def __init__(self, slot: _Slot, language: Language) -> None:
        self._slot, self._language = slot, language
        self.keys: list[int] = []
        """Of the prefix before each token."""
        self.tokens: list[int] = []

    def __getitem__(self, row: int, /) -> int:
        slot, place = self._slot, len(self.tokens)
        self.keys.append(extend_key(self.keys[-1], self.tokens[-1]) if place else slot.key)
        self.tokens.append(token_at(self.keys[-1], len(slot.committed) + place, slot.opening, self._language))
        return self.tokens[-1]


def _is_tree(tokens: Sequence[int], parents: Sequence[int]) -> bool:
    first = all(-1 <= parent < i for i, parent in enumerate(parents))
    return first and len(tokens) == len(parents) == len(set(zip(parents, tokens, strict=True)))


class EmulatedTarget:
    """A target whose token is a hash of the prefix, and of the seed when sampling.

    spec: times, language and planned faults. clock and sleep must agree; they are replaced in tests only.
    Temperature, top_k, top_p, min_p and penalties shape a distribution that does not exist here: any value is taken,
    and only the seed makes a difference. Settings whose effect would be seen to be missing are refused.
    """

    def __init__(
        self,
        spec: TargetSpec,
        settings: TargetSettings | None = None,
        name: str = "emulated",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self.settings = settings or TargetSettings()
        self.faults = Faults(spec.faults)
        self.passes = 0
        self._name = name
        self._pacer = Pacer(clock, sleep)
        self._slots: dict[int, _Slot] = {}

    def card(self) -> ModelCard:
        return replace(_card(self._name, self.spec.language, self.settings), trees=True)

    def attach(self, slot: int, opening: OpenSequence) -> None:
        """Take `opening` into `slot`. Raises InvalidSettingError for settings that only a real model can honour."""
        sampling = opening.sampling
        for name in ("grammar", "allowed_token_ids", "bad_words", "logit_bias"):
            if getattr(sampling, name):
                raise InvalidSettingError(f"an emulated model cannot honour {name}", name)
        committed = [*opening.prompt, *opening.committed]
        self._slots[slot] = _Slot(opening, committed, prefix_key(committed))

    def forward(self, rows: Sequence[Row]) -> list[VerificationResult | None]:
        """Take the time of one pass. Raises EngineError for rows that a KV cache could not serve, and on faults."""
        started = self._pacer.begin(self.spec.pass_ms / 1e3)
        factor = self.faults.begin_pass()
        self.passes += 1
        results = [self._run(row) for row in rows]
        decided = sum(1 + len(row.proposal.tokens) for row in rows if row.decide)
        prompt = sum(len(row.tokens) for row in rows) - decided
        spec = self.spec
        milliseconds = spec.pass_ms + spec.token_ms * decided + spec.prompt_token_ms * prompt
        self._pacer.finish(started, factor * milliseconds / 1e3)
        return results

    def _run(self, row: Row) -> VerificationResult | None:
        slot = self._slots.get(row.slot)
        if slot is None:
            raise EngineError(f"slot {row.slot} holds no sequence")
        drafts = row.proposal.tokens
        end = row.start + len(row.tokens) - len(drafts)
        if row.start > slot.cached:
            raise EngineError(f"slot {row.slot}: positions {slot.cached} to {row.start} were never run")
        if end > len(slot.committed) or list(row.tokens) != [*slot.committed[row.start : end], *drafts]:
            raise EngineError(f"slot {row.slot}: the row from {row.start} is not the committed prefix and its drafts")
        if not row.decide:
            if drafts:
                raise EngineError(f"slot {row.slot}: drafts cannot follow an unfinished prompt")
            slot.cached = end
            return None
        if end != len(slot.committed):
            raise EngineError(f"slot {row.slot}: asked to decide at {end}, {len(slot.committed)} are committed")
        parents = row.proposal.parents
        if parents and not _is_tree(drafts, parents):
            raise EngineError(f"slot {row.slot}: the drafts are no tree whose parents come first and siblings differ")
        return self._decide(slot, drafts, parents)

    def _decide(self, slot: _Slot, drafts: Sequence[int], parents: Sequence[int]) -> VerificationResult:
        sampling = slot.opening.sampling
        said = _Said(slot, self.spec.language)
        path = walk(drafts, parents, said)
        slot.cached = len(slot.committed) + len(path)
        views: tuple[Alternatives, ...] = ()
        if sampling.logprobs is not None:
            choices = zip(said.keys, said.tokens, strict=True)
            views = tuple(self._view(key, token, sampling.logprobs) for key, token in choices)
        margins = (1.0,) * len(said.tokens) if sampling.margins else ()
        return VerificationResult(
            slot.opening.sequence,
            len(slot.committed),
            tuple(said.tokens),
            len(drafts),
            len(path),
            alternatives=views,
            margins=margins,
            rejected=rejected(drafts, parents, said.tokens[: len(path)]) if sampling.margins else (),
        )

    def _view(self, key: int, token: int, count: int) -> Alternatives:
        """Log-probabilities that add up and depend on the prefix alone; made up, as everything here is."""
        chance = 0.5 + 0.49 * uniform(key, _LOGPROB)
        ordinary = self.spec.language.vocabulary - 1
        others = [
            ((token + 1 + i) % ordinary, math.log((1 - chance) * 0.5 ** (i + 1))) for i in range(max(count - 1, 0))
        ]
        best = (token, math.log(chance))
        return Alternatives(best[1], (best, *others) if count else ())

    def record(self, slot: int, tokens: Sequence[int]) -> None:
        held = self._slots[slot]
        held.committed.extend(tokens)
        held.key = prefix_key(tokens, held.key)
        held.cached = min(held.cached, len(held.committed))

    def detach(self, slot: int) -> None:
        self._slots.pop(slot, None)


@dataclass
class _Session:
    """A draft's sequence. `cached` counts the positions of the committed prefix that were run without a gap.

    run: keys of the tree nodes that were expanded, by position, so that what is passed is forgotten at once.
    """

    opening: OpenSequence
    length: int
    key: int
    cached: int = 0
    run: dict[int, set[int]] = field(default_factory=dict)
    paths: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Keys of nodes run since the last commit, by path from the committed prefix."""

    def holds(self, position: int, key: int) -> bool:
        return key in self.run.get(position, ())


class EmulatedDraft:
    """A draft that ranks the target's token where its specification says. Answers `tree.branching` children."""

    def __init__(
        self,
        spec: DraftSpec,
        settings: DraftSettings | None = None,
        name: str = "emulated",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self.settings = settings or DraftSettings()
        self.faults = Faults(spec.faults)
        self.steps = 0
        self._name = name
        self._pacer = Pacer(clock, sleep)
        self._sessions: dict[str, _Session] = {}

    def card(self) -> ModelCard:
        return _card(self._name, self.spec.language, self.settings)

    def open(self, opening: OpenSequence) -> None:
        """Take a sequence, afresh if it is held already. Raises OverloadedError when no slot is free."""
        if opening.sequence not in self._sessions and len(self._sessions) >= self.settings.slots:
            raise OverloadedError(f"all {self.settings.slots} draft slots are taken")
        tokens = (*opening.prompt, *opening.committed)
        self._sessions[opening.sequence] = _Session(opening, len(tokens), prefix_key(tokens))

    def expand(self, requests: Sequence[Expand]) -> list[Ranked]:
        """One draft step. Raises EngineError for nodes that were not reached step by step, and on faults."""
        started = self._pacer.begin(self.spec.step_ms / 1e3)
        factor = self.faults.begin_pass()
        self.steps += 1
        budget = self.settings.prefill_chunk
        answers: list[Ranked] = []
        prefilled = 0
        for request in requests:
            session = self._sessions.get(request.sequence)
            if session is None:
                raise EngineError(f"no session for sequence {request.sequence}")
            if not request.path:
                missing = max(session.length - session.cached - 1, 0)
                now = min(missing, budget)
                budget -= now
                prefilled += now
                if now < missing:
                    session.cached += now
                    continue
                session.cached = session.length
            answers.append(self._rank(session, request))
        spec = self.spec
        milliseconds = spec.step_ms + spec.row_ms * len(answers) + spec.prompt_token_ms * prefilled
        self._pacer.finish(started, factor * milliseconds / 1e3)
        return answers

    def _rank(self, session: _Session, request: Expand) -> Ranked:
        key, position = self._reach(session, request), session.length + len(request.path)
        opening, language = session.opening, self.spec.language
        truth = token_at(key, position, opening, language)
        draws = draw_key(key, None if opening.sampling.greedy else opening.seed, language)
        tokens, confidences = ranked_tokens(draws, truth, language, self.spec.agreement, self.settings.tree.branching)
        return Ranked(request.sequence, request.path, tokens, confidences)

    def _reach(self, session: _Session, request: Expand) -> int:
        """Key of the node, whose parents must all have been run; the node is run now."""
        path = request.path
        parent = session.paths.get(path[:-1]) if path else None
        if parent is not None:
            key = extend_key(parent, path[-1])
        else:
            key = session.key
            for depth, token in enumerate(path):
                if session.cached < session.length or (depth and not session.holds(session.length + depth, key)):
                    raise EngineError(f"sequence {request.sequence}: a node before {path} was never expanded")
                key = extend_key(key, token)
        if path:
            session.run.setdefault(session.length + len(path), set()).add(key)
        session.paths[path] = key
        return key

    def advance(self, sequence: str, tokens: Sequence[int]) -> None:
        """Move the committed prefix on. Raises EngineError for a sequence that is not held."""
        session = self._sessions.get(sequence)
        if session is None:
            raise EngineError(f"no session for sequence {sequence}")
        session.paths.clear()
        for token in tokens:
            whole = session.cached == session.length
            session.key = extend_key(session.key, token)
            session.length += 1
            if whole and session.holds(session.length, session.key):
                session.cached = session.length
            session.run.pop(session.length, None)

    def close(self, sequence: str) -> None:
        self._sessions.pop(sequence, None)

    def __len__(self) -> int:
        """Tree nodes held, over all sessions."""
        return sum(len(keys) for session in self._sessions.values() for keys in session.run.values())
