"""The start-up check of a vLLM target: are its internals still what engines/vllm/internals.py takes them for?

A few tokens are decided in every way that serving uses, and must be the same: by vLLM's own sampler, by ours without
drafts, with drafts that are all right, and with drafts that are all wrong. A difference at a near-tie is rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.requests import Request, plain_request, request
from actors.errors import EngineError
from actors.messages import Expansion, OpenSequence, ProposalBatch, prefix_key
from actors.settings import LookaheadSettings, SamplingSettings, TargetSettings
from actors.target.pass_exchange import PassExchange
from actors.text.answer_comparison import Comparison, Reference

if TYPE_CHECKING:
    from actors.engines.vllm.runtime import VllmModel

COUNT = 12
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class _Trial:
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    proposed: int
    accepted: int


def check(
    engine: VllmEngine, answer_with: Callable[[PassExchange], None], model: VllmModel, settings: TargetSettings
) -> None:
    """Raises EngineError, which says what differs, when vLLM's internals do not mean what they meant.

    answer_with: lets another exchange answer while the check runs.
    """
    lookahead = min(settings.lookahead.maximum, 4)
    fixed = LookaheadSettings(mode="fixed", maximum=lookahead, wait="never")
    trials = _Trials(
        engine, PassExchange(settings.model_copy(update={"lookahead": fixed}), model.vocabulary, time.monotonic)
    )
    answer_with(trials.exchange)
    count = min(COUNT, settings.context - 4)
    prompt = tuple(t % model.vocabulary for t in (11, 7, 5, 3))[: max(settings.context - count, 1)]
    greedy = SamplingSettings(temperature=0.0, max_tokens=count, ignore_eos=True, margins=True)
    seeded = greedy.model_copy(update={"temperature": 1.0})
    ours = trials.ours("greedy", prompt, greedy)
    _same("greedy decoding by vLLM's own sampler", ours, trials.vllms("vllm", prompt, greedy), model.tolerance)
    kinds = {"greedy": (greedy, ours)}
    if settings.rule == "coupled":
        kinds["seeded"] = (seeded, trials.ours("seeded", prompt, seeded))
    for kind, (sampling, plain) in kinds.items() if lookahead else ():
        right = trials.ours(f"{kind}-right", prompt, sampling, _right(prompt, plain.tokens))
        _same(f"{kind} decoding with right drafts", plain, right.tokens, model.tolerance)
        if right.tokens == plain.tokens and (not right.proposed or right.accepted != right.proposed):
            raise EngineError(f"of {right.proposed} right drafts {right.accepted} were accepted ({kind})")
        foe = trials.ours(f"{kind}-wrong", prompt, sampling, _wrong(prompt, plain.tokens, model.vocabulary))
        _same(f"{kind} decoding with wrong drafts", plain, foe.tokens, model.tolerance)
        if foe.tokens == plain.tokens and (not foe.proposed or foe.accepted):
            raise EngineError(f"of {foe.proposed} wrong drafts {foe.accepted} were accepted ({kind})")


def _right(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[Expansion]:
    """The very tokens, as one chain."""
    return [_after((*prompt, *tokens[:i]), token) for i, token in enumerate(tokens)]


def _wrong(prompt: tuple[int, ...], tokens: tuple[int, ...], vocabulary: int) -> list[Expansion]:
    """Two drafts at every position, the first of which is another token."""
    drafts = []
    for i, token in enumerate(tokens):
        prefix, other = (*prompt, *tokens[:i]), (token + 1) % vocabulary
        drafts += [_after(prefix, other), _after((*prefix, other), token)]
    return drafts


def _after(prefix: tuple[int, ...], token: int) -> Expansion:
    return Expansion(prefix_key(prefix), len(prefix), (token,), (1.0,))


def _same(what: str, plain: _Trial, tokens: Sequence[int], tolerance: float) -> None:
    comparison = Comparison(tolerance)
    comparison.add(what, Reference(plain.tokens, plain.margins), tokens)
    if not comparison.same:
        raise EngineError("; ".join(comparison.different))


class _Trials:
    """Runs one sequence after another, with the drafts that are handed in."""

    def __init__(self, engine: VllmEngine, exchange: PassExchange) -> None:
        self._engine, self.exchange = engine, exchange

    def ours(
        self, name: str, prompt: tuple[int, ...], sampling: SamplingSettings, drafts: Sequence[Expansion] = ()
    ) -> _Trial:
        """Decided by our sampler."""
        opening = OpenSequence(f"check-{name}", prompt, sampling, seed=1)
        self.exchange.open(opening)
        self.exchange.offer(ProposalBatch("check", {opening.sequence: list(drafts)}))
        tokens = self._run(request(opening, (), len(prompt) + COUNT))
        margins: list[float] = []
        proposed = accepted = 0
        while (report := self.exchange.report(opening.sequence, len(prompt) + len(margins))) is not None:
            margins.extend(report.margins)
            proposed += report.proposed
            accepted += report.accepted
        self.exchange.close(opening.sequence)
        return _Trial(tokens, tuple(margins[: len(tokens)]), proposed, accepted)

    def vllms(self, name: str, prompt: tuple[int, ...], sampling: SamplingSettings) -> tuple[int, ...]:
        """Decided by vLLM's sampler."""
        free = sampling.model_copy(update={"margins": False})
        return self._run(plain_request(OpenSequence(f"check-{name}", prompt, free, seed=1), (), len(prompt) + COUNT))

    def _run(self, asked: Request) -> tuple[int, ...]:
        self._engine.start(asked)
        tokens: list[int] = []
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self._engine.wait(1.0)
            for result in self._engine.take():
                if result.error is not None:
                    raise EngineError(f"vLLM refuses what it took before: {result.error}") from result.error
                tokens.extend(result.tokens)
                if result.finish is not None:
                    return tuple(tokens)
        self._engine.end([asked.name])
        raise EngineError(f"vLLM did not finish {asked.name} within {LIMIT_S:.0f} s")
